"""Python objects of any kind and size."""

import contextlib
import threading
import weakref

import numpy as np
import pytest
import samestep as ss

pytestmark = pytest.mark.ranks(1, 2, 3)

OBJECTS = [None, 0, "text", b"", [], {"a": (1, 2.5)}, {"nested": [{"x": None}]}, 10**100]
SIZES = [0, 1, 7, 55, 56, 57, 1000, 4096, 8192, 65_536, 1_200_000, 5_000_001]


def big(rank, size):
    return {"rank": rank, "bytes": bytes([rank]) * size}


@pytest.mark.parametrize("obj", OBJECTS, ids=lambda o: type(o).__name__)
def test_kinds(group, obj):
    root = group.size - 1
    assert group.bcast_object(obj if group.rank == root else "other", root=root) == obj
    assert group.allgather_object((group.rank, obj)) == [(rank, obj) for rank in range(group.size)]
    got = group.gather_object((group.rank, obj), root=root)
    assert got == ([(rank, obj) for rank in range(group.size)] if group.rank == root else None)
    given = [(rank, obj) for rank in range(group.size)] if group.rank == root else None
    assert group.scatter_object(given, root=root) == (group.rank, obj)


@pytest.mark.parametrize("size", SIZES)
def test_sizes(group, size):
    n, rank = group.size, group.rank
    assert group.bcast_object(big(9, size) if rank == 0 else None) == big(9, size)
    assert group.allgather_object(big(rank, size)) == [big(r, size) for r in range(n)]
    right, left = (rank + 1) % n, (rank - 1) % n
    work = group.isend_object(big(rank, size), right, 4)
    assert group.recv_object(left, 4) == big(left, size)
    work.wait()


def test_sizes_that_differ_between_ranks(group):
    n, rank = group.size, group.rank
    expected = [big(r, 1_000_000 * r) for r in range(n)]
    assert group.allgather_object(expected[rank]) == expected
    assert group.gather_object(expected[rank]) == (expected if rank == 0 else None)
    assert group.scatter_object(expected if rank == 0 else None) == expected[rank]


def test_root_gets_the_very_object_back(group):
    obj = {"a": 1}
    got = group.bcast_object(obj)
    assert got == obj
    assert group.rank != 0 or got is obj


def test_arrays_and_classes_of_samestep_travel(group):
    got = group.bcast_object({"x": np.arange(5), "op": ss.AVG} if group.rank == 0 else None)
    assert got["op"] is ss.AVG
    np.testing.assert_array_equal(got["x"], np.arange(5))


def test_non_blocking(group):
    n, rank = group.size, group.rank
    a = group.ibcast_object([rank] if rank == 0 else None)
    b = group.iallgather_object(rank * 10)
    c = group.igather_object(rank, root=n - 1)
    d = group.iscatter_object(list("abcd"[:n]) if rank == 0 else None)
    assert d.wait() == "abcd"[rank]
    assert c.wait() == (list(range(n)) if rank == n - 1 else None)
    assert b.wait() == [10 * r for r in range(n)]
    assert a.wait() == [0]


def test_messages_from_anyone(group):
    works = [group.isend_object(("hello", group.rank), 0, tag=6)]
    if group.rank == 0:
        got = sorted(group.recv_object(tag=6) for _ in range(group.size))
        assert got == [("hello", rank) for rank in range(group.size)]
    for work in works:
        work.wait()


def test_a_receive_that_is_dropped_takes_the_whole_object(group):
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for dropped, obj in ((True, "first"), (False, "second")):
        work = group.isend_object(obj, right)
        if dropped:
            group.irecv_object(left)
        else:
            assert group.recv_object(left) == obj
        work.wait()


CALLS = {
    "bcast_object": lambda group, obj: group.bcast_object(obj, root=group.size - 1),
    "scatter_object": lambda group, obj: group.scatter_object([obj] * group.size, root=group.size - 1),
    "gather_object": lambda group, obj: group.gather_object(obj),
    "allgather_object": lambda group, obj: group.allgather_object(obj),
}


@pytest.mark.parametrize("verb", CALLS)
def test_an_object_that_cannot_be_pickled_holds_nobody_up(group, verb):
    """The rank that gave it learns what pickle said, and the others at once which rank that is."""
    odd = group.size - 1
    if group.rank == odd:
        said = f"^{verb}: the object cannot be pickled: TypeError: cannot pickle '_thread.lock'"
        with pytest.raises(ss.InvalidArgumentError, match=said) as caught:
            CALLS[verb](group, threading.Lock())
        assert isinstance(caught.value.__cause__, TypeError)
    else:
        with pytest.raises(ss.InvalidArgumentError, match=f"{verb}: .*rank {odd} cannot pickle"):
            CALLS[verb](group, "fine")
    assert group.allgather_object(group.rank) == list(range(group.size))


def test_an_object_that_cannot_be_pickled_is_not_sent(group):
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for send in (group.send_object, group.isend_object):
        with pytest.raises(ss.InvalidArgumentError, match=r"^send_object: the object cannot be pickled: "):
            send(lambda: None, right)
    work = group.isend_object("next", right)
    assert group.recv_object(left) == "next"
    work.wait()


def test_no_memory_to_pickle_says_nothing_of_the_object(group):
    class Large:
        def __reduce__(self):
            raise MemoryError

    odd = group.size - 1
    for call in CALLS.values():
        with pytest.raises(MemoryError if group.rank == odd else ss.InvalidArgumentError):
            call(group, Large() if group.rank == odd else "fine")


def test_an_object_that_cannot_be_pickled_is_not_kept(group):
    class Odd:
        def __reduce__(self):
            raise ValueError("\ud800 " + "long " * 1000)

    odd = Odd()
    gone = weakref.ref(odd)
    with contextlib.suppress(ss.InvalidArgumentError):
        group.bcast_object(odd)
    del odd
    assert gone() is None


def test_what_is_no_object_for_each_rank_raises_on_every_rank(group):
    n = group.size
    for given in (
        list(range(n + 1)),
        5,
        set(range(n)),
        dict.fromkeys(range(n)),
        "abcd"[:n],
        iter(range(n)),
        None,
    ):
        with pytest.raises(ss.InvalidArgumentError, match=f"root must give a list of {n} objects"):
            group.scatter_object(given if group.rank == 0 else None)
    assert group.allgather_object(1) == [1] * group.size
