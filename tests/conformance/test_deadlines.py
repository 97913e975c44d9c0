"""A rank that does not come: the others raise TimeoutError naming it; the group ends, other groups go on."""

import builtins
import re
import time

import numpy as np
import pytest
import samestep as ss

pytestmark = pytest.mark.ranks(2, 3)

SHORT = 0.3  # seconds
SOON = 20.0  # of a busy machine, for whatever must not wait for anything: groups wait for 60 s
OWN_DEVICE = "this rank's device"  # not reached in a SHORT time on a busy machine


def verbs(group):
    """Every collective, as a function of the timeout, with sizes of both kinds of path."""
    n = group.size
    x, big = np.ones((n, 2)), np.ones((n, 50_000))
    return {
        "allreduce": lambda t: group.allreduce(x, timeout=t),
        "allreduce of much": lambda t: group.allreduce(big, timeout=t),
        "reduce": lambda t: group.reduce(x, root=n - 1, timeout=t),
        "bcast": lambda t: group.bcast(x, root=n - 1, timeout=t),
        "bcast of much": lambda t: group.bcast(big, root=n - 1, timeout=t),
        "allgather": lambda t: group.allgather(x, timeout=t),
        "allgatherv": lambda t: group.allgatherv(x, timeout=t),
        "gather": lambda t: group.gather(x, root=n - 1, timeout=t),
        "gatherv": lambda t: group.gatherv(x, root=n - 1, timeout=t),
        "scatter": lambda t: group.scatter(None, root=n - 1, timeout=t),
        "scatterv": lambda t: group.scatterv(None, root=n - 1, timeout=t),
        "reduce_scatter": lambda t: group.reduce_scatter(x, timeout=t),
        "alltoall": lambda t: group.alltoall(x, timeout=t),
        "alltoallv": lambda t: group.alltoallv(x, [1] * n, timeout=t),
        "barrier": lambda t: group.barrier(timeout=t),
        "bcast_object": lambda t: group.bcast_object(root=n - 1, timeout=t),
        "allgather_object": lambda t: group.allgather_object(1, timeout=t),
        "gather_object": lambda t: group.gather_object(1, root=n - 1, timeout=t),
        "scatter_object": lambda t: group.scatter_object(root=n - 1, timeout=t),
        "allreduce_tree": lambda t: group.allreduce_tree({"a": x, "b": big}, timeout=t),
    }


NAMES = list(verbs(type("OfOne", (), {"size": 1})()))


@pytest.mark.parametrize("name", NAMES)
def test_the_last_rank_does_not_come(group, name):
    part = group.split(0)
    late = group.size - 1
    if group.rank != late:
        start = time.monotonic()
        with pytest.raises((ss.TimeoutError, ss.PeerLostError)) as caught:
            verbs(part)[name](SHORT if late > 1 else SHORT / 3)  # one that waits alone waits for no other
        assert time.monotonic() - start < SHORT + SOON
        text = str(caught.value)
        assert re.search(rf"waited 0\.\d+ s for (rank {late}\b|{OWN_DEVICE})", text), text
        # Also where another rank that waited has given up before: one cause, one class.
        assert isinstance(caught.value, builtins.TimeoutError) or OWN_DEVICE in text, text
    group.barrier()
    start = time.monotonic()
    with pytest.raises((ss.PeerLostError, ss.TimeoutError)):
        for _ in range(3):  # what the others had sent before they gave up may still be met
            part.barrier(timeout=20)
    part.close()
    assert time.monotonic() - start < SOON, "a group that has ended must say so at once"
    assert group.allreduce(1) == group.size


def test_the_error_names_the_operation_its_number_and_who_has_come(group):
    part = group.split(0)
    part.barrier()
    if group.rank == 0:
        with pytest.raises(ss.TimeoutError) as caught:
            part.allreduce(np.ones(3), "max", timeout=SHORT)
        text = str(caught.value)
        late = "rank 1" if group.size == 2 else "ranks 1 (rank 1 of the world), 2"
        for reported in (
            "allreduce of float64[3] with op max",
            "operation 1",
            part.name,
            f"for {late}",
            "arrived: rank 0 (rank 0 of the world",
        ):
            assert reported in text, f"{reported!r} is not in {text!r}"
    group.barrier()


def test_the_late_rank_learns_who_gave_up(group):
    part = group.split(0)
    if group.rank == 0:
        with pytest.raises(ss.TimeoutError):
            part.allreduce(np.ones(100_000), timeout=SHORT)
    group.barrier()
    if group.rank != 0:
        start = time.monotonic()
        with pytest.raises(ss.PeerLostError, match="rank 0"):
            part.allreduce(np.ones(100_000), timeout=20)
        assert time.monotonic() - start < SOON
    group.barrier()


def test_a_short_wait_breaks_nothing(group):
    x = np.ones(30_000)
    if group.rank == 0:
        work = group.iallreduce(x)
        with pytest.raises(ss.TimeoutError):
            work.wait(timeout=SHORT)
        assert not work.done()
        group.send(np.ones(1), 1, tag=1)
        if group.size == 3:
            group.send(np.ones(1), 2, tag=1)
    else:
        group.recv(np.empty(1), 0, 1)
        work = group.iallreduce(x)
    work.wait()
    assert x[0] == group.size


def test_a_receive_in_vain_is_taken_back(group):
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    out = np.zeros(2)
    start = time.monotonic()
    with pytest.raises(ss.TimeoutError, match=f"{left}"):
        group.recv(out, left, tag=8, timeout=SHORT)
    with pytest.raises(ss.TimeoutError):
        group.recv_object(left, tag=9, timeout=SHORT)
    assert time.monotonic() - start < 2 * SHORT + SOON
    group.barrier()
    work = group.isend(np.full(2, 3.0), right, tag=8)
    late = np.empty(2)
    group.recv(late, left, tag=8)
    work.wait()
    assert late[0] == 3.0
    assert not out.any()
    assert group.allreduce(1) == group.size


def test_a_group_cannot_be_made_without_all_its_members(group):
    part = group.split(0)
    if group.rank == 0:
        with pytest.raises(ss.TimeoutError):
            part.split(0, timeout=SHORT)
        with pytest.raises((ss.TimeoutError, ss.PeerLostError, ss.NotInitializedError)):
            part.barrier(timeout=SHORT)
    group.barrier()
    second = group.split(0)
    if group.rank == 0:
        with pytest.raises(ss.TimeoutError):
            second.group(range(group.size), timeout=SHORT)
    group.barrier()
    assert group.allreduce(1) == group.size


def test_closing_a_group_that_has_ended_waits_for_nobody(group):
    part = group.split(0)
    if group.rank == 0:
        with pytest.raises(ss.TimeoutError):
            part.barrier(timeout=SHORT)
        start = time.monotonic()
        part.close()
        assert time.monotonic() - start < SOON
    group.barrier()
    if group.rank != 0:
        start = time.monotonic()
        part.close()
        assert time.monotonic() - start < SOON
    assert group.allreduce(1) == group.size


def test_a_large_message_that_nobody_takes(group):
    part = group.split(0)
    if group.rank == 0:
        start = time.monotonic()
        for call in (
            lambda: part.send(np.ones(4_000_000), 1, timeout=SHORT),
            lambda: part.send_object(bytes(4_000_000), 1, timeout=SHORT),
        ):
            with pytest.raises((ss.TimeoutError, ss.PeerLostError), match=f"1|{OWN_DEVICE}"):
                call()
        assert time.monotonic() - start < SOON
    group.barrier()
    assert group.allreduce(1) == group.size


def _mean(group, tree, timeout):
    total = ss.Accumulator(group)
    total.add(tree)
    total.mean(timeout=timeout)


TREE_CALLS = {
    "same": lambda group, tree, timeout: group.same(tree, timeout=timeout),
    "weight": lambda group, tree, timeout: group.allreduce_tree(tree, "avg", weight=1.0, timeout=timeout),
    "mean": _mean,
    "tree": lambda group, tree, timeout: group.allreduce_tree(tree, timeout=timeout),
}


@pytest.mark.parametrize("call", TREE_CALLS)
def test_what_comes_before_the_exchange_may_use_up_the_timeout(group, call):
    """To look at the tree and to hash it, say. Others must not be left behind in the operation."""
    own = group.group(range(group.size))  # which the error ends
    if group.rank == 0 and group.size > 1:
        with pytest.raises(ss.TimeoutError, match="rank"):
            TREE_CALLS[call](own, {"x": np.ones(100_000)}, 1e-9)
        with pytest.raises(ss.Error):
            own.barrier()
    for wrong in (0, -1.0, float("nan"), "soon"):
        with pytest.raises(ss.InvalidArgumentError, match="timeout"):
            TREE_CALLS[call](group, {"x": np.ones(3)}, wrong)
    group.barrier()
