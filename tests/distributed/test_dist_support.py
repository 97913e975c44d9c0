"""The table of the support matrix: each cell runs, does what it says, and is on the page as it is in the table."""

import functools
import subprocess
import sys
from pathlib import Path

import fake_arrays
import fake_libraries
import libraries
import numpy as np
import pytest
import samestep as ss
import samestep.distributed as dist
import support
from libraries import contribution
from samestep.gpu.device_array import DeviceArray

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
MAKERS = {"CPU": np.array, "CUDA": fake_arrays.array_of}
"""Arrays on each device of the table."""


def here(x):
    """Its elements in host memory."""
    if isinstance(x, DeviceArray):
        return x.numpy()
    return x.get() if isinstance(x, fake_arrays.Array) else np.asarray(x)


def stack(arrays):
    return np.stack([here(x) for x in arrays])


def assert_same(got, expected):
    libraries.assert_same(here(got), expected)


class Cell:
    """What the checks below work with: the world, and arrays of a device."""

    def __init__(self, group, make):
        self.group, self.make = group, make
        self.rank, self.size = group.rank, group.size
        self.last = group.size - 1

    def mine(self, rank=None):
        return self.make(contribution(self.rank if rank is None else rank, 37))

    def zeros(self, n=1):
        return [self.make(np.zeros(37, "f4")) for _ in range(n)]

    def on_each(self, make):
        """What `make` makes on each of two devices, which no other rank uses."""
        if self.make is np.array:
            return [make(), make()]
        made, usual = [], self.make
        for device in (2 * self.rank, 2 * self.rank + 1):
            fake_arrays.call("SetDevice", device)
            self.make = functools.partial(fake_arrays.array_of, stream=fake_arrays.Stream())
            made.append(make())
        fake_arrays.call("SetDevice", self.group.device)
        self.make = usual
        return made

    def gathered(self):
        return [contribution(r, 37) for r in range(self.size)]

    def total(self):
        return np.asarray(sum(self.gathered()), "f4")


def send(of):
    if of.rank == of.last > 0:
        dist.send(of.mine(), 0, tag=4)
    elif of.rank == 0 < of.last:
        (x,) = of.zeros()
        assert dist.recv(x, of.last, tag=4) == of.last
        assert_same(x, contribution(of.last, 37))


def isend(of):
    if of.rank == of.last > 0:
        dist.isend(of.mine(), 0).wait()
    elif of.rank == 0 < of.last:
        (x,) = of.zeros()
        assert dist.irecv(x).wait() == of.last
        assert_same(x, contribution(of.last, 37))


def broadcast(of):
    x = of.mine()
    dist.broadcast(x, of.last)
    assert_same(x, contribution(of.last, 37))


def all_reduce(of):
    x = of.mine()
    dist.all_reduce(x)
    assert_same(x, of.total())


def reduce(of):
    x = of.mine()
    dist.reduce(x, of.last)
    assert_same(x, of.total() if of.rank == of.last else contribution(of.rank, 37))


def all_gather(of):
    slots = of.zeros(of.size)
    dist.all_gather(slots, of.mine())
    assert_same(stack(slots), np.stack(of.gathered()))


def gather(of):
    slots = of.zeros(of.size) if of.rank == of.last else None
    dist.gather(of.mine(), slots, of.last)
    assert slots is None or np.array_equal(stack(slots), np.stack(of.gathered()))


def scatter(of):
    parts = [of.mine(r) for r in range(of.size)] if of.rank == of.last else None
    (x,) = of.zeros()
    dist.scatter(x, parts, of.last)
    assert_same(x, contribution(of.rank, 37))


def barrier(of):
    assert dist.barrier() is None


def broadcast_multigpu(of):
    pair = of.on_each(of.mine)
    dist.broadcast_multigpu(pair, of.last, src_tensor=1)
    assert_same(stack(pair), np.stack([contribution(of.last, 37)] * 2))


def all_reduce_multigpu(of):
    pair = of.on_each(of.mine)
    dist.all_reduce_multigpu(pair)
    assert_same(stack(pair), np.stack([2 * of.total()] * 2))


def reduce_multigpu(of):
    pair = of.on_each(of.mine)
    dist.reduce_multigpu(pair, of.last, dst_tensor=1)
    if of.rank == of.last:
        assert_same(pair[1], 2 * of.total())


def all_gather_multigpu(of):
    slots = of.on_each(lambda: of.zeros(2 * of.size))
    dist.all_gather_multigpu(slots, of.on_each(of.mine))
    for row in slots:
        assert_same(stack(row), np.repeat(np.stack(of.gathered()), 2, axis=0))


def reduce_scatter(of):
    got = of.group.reduce_scatter(of.make(np.stack([contribution(of.rank, 37)] * of.size)))
    assert_same(got, of.total())


def alltoall(of):
    blocks = np.stack([contribution(of.rank + r, 37) for r in range(of.size)])
    assert_same(of.group.alltoall(of.make(blocks)), blocks)


def alltoallv(of):
    counts = [1] * of.size
    rows = np.stack([contribution(of.rank + r, 37) for r in range(of.size)])
    assert_same(of.group.alltoallv(of.make(rows), counts)[0], rows)


def allgatherv(of):
    parts = [np.full(r + 1, float(r)) for r in range(of.size)]
    assert_same(of.group.allgatherv(of.make(parts[of.rank])), np.concatenate(parts))


def gatherv(of):
    parts = [np.full(r + 1, float(r)) for r in range(of.size)]
    got = of.group.gatherv(of.make(parts[of.rank]), root=of.last)
    if of.rank == of.last:
        assert_same(got, np.concatenate(parts))


def scatterv(of):
    counts = [r + 1 for r in range(of.size)]
    rows = of.make(np.repeat(np.arange(of.size), counts)) if of.rank == 0 else None
    assert_same(of.group.scatterv(rows, counts if of.rank == 0 else None), np.full(of.rank + 1, of.rank))


def sendrecv(of):
    (x,) = of.zeros()
    before, after = (of.rank - 1) % of.size, (of.rank + 1) % of.size
    of.group.sendrecv(of.mine(), after, x, before)
    assert_same(x, contribution(before, 37))


def objects(of):
    everyone = [{"rank": r} for r in range(of.size)]
    return of.group, everyone[of.rank], everyone


def bcast_object(of):
    group, mine, everyone = objects(of)
    assert group.bcast_object(mine, root=of.last) == everyone[-1]


def allgather_object(of):
    group, mine, everyone = objects(of)
    assert group.allgather_object(mine) == everyone


def gather_object(of):
    group, mine, everyone = objects(of)
    assert group.gather_object(mine) == (everyone if of.rank == 0 else None)


def scatter_object(of):
    group, mine, everyone = objects(of)
    assert group.scatter_object(everyone if of.rank == 0 else None) == mine


CHECKS = {
    check.__name__: check
    for check in (
        *(send, isend, broadcast, all_reduce, reduce, all_gather, gather, scatter, barrier),
        *(broadcast_multigpu, all_reduce_multigpu, reduce_multigpu, all_gather_multigpu),
        *(reduce_scatter, alltoall, alltoallv, allgatherv, gatherv, scatterv, sendrecv),
        *(bcast_object, allgather_object, gather_object, scatter_object),
    )
} | {"recv": send, "irecv": isend}


def cells(verb, device):
    """What the table says of this world's backend and a device."""
    how = (support.VERBS | support.BEYOND)[verb]
    return [how[support.COLUMNS.index(c)] for c in support.COLUMNS if c == (dist.get_backend(), device)]


def run_on_the_host(group, verb):
    (how,) = cells(verb, "CPU")
    before = group.counters().operations
    CHECKS[verb](Cell(group, MAKERS["CPU"]))
    most = max(group.allgather_object(group.counters().operations - before))
    if group.size > 1:
        assert (most == 1) == (how == support.NATIVE), f"{verb}: {most} operations"


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("verb", support.VERBS | support.BEYOND)
def test_a_row(group, verb):
    """On the host, in this world's backend."""
    run_on_the_host(group, verb)


@pytest.mark.skipif(fake_libraries.compiler() is None, reason="the fake devices need a C++ compiler")
@pytest.mark.ranks(1, 2, 3, backends=["fakes", "staged", "staged-native"])
@pytest.mark.parametrize("verb", support.VERBS | support.BEYOND)
def test_a_row_on_devices(group, verb):
    """And beside NCCL on the host."""
    if dist.get_backend() == "nccl":
        run_on_the_host(group, verb)
    (how,) = cells(verb, "CUDA")
    before = fake_arrays.nccl_calls()
    CHECKS[verb](Cell(group, MAKERS["CUDA"]))
    calls = max(group.allgather_object(fake_arrays.nccl_calls() - before))
    if group.size > 1 and verb != "barrier" and "object" not in verb:  # which have no arrays on devices
        assert (calls == 0) == (how == support.STAGED), f"{verb}: {calls} calls of NCCL"


def test_every_row_has_a_cell_in_every_column():
    for verb, cells in (support.VERBS | support.BEYOND).items():
        assert len(cells) == len(support.COLUMNS), verb
        assert set(cells) <= set(support.MEANING), verb
    assert set(support.IN_2019) <= set(support.VERBS)
    assert {column.device for column in support.COLUMNS} == set(MAKERS)


def test_every_function_on_arrays_has_a_row():
    of_start_and_groups = {"init_process_group", "destroy_process_group", "new_group", "group", "reduce_op"}
    of_start_and_groups |= {"register_rendezvous_handler"}
    functions = {n for n in dist.__all__ if n.islower() and not n.startswith(("is_", "get_"))}
    assert functions - of_start_and_groups == set(support.VERBS)
    assert all(callable(getattr(ss.Backend, name)) for name in support.BEYOND)


@pytest.mark.skipif(not PAGE.exists(), reason="the pages are not part of this tree")
def test_the_page_is_what_the_command_prints():
    command = [sys.executable, support.__file__]
    made = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert PAGE.read_text() == made.stdout, "python tests/distributed/support.py > docs/support.md"
