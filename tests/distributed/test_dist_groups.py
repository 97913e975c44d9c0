"""Groups: members and others, sorted ranks, global ranks in arguments, disagreement."""

import numpy as np
import pytest
import samestep as ss
import samestep.distributed as dist
from libraries import assert_same, contribution

OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER


@pytest.mark.ranks(1, 2, 3)
def test_the_world_under_its_names(group):
    assert dist.is_initialized()
    for world in (dist.group.WORLD, dist.GroupMember.WORLD, None, group):
        assert (dist.get_rank(world), dist.get_world_size(world)) == (group.rank, group.size)
        assert dist.get_backend(world) == {"native": "gloo", "mpi": "mpi"}[group.kind]


@pytest.mark.ranks(1, 2, 3)
def test_a_group_of_all(group):
    for ranks in (None, range(group.size), iter(reversed(range(group.size))), np.arange(group.size)):
        part = dist.new_group(ranks)
        assert (dist.get_rank(part), dist.get_world_size(part)) == (group.rank, group.size)
        x = np.ones(3)
        dist.all_reduce(x, group=part)
        assert_same(x, np.full(3, float(group.size)))
        assert ss.rank(part) == group.rank


@pytest.mark.ranks(3)
def test_members_have_ranks_in_sorted_order_and_arguments_are_global(group):
    part = dist.new_group([2, 1])
    if group.rank == 0:
        assert part is OUTSIDE
        return
    assert (dist.get_rank(part), dist.get_world_size(part)) == (group.rank - 1, 2)
    x = contribution(group.rank, 5)
    dist.broadcast(x, src=2, group=part)
    assert_same(x, contribution(2, 5))
    x = contribution(group.rank, 5)
    dist.broadcast(x, group=part, group_src=0)
    assert_same(x, contribution(1, 5))
    slots = [np.zeros(5, "f4"), np.zeros(5, "f4")] if group.rank == 1 else None
    dist.gather(contribution(group.rank, 5), slots, dst=1, group=part)
    if slots:
        assert_same(np.stack(slots), [contribution(1, 5), contribution(2, 5)])
    x = contribution(group.rank, 5)
    dist.reduce(x, 2, group=part)
    assert_same(x, contribution(1, 5) + contribution(2, 5) if group.rank == 2 else contribution(1, 5))
    for act in (lambda: dist.broadcast(x, 0, group=part), lambda: dist.scatter(x, group=part)):
        with pytest.raises(ss.InvalidArgumentError, match=r"src 0 is not in the group.*\[1, 2\]"):
            act()


@pytest.mark.ranks(2, 3)
def test_others_get_nothing_at_once_whatever_they_say(group):
    part = dist.new_group([0])
    if group.rank == 0:
        x = np.ones(2)
        dist.all_reduce(x, group=part)
        assert_same(x, np.ones(2))
        return
    assert part is OUTSIDE
    assert (dist.get_rank(part), dist.get_world_size(part)) == (-1, -1)
    x = np.ones(2)
    calls = [
        lambda: dist.all_reduce("x", "no op", group=part, async_op=True),
        lambda: dist.broadcast(x, -7, group=part),
        lambda: dist.reduce(x, "", group=part),
        lambda: dist.all_gather(None, x, group=part),
        lambda: dist.gather(x, x, group=part),
        lambda: dist.scatter(x, x, group=part),
        lambda: dist.barrier(group=part),
        lambda: dist.send(None, 99, group=part, tag=-1),
        lambda: dist.isend(None, 99, group=part),
        lambda: dist.irecv(None, 99, group=part),
        lambda: dist.all_reduce_multigpu(None, group=part),
        lambda: dist.broadcast_multigpu(None, 0, group=part),
        lambda: dist.reduce_multigpu(None, 0, group=part),
        lambda: dist.all_gather_multigpu(None, None, group=part),
        lambda: dist.destroy_process_group(part),
    ]
    assert [call() for call in calls] == [None] * len(calls)
    assert dist.recv(None, 99, group=part) == -1
    assert_same(x, np.ones(2))
    with pytest.raises(ss.InvalidArgumentError, match="not in the group"):
        dist.get_backend(part)


@pytest.mark.ranks(3)
def test_overlapping_groups(group):
    pairs = [[0, 1], [1, 2], [2, 0], [1]]
    parts = [dist.new_group(pair) for pair in pairs]
    requests, results = [], []
    for part in parts:
        results.append(np.full(4, 10.0**group.rank))
        requests.append(dist.all_reduce(results[-1], group=part, async_op=True))
    for request in reversed(requests):
        if request is not None:
            request.wait()
    for pair, x in zip(pairs, results, strict=True):
        members = pair if group.rank in pair else [group.rank]
        assert_same(x, np.full(4, sum(10.0**r for r in members)))


@pytest.mark.ranks(2)
def test_by_the_hundred(group):
    before = list(group._children)
    parts = [dist.new_group([i % 2]) if i % 3 else dist.new_group() for i in range(100)]
    x = np.ones(1)
    for part in parts:
        dist.all_reduce(x, group=part)
    assert x[0] == 2.0**34
    for part in parts:
        dist.destroy_process_group(part)
    assert group._children == before


@pytest.mark.ranks(2, 3)
def test_different_lists_are_an_error_on_all_ranks(group):
    with pytest.raises(ss.MismatchError, match=r"new_group.*\[0\].*\[1\]"):
        dist.new_group([0] if group.rank == 0 else [1])
    dist.barrier()


@pytest.mark.ranks(2, 3)
def test_wrong_lists(group):
    for ranks, kind, text in [
        ([0, 0], ss.InvalidArgumentError, "rank 0 occurs twice"),
        ([group.size], ss.InvalidArgumentError, f"rank {group.size} is outside"),
        ([-1], ss.InvalidArgumentError, "rank -1 is outside"),
        ([], ss.InvalidArgumentError, "empty"),
        (["0"], TypeError, "ranks must be an int, got str"),
        (0, TypeError, "ranks must be a list of ints, got int"),
        ("01", TypeError, "ranks must be a list of ints, got str"),
    ]:
        with pytest.raises(kind, match=text):
            dist.new_group(ranks)
    dist.barrier()


@pytest.mark.ranks(2)
def test_timeout_and_backend_of_a_group(group):
    part = dist.new_group(timeout=0.2)
    assert part.timeout == 0.2
    assert dist.new_group().timeout == group.timeout
    assert dist.get_backend(dist.new_group(backend=dist.get_backend().upper())) == dist.get_backend()
    with pytest.raises(ss.InvalidArgumentError, match="timeout"):
        dist.new_group(timeout=0)
    with pytest.raises(TypeError, match="timeout"):
        dist.new_group(timeout="1")
    with pytest.raises(ss.InvalidArgumentError, match="'tcp'"):
        dist.new_group(backend="tcp")
    with pytest.raises(ss.UnavailableError, match="nccl"):
        dist.new_group(backend="nccl")
    if group.rank == 0:
        for _ in range(2):  # the first breaks the group, the second finds it broken
            with pytest.raises(ss.TimeoutError):
                dist.barrier(part)
    group.barrier()
    dist.destroy_process_group(part)


@pytest.mark.ranks(1, 2)
def test_a_group_that_was_destroyed(group):
    part = dist.new_group()
    dist.destroy_process_group(part)
    dist.destroy_process_group(part)
    with pytest.raises(ss.NotInitializedError, match="has been destroyed"):
        dist.barrier(part)
    dist.barrier()
