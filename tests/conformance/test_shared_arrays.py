"""`initialize(shared_arrays=True)`: NumPy's own arrays in memory that the ranks of a host share."""

import contextvars
import gc
import multiprocessing
import os
import threading

import numpy as np
import pytest
import samestep as ss
import samestep.world.lifecycle
from forks import in_child
from reference import assert_same, reduced, values
from samestep import _core

FROM = 64 << 10  # bytes; smaller arrays are ordinary
MIB = 1 << 20

pytestmark = [
    pytest.mark.ranks(2, 3, backends=["mpi", "native"]),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
    # JAX, loaded by other tests of this launch, warns of any fork; these children use none of its locks.
    pytest.mark.filterwarnings("ignore:os.fork.. was called:RuntimeWarning"),
]


def open_again(group, place, **arguments):
    """The same world anew. Collective."""
    if group.kind == "native":
        arguments |= {"init_method": f"file://{place}", "rank": group.rank, "world_size": group.size}
    ss.finalize()
    return ss.initialize(type(group), timeout=30, **arguments)


@pytest.fixture
def world(group, tmp_path):
    with open_again(group, group.bcast_object(tmp_path / "meeting"), shared_arrays=True) as world:
        yield world


def is_shared(group, x):
    return _core.is_shared(group._comm, x.ctypes.data, x.nbytes)


def usage(group):
    return _core.shared_usage(group._comm)


def test_whatever_numpy_makes_is_shared(world):
    a = np.arange(FROM // 8, dtype="f8")
    b = np.ones(FROM // 8)
    made = [
        a,
        b,
        a * b,
        np.concatenate([a, b]),
        a.astype("c16"),
        np.zeros((3, FROM), "i1"),
        a[::-1].copy(),
        np.empty(FROM, "?"),
    ]
    assert all(is_shared(world, x) for x in made)
    assert not is_shared(world, np.empty(FROM - 1, "i1"))
    assert all(x.ctypes.data % 64 == 0 for x in made)
    assert_same(a * b, np.arange(FROM // 8, dtype="f8"))


@pytest.mark.parametrize("count", [FROM // 4, FROM // 4 + 1, 300_001, 5_000_000])
def test_reductions(world, count):
    inputs = [values(rank, count, "float32") for rank in range(world.size)]
    x = inputs[world.rank] * 1
    assert is_shared(world, x)
    world.allreduce(x)
    assert_same(x, reduced(inputs, "sum"))
    y = inputs[world.rank] * 1
    world.allreduce(y[7:-3:2])
    assert_same(y[7:-3:2], reduced([a[7:-3:2] for a in inputs], "sum"))
    gathered = world.allgather(inputs[world.rank])
    assert is_shared(world, gathered)
    assert_same(gathered, np.stack(inputs))


def test_memory_is_used_again(world):
    x = np.empty(MIB, "i1")
    where = x.ctypes.data
    del x
    before = usage(world)
    for _ in range(100):
        x = np.empty(MIB - 5, "i1")
        assert x.ctypes.data == where
        del x
    after = usage(world)
    assert (after.blocks, after.used, after.present) == (before.blocks, before.used, before.present)


def test_zeros_are_zero_in_memory_that_was_not(world):
    x = np.full(MIB, 7, "i1")
    where = x.ctypes.data
    del x
    x = np.zeros(MIB, "i1")
    assert x.ctypes.data == where
    assert not x.any()


def test_resize_keeps_what_is_there(world):
    expected = np.arange(FROM)
    x = np.arange(FROM)
    for count in (2 * FROM, 2 * FROM + 1, 20 * FROM, FROM, 10):
        x.resize(count, refcheck=False)
        kept = min(count, FROM)
        assert_same(x[:kept], expected[:kept])
        assert not x[FROM:].any()
        assert is_shared(world, x) == (x.nbytes >= FROM)
        assert world.allreduce(x.copy())[9] == 9 * world.size
    x.resize(FROM, refcheck=False)  # it began as an ordinary one
    assert_same(x[:10], expected[:10])
    assert not is_shared(world, x)


def test_arrays_outlive_the_world(group, tmp_path):
    places = group.bcast_object([tmp_path / "first", tmp_path / "second"])
    world = open_again(group, places[0], shared_arrays=True)
    x, inherited = np.full(MIB, 3.0), contextvars.copy_context()
    part = x[100:]
    assert is_shared(world, x)
    with open_again(world, places[1]) as other:
        assert not is_shared(other, x)
        assert not is_shared(world, np.empty(MIB))
        assert not is_shared(world, inherited.run(np.empty, MIB))
        assert not is_shared(other, inherited.run(np.empty, MIB))
        other.allreduce(part)
        assert_same(x, np.where(np.arange(MIB) < 100, 3.0, 3.0 * other.size))
        x.resize(2 * MIB, refcheck=False)
        assert x[MIB - 1] == 3.0 * other.size
        before = usage(world).used
        del part, x
        assert usage(world).used <= before
        assert usage(world).present == 0


def test_other_contexts(world):
    def of_thread(run):
        made = []
        thread = threading.Thread(target=run, args=(lambda: made.append(np.ones(MIB)),))
        thread.start()
        thread.join()
        return made[0]

    ordinary, inherited = of_thread(lambda make: make()), of_thread(contextvars.copy_context().run)
    assert not is_shared(world, ordinary)
    assert is_shared(world, inherited)
    assert_same(world.allreduce(ordinary), world.allreduce(inherited))


def test_many_threads_make_and_drop(world):
    held, lock, wrong = [], threading.Lock(), []

    def work(seed):
        random = np.random.default_rng(seed)
        for step in range(300):
            mark = seed * 1000 + step
            x = np.full(int(random.integers(FROM // 8, 40_000)), mark)
            with lock:
                held.append((mark, x))
                del x
                mark, x = held.pop(int(random.integers(len(held)))) if len(held) > 20 else (mark, None)
            if x is not None and not (x == mark).all():
                wrong.append(mark)
            del x

    before = usage(world).blocks
    threads = [threading.Thread(target=contextvars.copy_context().run, args=(work, s)) for s in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert all((x == mark).all() for mark, x in held)
    assert usage(world).blocks == before + len(held)
    held.clear()
    assert usage(world).blocks == before


def test_a_child_cannot_harm_its_parent(world):
    x, dropped = np.full(MIB, 1 + world.rank), np.ones(MIB)

    def child():
        nonlocal dropped
        fine = bool((x == 1 + world.rank).all())
        x[:] = -1
        del dropped
        made = [np.full(MIB, -2) for _ in range(5)]
        grown = np.ones(FROM)
        grown.resize(2 * FROM, refcheck=False)
        return fine and not any(is_shared(world, m) for m in made) and bool((x == -1).all()) and grown[0] == 1

    ended_well = in_child(lambda: bool(child()))
    total = sum(range(1, world.size + 1))
    for _ in range(3):
        y = x * 1
        assert_same(world.allreduce(y), np.full(MIB, total))
    assert ended_well()
    assert (dropped == 1).all()
    assert_same(world.allreduce(x), np.full(MIB, total))


def test_what_a_child_sees_is_not_used_again_while_it_lives(world):
    seen = [np.full(MIB, 5)]
    where = seen[0].ctypes.data
    read_end, write_end = os.pipe()

    def child():
        os.close(write_end)
        os.read(read_end, 1)  # until the parent has closed its end
        return bool((seen[0] == 5).all())

    ended_well = in_child(child)
    seen.clear()
    assert usage(world).held >= 8 * MIB
    others = [np.full(MIB, 6) for _ in range(10)]
    assert where not in [other.ctypes.data for other in others]
    os.close(write_end)
    os.close(read_end)
    assert ended_well()
    assert usage(world).held == 0
    assert np.full(MIB, 7).ctypes.data == where


def _sum_and_spoil(x):
    total = int(x.sum())
    x[:] = 0
    return total, np.ones(MIB)


def test_multiprocessing(world):
    x = np.arange(FROM)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        answers = pool.map(_sum_and_spoil, [x, x + 1])
    expected = FROM * (FROM - 1) // 2
    assert [total for total, _ in answers] == [expected, expected + FROM]
    assert all(ones.sum() == MIB for _, ones in answers)
    assert_same(world.allreduce(x), np.arange(FROM) * world.size)


def test_a_child_that_ends_like_a_program_is_no_lost_rank(world):
    def falls_off_the_end():
        samestep.world.lifecycle._at_exit()
        return True

    def leaves_the_context():
        with world:
            raise SystemExit

    def finalizes():
        ss.finalize()
        return True

    assert in_child(falls_off_the_end)()
    assert not in_child(leaves_the_context)()
    assert in_child(finalizes)()
    world.barrier()
    assert_same(world.allreduce(np.ones(MIB)), np.full(MIB, float(world.size)))


def test_at_the_limit_arrays_are_ordinary(group, tmp_path, monkeypatch):
    monkeypatch.setenv("SAMESTEP_SHARED_LIMIT", str(8 * MIB))
    with open_again(group, group.bcast_object(tmp_path / "meeting"), shared_arrays=True) as world:
        made = [np.full(MIB, i, "i1") for i in range(20)]
        shared = [is_shared(world, x) for x in made]
        assert shared == [True] * sum(shared) + [False] * (20 - sum(shared))
        assert 4 <= sum(shared) <= 8
        assert usage(world).present <= 8 * MIB
        for i, x in enumerate(made):
            assert (x == i).all()
        assert_same(world.allreduce(made[19]), np.full(MIB, 19 * world.size, "i1"))
        assert not is_shared(world, np.zeros(1 << 30, "i1"))
        del made, x
        assert is_shared(world, np.empty(4 * MIB, "i1"))


def test_a_limit_that_is_none(group, tmp_path, monkeypatch):
    monkeypatch.setenv("SAMESTEP_SHARED_LIMIT", "much")
    with pytest.raises(ss.InvalidArgumentError, match=r"SAMESTEP_SHARED_LIMIT.*much"):
        open_again(group, group.bcast_object(tmp_path / "meeting"), shared_arrays=True)
    assert not ss.initialized()


@pytest.mark.slow
def test_nothing_is_left_behind(group, tmp_path):
    places = group.bcast_object([tmp_path / f"meeting{i}" for i in range(20)])

    def ours():
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), maps.read().count("memfd:samestep")

    seen = []
    for place in places:
        world = open_again(group, place, shared_arrays=True)
        x = np.full(MIB, 1.0)
        assert is_shared(world, x)
        world.allreduce(x)
        assert in_child(lambda x=x: bool(x.any()))()
        ss.finalize()
        del world, x
        gc.collect()
        seen.append(ours())
    assert seen[5:] == [seen[4]] * 15


@pytest.mark.ranks(1, backends=["self", "mpi"])
def test_alone_it_has_no_effect(group):
    kind = type(group)
    ss.finalize()
    with ss.initialize(kind, shared_arrays=True) as world:
        x = np.ones(MIB)
        assert not is_shared(world, x)
        assert usage(world) is None
        assert world.allreduce(x) is x


@pytest.mark.ranks(2, backends=["mpi-only"])
def test_through_mpi_it_has_no_effect(group, monkeypatch):
    monkeypatch.setenv("SAMESTEP_MPI_TRANSPORT", "mpi")
    ss.finalize()
    with ss.initialize("mpi", shared_arrays=True) as world:
        assert world.transport == "mpi"
        x = np.ones(MIB)
        assert not is_shared(world, x)
        assert_same(world.allreduce(x), np.full(MIB, 2.0))


def test_torch_shares_the_memory(world):
    torch = pytest.importorskip("torch")
    x = np.ones(MIB, "f4")
    tensor = torch.from_numpy(x)
    assert _core.is_shared(world._comm, tensor.data_ptr(), x.nbytes)
    assert not _core.is_shared(world._comm, torch.ones(MIB).data_ptr(), x.nbytes)
    world.allreduce(tensor)
    assert_same(x, np.full(MIB, world.size, "f4"))
