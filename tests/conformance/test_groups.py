"""Groups: split, by members only, overlapping, nested, node and cross."""

import numpy as np
import pytest
import samestep as ss
from reference import assert_same, reduced, values


@pytest.mark.ranks(1, 2, 3, 4)
def test_split_into_even_and_odd(group):
    part = group.split(group.rank % 2)
    members = [r for r in range(group.size) if r % 2 == group.rank % 2]
    assert part.size == len(members)
    assert part.rank == members.index(group.rank)
    x = values(group.rank, 100, "float32")
    assert part.allreduce(x) is x
    assert_same(x, reduced([values(r, 100, "float32") for r in members], "sum"))
    part.close()
    group.barrier()


@pytest.mark.ranks(2, 3, 4)
def test_keys_order_the_new_ranks(group):
    part = group.split(0, key=-group.rank)
    assert part.rank == group.size - 1 - group.rank
    assert part.allgather_object(group.rank) == list(reversed(range(group.size)))
    part = group.split(0, key=7)  # ties: by old rank
    assert part.rank == group.rank


@pytest.mark.ranks(2, 3)
def test_no_color_no_group(group):
    part = group.split(None if group.rank == 0 else 1)
    if group.rank == 0:
        assert part is None
    else:
        assert part.allgather_object(group.rank) == list(range(1, group.size))


@pytest.mark.ranks(1, 2, 3)
def test_a_group_of_oneself_has_every_verb(group):
    alone = group.split(group.rank)
    assert (alone.rank, alone.size) == (0, 1)
    x = np.arange(3.0)
    assert alone.allreduce(x) is x
    assert_same(alone.allgather(x), x[None])
    assert alone.allgather_object("me") == ["me"]
    assert alone.bcast_object("me") == "me"
    out = np.empty(3)
    work = alone.isend(x, 0)
    alone.recv(out, 0)
    work.wait()
    assert_same(out, np.arange(3.0))
    alone.barrier()


@pytest.mark.ranks(3, 4)
def test_called_by_members_only(group):
    if group.rank == 1:  # does something else meanwhile
        assert_same(group.recv(out := np.empty(1), 0) and out, np.ones(1))
    else:
        members = [r for r in reversed(range(group.size)) if r != 1]
        part = group.group(members)
        assert part.rank == members.index(group.rank)
        assert part.allgather_object(group.rank) == members
        x = values(group.rank, 50, "float32")
        part.allreduce(x)
        assert_same(x, reduced([values(r, 50, "float32") for r in members], "sum"))
        if group.rank == 0:
            group.send(np.ones(1), 1)
    group.barrier()


@pytest.mark.ranks(3)
def test_overlapping_groups(group):
    pairs = [(0, 1), (1, 2), (0, 2)]
    mine = {pair: group.group(pair) for pair in pairs if group.rank in pair}
    works = {}
    for pair, part in mine.items():
        works[pair] = part.iallreduce(np.full(5, 10.0 * group.rank + sum(pair)))
    for pair in reversed(list(mine)):
        assert_same(works[pair].wait(), np.full(5, 10.0 * sum(pair) + 2 * sum(pair)))


@pytest.mark.ranks(4)
def test_groups_of_groups(group):
    half = group.split(group.rank // 2)
    quarter = half.split(half.rank)
    assert quarter.size == 1
    again = group.split(group.rank % 2)
    x = np.full(3, float(group.rank))
    half.allreduce(x)
    again.allreduce(x)
    assert_same(x, np.full(3, 6.0))


@pytest.mark.ranks(3, 4)
def test_roots_and_ranks_are_those_of_the_group(group):
    part = group.split(0, key=-group.rank)
    x = np.full(2, float(group.rank))
    part.bcast(x, root=0)
    assert_same(x, np.full(2, float(group.size - 1)))
    got = part.gather_object(group.rank, root=1)
    assert got == (list(reversed(range(group.size))) if part.rank == 1 else None)
    right, left = (part.rank + 1) % part.size, (part.rank - 1) % part.size
    work = part.isend(np.full(1, float(group.rank)), right, 3)
    out = np.empty(1)
    assert part.recv(out).source == left
    work.wait()
    assert out[0] == (group.rank + 1) % group.size


@pytest.mark.ranks(2, 3)
def test_messages_of_different_groups_do_not_meet(group):
    part = group.split(0)
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    works = [group.isend(np.full(1, 1.0), right, 5), part.isend(np.full(1, 2.0), right, 5)]
    out = np.empty(1)
    part.recv(out, left, 5)
    assert out[0] == 2.0
    group.recv(out, left, 5)
    assert out[0] == 1.0
    for work in works:
        work.wait()


@pytest.mark.ranks(2, 3)
def test_operations_of_different_groups_may_interleave(group):
    a, b = group.split(0), group.split(0, key=-group.rank)
    order = [a, b] if group.rank == 0 else [b, a]  # each group sees its own order only
    works = [g.iallreduce(np.full(2, 1.0 if g is a else 10.0)) for g in order]
    for g, work in zip(order, works, strict=True):
        assert_same(work.wait(), np.full(2, (1.0 if g is a else 10.0) * group.size))


@pytest.mark.ranks(2)
def test_a_hundred_groups(group):
    parts = [group.split(i % 3) for i in range(100)]
    for part in parts:
        assert part.allreduce(1) == group.size
    for part in parts:
        part.close()
    assert group.allreduce(1) == group.size


@pytest.mark.ranks(1, 2, 3)
def test_a_closed_group_says_so(group):
    part = group.split(0)
    part.allreduce(np.ones(1))
    part.close()
    part.close()
    assert part.closed
    for call in (part.barrier, lambda: part.allreduce(np.ones(1)), lambda: part.split(0)):
        with pytest.raises(ss.NotInitializedError, match="closed"):
            call()
    assert group.allreduce(1) == group.size


@pytest.mark.ranks(1, 2)
def test_a_group_as_context(group):
    with group.split(0) as part:
        assert part.allreduce(1) == group.size
    assert part.closed


@pytest.mark.ranks(1, 2, 3)
def test_places(group):
    places = group.allgather_object((group.node_rank, group.local_rank))
    here = [rank for rank, (host, _) in enumerate(places) if host == group.node_rank]
    lane = [rank for rank, (_, local) in enumerate(places) if local == group.local_rank]
    assert (group.local_rank, group.local_size) == (here.index(group.rank), len(here))
    assert {host for host, _ in places} == set(range(group.node_count))
    assert group.transport != "shm" or group.node_count == 1
    node, cross = group.node, group.cross
    assert (node.rank, node.size) == (group.local_rank, group.local_size)
    assert (cross.rank, cross.size) == (lane.index(group.rank), len(lane))
    assert node.allreduce(group.rank) == sum(here)
    assert cross.allreduce(group.rank) == sum(lane)
    assert group.node is node
    assert group.cross is cross


@pytest.mark.ranks(1, 2, 3)
def test_names(group):
    part = group.split(0)
    assert group.name == "world"
    assert part.name.startswith("world")
    assert part.name != group.name
    assert "rank" in repr(part)
    assert part.name in repr(part)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("ranks", "named"), [([0, 0, 1], "0"), ([0, 1, 7], "7"), ([-1, 0], "-1"), ([], "rank")], ids=str
)
def test_wrong_members(group, ranks, named):
    with pytest.raises(ss.InvalidArgumentError, match=named):
        group.group(ranks)
    assert group.allreduce(1) == 3


@pytest.mark.ranks(3)
def test_one_who_is_no_member_must_not_call(group):
    others = [r for r in range(3) if r != group.rank]
    with pytest.raises(ss.InvalidArgumentError, match=f"{group.rank}"):
        group.group(others)
    assert group.allreduce(1) == 3


@pytest.mark.ranks(2, 3)
def test_messages_of_many_groups_meet_only_their_own(group):
    turned = [group.split(0, key=-group.rank if i % 2 else group.rank) for i in range(20)]
    last = group.group([0, group.size - 1]) if group.rank in (0, group.size - 1) else None
    works, out = [], np.empty((20, 1))
    for i, part in enumerate(turned):
        works.append(part.isend(np.full(1, 100.0 * i + part.rank), (part.rank + 1) % part.size, 5))
        works.append(part.iallreduce(np.full(3000, float(i))))  # too many for the headers, in pieces
    for i in reversed(range(20)):
        status = turned[i].recv(out[i], ss.ANY, ss.ANY)
        assert (status.source, status.tag) == ((turned[i].rank - 1) % group.size, 5)
        assert out[i] == 100.0 * i + status.source
    for i, work in enumerate(works):
        total = work.wait()
        if i % 2:
            assert_same(total, np.full(3000, group.size * float(i // 2)))
    for i in (3, 17, 0):  # what comes after takes their place
        turned[i].close()
        turned[i] = group.split(0)
    for i, part in enumerate(turned):
        assert_same(part.allreduce(np.full(1, float(i))), np.full(1, group.size * float(i)))
    if last is not None:
        assert last.allgather_object(group.rank) == [0, group.size - 1]
        last.close()
    group.barrier()
