"""Long random schedules of verbs, sizes, memories and groups, many of them pending at a time, against a NumPy model.

All ranks draw the same schedule from the same seed.
"""

import random

import numpy as np
import pytest
from reference import assert_same

OPERATIONS = 300  # in each test; 5,400 for each backend of several ranks
MOST_UNDER_WAY = 12
SIZES = (0, 1, 2, 5, 14, 27, 130, 1000, 3001, 9000, 20_011, 100_003)
VERBS = (
    "allreduce",
    "reduce",
    "bcast",
    "allgather",
    "reduce_scatter",
    "alltoall",
    "gather",
    "scatter",
    "send",
)
pytestmark = pytest.mark.ranks(2, 3, 4, timeout=300)


def values(rank, shape, salt):
    count = int(np.prod(shape))
    return ((np.arange(count) * 7 + 13 * rank + salt) % 61).astype("float32").reshape(shape)


class Player:
    """Starts operations on one group and knows what each must give."""

    def __init__(self, group, shared):
        self.group = group
        self.shared = shared

    def place(self, array):
        if not self.shared:
            return array
        there = self.group.empty(array.shape, array.dtype)
        there[...] = array
        return there

    def start(self, verb, count, root, salt):  # noqa: PLR0911 - one for each verb
        """(work, the array to look at, what it must hold)."""
        group, size, rank = self.group, self.group.size, self.group.rank
        mine = self.place(values(rank, (count,), salt))
        blocks = self.place(values(rank, (size, count), salt))
        everyone = [values(r, (count,), salt) for r in range(size)]
        everyones_blocks = [values(r, (size, count), salt) for r in range(size)]
        into = self.place(np.zeros((size, count), "float32"))
        if verb == "allreduce":
            return group.iallreduce(mine), mine, sum(everyone)
        if verb == "reduce":
            return group.ireduce(mine, root=root), mine, sum(everyone) if rank == root else everyone[rank]
        if verb == "bcast":
            return group.ibcast(mine, root=root), mine, everyone[root]
        if verb == "allgather":
            return group.iallgather(mine, out=into), into, np.stack(everyone)
        if verb == "reduce_scatter":
            return group.ireduce_scatter(blocks, out=mine), mine, sum(everyones_blocks)[rank]
        if verb == "alltoall":
            return group.ialltoall(blocks, out=into), into, np.stack([b[rank] for b in everyones_blocks])
        if verb == "gather":
            out = into if rank == root else None
            expected = np.stack(everyone) if rank == root else np.zeros((size, count), "float32")
            return group.igather(mine, root=root, out=out), into, expected
        if verb == "scatter":
            sent = blocks if rank == root else None
            return group.iscatter(sent, root=root, out=mine), mine, everyones_blocks[root][rank]
        work = group.isend(mine, (rank + 1) % size, tag=salt)
        left = (rank - 1) % size
        received = self.place(np.zeros(count, "float32"))
        return _Both(work, group.irecv(received, left, tag=salt)), received, everyone[left]


class _Both:
    def __init__(self, *works):
        self.works = works

    def wait(self):
        for work in self.works:
            work.wait()


@pytest.mark.parametrize("shared", [False, True, None], ids=["private", "shared", "mixed"])
@pytest.mark.parametrize("seed", [1, 2])
def test_random_schedules(group, seed, shared):
    draw = random.Random(seed)  # the same on all ranks
    own = random.Random(100 * seed + group.rank)
    part = group.split(group.rank % 2)
    others = group.split(0, -group.rank)
    under_way = []
    for salt in range(OPERATIONS):
        verb = draw.choice(VERBS)
        count = draw.choice(SIZES[:9]) if draw.random() < 0.97 else draw.choice(SIZES)
        target = draw.choice([group, group, part, others])
        shares = own.random() < 0.5 if shared is None else shared
        root = draw.randrange(1, 1000) % target.size
        under_way.append(Player(target, shares).start(verb, count, root, salt))
        while len(under_way) > draw.randrange(MOST_UNDER_WAY):
            work, array, expected = under_way.pop(draw.randrange(len(under_way)))
            work.wait()
            assert_same(array, np.asarray(expected, "float32"))
    for work, array, expected in under_way:
        work.wait()
        assert_same(array, np.asarray(expected, "float32"))
    part.close()
    others.close()
