"""Messages: matching by tag, order, global ranks, wrong receives."""

import numpy as np
import pytest
import samestep as ss
import samestep.distributed as dist
from libraries import SHAPES, WRITABLE, assert_same, contribution, make


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("library", WRITABLE)
def test_send_and_recv(group, library):
    for shape in SHAPES:
        x = make(library, contribution(group.rank, shape))
        if group.rank == 0:
            for r in range(1, group.size):
                assert dist.send(x, r) is None
                assert dist.recv(x, src=r) == r
                assert_same(x, contribution(r, shape))
                x = make(library, contribution(0, shape))
        else:
            got = make(library, np.zeros(shape, "f4"))
            assert dist.recv(got) == 0
            assert_same(got, contribution(0, shape))
            dist.send(x, 0)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("count", [1, 300_000])
def test_a_ring_of_isend_then_irecv(group, count):
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    x, got = np.full(count, float(group.rank)), np.empty(count)
    sent = dist.isend(x, right)
    received = dist.irecv(got, left)
    assert received.wait() == left
    assert received.is_completed()
    assert sent.wait() is None
    assert sent.is_completed()
    assert_same(got, np.full(count, float(left)))


@pytest.mark.ranks(2, 3)
def test_a_send_that_is_dropped_neither_waits_nor_is_lost(group):
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    x, got = np.full(300_000, float(group.rank)), np.empty(300_000)
    dist.isend(x, right)
    assert dist.recv(got, left) == left
    assert_same(got, np.full(300_000, float(left)))


@pytest.mark.ranks(2, 3)
def test_tags_are_received_in_any_order_and_equal_ones_in_theirs(group):
    if group.rank == 0:
        for tag in (5, 0, 2**31 - 1, 5):
            for r in range(1, group.size):
                dist.isend(np.full(1, float(tag)), r, tag=tag)
        for r in range(1, group.size):
            dist.isend(np.full(1, 6.0), r, tag=5)
        dist.barrier()
        return
    got = np.empty(1)
    for tag, value in [(2**31 - 1, 2.0**31 - 1), (5, 5.0), (5, 5.0), (0, 0.0), (5, 6.0)]:
        assert dist.recv(got, tag=tag) == 0
        assert got[0] == value
    dist.barrier()


@pytest.mark.ranks(2, 3)
def test_from_anyone(group):
    if group.rank:
        dist.send(np.full(1, float(group.rank)), 0)
        dist.send(np.full(1, 10.0 * group.rank), 0, tag=3)
        return
    seen, got = {}, np.empty(1)
    for _ in range(1, group.size):
        sender = dist.recv(got)
        seen[sender] = got[0]
    assert seen == {r: float(r) for r in range(1, group.size)}
    senders = {dist.irecv(got, tag=3).wait() for _ in range(1, group.size)}
    assert senders == set(range(1, group.size))


@pytest.mark.ranks(3)
def test_ranks_are_global_in_a_group_too(group):
    part = dist.new_group([1, 2])
    got = np.empty(1)
    if group.rank == 1:
        dist.send(np.full(1, 7.0), 2, group=part)
        assert dist.recv(got, group_src=1, group=part) == 2
    elif group.rank == 2:
        assert dist.recv(got, src=1, group=part) == 1
        dist.send(np.full(1, 8.0), group_dst=0, group=part)
        with pytest.raises(ss.InvalidArgumentError, match=r"dst 0 is not in the group.*\[1, 2\]"):
            dist.send(got, 0, group=part)
        with pytest.raises(ss.InvalidArgumentError, match="this rank itself, 2"):
            dist.send(got, group_dst=1, group=part)


@pytest.mark.ranks(2)
def test_messages_of_groups_do_not_meet(group):
    part = dist.new_group()
    if group.rank == 0:
        dist.isend(np.full(1, 1.0), 1)
        dist.isend(np.full(1, 2.0), 1, group=part)
    else:
        got = np.empty(1)
        assert dist.recv(got, group=part) == 0
        assert got[0] == 2.0
        assert dist.recv(got) == 0
        assert got[0] == 1.0
    dist.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrong", [np.zeros(4, "f4"), np.zeros(2, "f4"), np.zeros(3, "i4")], ids=str)
def test_another_count_or_dtype_is_consumed(group, wrong):
    if group.rank == 0:
        dist.send(np.ones(3, "f4"), 1)
        dist.send(np.full(3, 2, "f4"), 1)
    else:
        before = wrong.copy()
        with pytest.raises(ss.MismatchError, match="rank 0"):
            dist.recv(wrong, 0)
        assert_same(wrong, before)
        got = np.empty(3, "f4")
        dist.recv(got, 0)
        assert_same(got, np.full(3, 2, "f4"))
    dist.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("library", ["jax", "read-only"])
def test_nothing_is_received_into_what_cannot_be_written(group, library):
    fixed = make(library, np.ones(2))
    for act in (lambda: dist.recv(fixed, 1 - group.rank), lambda: dist.irecv(fixed)):
        with pytest.raises(ss.InvalidArgumentError, match=r"recv: tensor.*cannot be written"):
            act()
    dist.barrier()


@pytest.mark.ranks(2)
def test_wrong_arguments(group):
    x = np.ones(2)
    other = 1 - group.rank
    for tag in (-1, 2**31):
        for act in (dist.send, dist.isend, dist.recv, dist.irecv):
            with pytest.raises(ss.InvalidArgumentError, match=f"{act.__name__}: tag"):
                act(x, other, tag=tag)
    for act in (dist.send, dist.isend, dist.recv, dist.irecv):
        with pytest.raises(ss.InvalidArgumentError, match="this rank itself"):
            act(x, group.rank)
        with pytest.raises(TypeError, match="tag must be an int"):
            act(x, other, tag="0")
        with pytest.raises(TypeError, match="tensor must be an array"):
            act([1.0], other)
    with pytest.raises(TypeError, match="dst"):
        dist.send(x)
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_receive_that_runs_out_is_taken_back(group):
    part = dist.new_group(timeout=0.2)
    got = np.empty(1)
    if group.rank == 0:
        with pytest.raises(ss.TimeoutError):
            dist.recv(got, 1, group=part)
    group.barrier()
    if group.rank == 1:
        dist.isend(np.full(1, 4.0), 0, group=part)
    group.barrier()  # the next receive has 0.2 s, too
    if group.rank == 0:
        again = np.empty(1)
        assert dist.recv(again, 1, group=part) == 1
        assert again[0] == 4.0
    group.barrier()
