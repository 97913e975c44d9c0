"""Start and end: initialize, the one world, finalize, and again; MPI by us or by the application."""

import contextlib
import gc
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import samestep as ss
from forks import in_child
from reference import assert_same
from samestep.launch import network


@pytest.fixture
def group(group, monkeypatch):
    """The world; a native one is made as by `samestep run`: the environment says where its ranks meet."""
    if group.kind != "native" or group.size == 1:
        yield group
        return
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(network.reserve_port()).getsockname()[1] if group.rank == 0 else None
        names = group.allgather_object(os.uname().nodename)
        monkeypatch.setenv("MASTER_ADDR", names[0] if len(set(names)) > 1 else "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(group.bcast_object(port)))
        ss.finalize()
        yield ss.initialize(type(group), timeout=group.timeout)
        ss.finalize()


@pytest.mark.ranks(1, 2)
def test_there_is_one_world(group):
    kind = type(group)
    assert ss.initialized()
    assert ss.initialized(kind)
    assert ss.get_distributed_backend() is group
    assert ss.get_distributed_backend(kind) is group
    assert ss.get_distributed_backend(group.kind) is group
    assert ss.initialize(kind, timeout=group.timeout) is group
    assert ss.initialize(timeout=group.timeout) is group


@pytest.mark.ranks(1, 2)
def test_other_arguments_the_second_time(group):
    for arguments, named in [
        ({"timeout": group.timeout + 1}, "timeout"),
        ({"timeout": group.timeout, "cuda_devices": ss.missing}, "cuda_devices"),
        ({"timeout": group.timeout, "rank": 0}, "rank"),
    ]:
        with pytest.raises(ss.InvalidArgumentError, match=named):
            ss.initialize(type(group), **arguments)
    other = ss.NativeBackend if group.kind == "mpi" else ss.MPIBackend
    with pytest.raises(ss.InvalidArgumentError, match="backend"):
        ss.initialize(other, timeout=group.timeout)
    with pytest.raises(ss.NotInitializedError, match=other.__name__):
        ss.get_distributed_backend(other)
    assert not ss.initialized(other)
    assert group.allreduce(1) == group.size


@pytest.mark.ranks(1, 2)
def test_an_instance_for_the_class(group):
    with pytest.raises(TypeError, match=f"class, not an instance.*{type(group).__name__}"):
        ss.initialize(group)


@pytest.mark.ranks(1, 2, 3)
def test_again_and_again(group):
    kind = type(group)
    for i in range(5):
        ss.finalize()
        ss.finalize()
        assert not ss.initialized()
        with pytest.raises(ss.NotInitializedError, match=r"initialize\(\)"):
            ss.get_distributed_backend()
        with pytest.raises(ss.NotInitializedError):
            group.barrier()
        group = ss.initialize(kind, timeout=30 + i)
        assert group.timeout == 30 + i
        part = group.split(0)
        assert part.allreduce(1) == group.size
        assert group.allreduce(group.rank) == sum(range(group.size))


def held():
    gc.collect()
    shared = sum("memfd" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return len(os.listdir("/proc/self/fd")), shared, len(os.listdir("/proc/self/task"))


def held_at_last(first):
    """What is held as soon as it is no more than `first`, or after 30 seconds.

    The thread that tells of ranks that do not come ends by itself, soon after all have met.
    """
    deadline = time.monotonic() + 30
    while True:
        now = held()
        if all(n <= most for n, most in zip(now, first, strict=True)) or time.monotonic() > deadline:
            return now
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.ranks(2, backends=["mpi"])
def test_a_thousand_worlds_over_mpi_leave_nothing_behind(group):
    seen = []
    del group
    for i in range(1000):
        ss.finalize()
        if i % 250 == 249:
            seen.append(held_at_last(seen[0]) if seen else held())
        world = ss.initialize("mpi")
        assert world.allreduce(np.full(1000, 1.0))[0] == 2
        assert world.split(0).allreduce(1) == 2
        del world
    # A thread of MPI may have ended meanwhile.
    assert all(now <= first for later in seen[1:] for now, first in zip(later, seen[0], strict=True)), seen


@pytest.mark.ranks(1, 2)
def test_the_world_as_context(group):
    kind = type(group)
    ss.finalize()
    with ss.initialize(kind) as world:
        assert world.allreduce(1) == world.size
        part = world.split(0)
    assert world.closed
    assert part.closed
    assert not ss.initialized()


@pytest.mark.ranks(2, backends=["mpi"])
def test_a_context_that_ends_with_an_error_tells_the_others(group):
    ss.finalize()
    start = time.monotonic()
    if group.rank == 0:
        with pytest.raises(KeyError), ss.initialize("mpi", timeout=20):
            raise KeyError("lost key")
    else:
        error = pytest.raises(ss.PeerLostError, match=r"rank 0.*KeyError.*lost key")
        with error, ss.initialize("mpi", timeout=20) as world:
            world.barrier()
    assert time.monotonic() - start < 10
    ss.finalize()
    assert ss.initialize("mpi").allreduce(1) == 2


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"timeout": 0}, "timeout"), ({"timeout": -1}, "timeout"), ({"world_size": 7}, "7"), ({"rank": 7}, "7")],
    ids=str,
)
def test_wrong_arguments(group, arguments, named):
    kind = type(group)
    ss.finalize()
    with pytest.raises((ss.InvalidArgumentError, ss.UnavailableError), match=named):
        ss.initialize(kind, **arguments)
    assert not ss.initialized()
    assert ss.initialize(kind).allreduce(1) == group.size


@pytest.mark.ranks(1, 2)
def test_unknown_backends(group):
    ss.finalize()
    with pytest.raises(ss.InvalidArgumentError, match=r"'mpi'.*'nccl'.*'native'"):
        ss.initialize("gloo")
    for wrong in (7, int, ss.Backend):
        with pytest.raises(TypeError, match="backend"):
            ss.initialize(wrong)


@pytest.mark.ranks(1, 2)
def test_rank_and_world_size_that_agree_with_the_launcher(group):
    kind, rank, size = type(group), group.rank, group.size
    ss.finalize()
    assert ss.initialize(kind, rank=rank, world_size=size).size == size


@pytest.mark.ranks(1, 2)
def test_without_a_gpu_the_default_is_quiet_and_a_list_says_what_is_missing(group):
    if group.device is not None:
        pytest.skip("this machine has a GPU")
    kind = type(group)
    for arguments in ({"cuda_devices": [0, 1]}, {"amdgpu_devices": [0, 1]}):
        ss.finalize()
        with pytest.raises(ss.UnavailableError, match=r"(?i)cuda|nvidia|amd|hip|rocm"):
            ss.initialize(kind, **arguments)
    assert ss.initialize(kind, cuda_devices=ss.missing, amdgpu_devices=ss.missing).device is None


@pytest.mark.ranks(1, 2)
def test_nccl_without_a_gpu_says_what_is_missing_and_how_to_get_it(group):
    ss.finalize()
    with pytest.raises(ss.UnavailableError, match=r"(?i)nccl"):
        ss.initialize(ss.NCCLBackend)
    assert not ss.initialized()


@pytest.mark.ranks(2, 3, backends=["mpi"])
def test_an_application_that_uses_mpi4py_is_undisturbed(group):
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    assert world.Get_errhandler() == MPI.ERRORS_RETURN  # as mpi4py sets it
    for i in range(50):
        theirs = np.full(100, float(i))
        request = world.Iallreduce(MPI.IN_PLACE, theirs)
        ours = np.full(1000 if i % 2 else 3, float(i))
        work = group.iallreduce(ours)
        sent = world.isend(("object", i), (world.rank + 1) % world.size, tag=0)
        assert world.recv(source=(world.rank - 1) % world.size, tag=0) == ("object", i)
        sent.wait()
        assert world.bcast(i if world.rank == 0 else None) == i
        request.Wait()
        work.wait()
        assert_same(theirs, np.full(100, float(i * group.size)))
        assert_same(ours, np.full(ours.size, float(i * group.size)))
    assert world.Get_errhandler() == MPI.ERRORS_RETURN
    ss.finalize()
    assert not MPI.Is_finalized()
    assert world.allreduce(1) == group.size


@pytest.mark.ranks(2, backends=["mpi"])
def test_their_wildcard_receives_never_see_our_messages(group):
    from mpi4py import MPI

    group.isend(np.ones(5), 1 - group.rank, tag=0)
    group.barrier()
    assert MPI.COMM_WORLD.iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG) is False
    group.recv(np.empty(5))


@pytest.mark.ranks(2, fresh=True)
def test_mpi_started_by_the_application(ranks):
    from mpi4py import MPI

    half = MPI.COMM_WORLD.Split(0, -MPI.COMM_WORLD.rank)
    assert half.allreduce(1) == ranks
    world = ss.initialize("mpi")
    assert (world.rank, world.size) == (MPI.COMM_WORLD.rank, ranks)
    assert world.allreduce(1) == ranks
    assert half.allreduce(1) == ranks
    ss.finalize()
    assert half.allreduce(1) == ranks
    half.Free()
    assert not MPI.Is_finalized()


@pytest.mark.ranks(2, 3)
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:os.fork.. was called:RuntimeWarning")  # of JAX, loaded by other tests
def test_a_forked_child_is_no_rank(group):
    part = group.split(0)
    to, by = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    x, y = np.zeros(3), np.zeros(3)
    pending = group.irecv(x, by)
    dropped = [group.irecv(y, by)]
    calls = [
        lambda: group.allreduce(np.ones(1)),
        lambda: group.allreduce(np.ones(100_000)),
        lambda: group.allgather_object(1),
        lambda: group.allreduce_tree({"w": np.ones(3)}),
        group.barrier,
        part.barrier,
        lambda: group.send(np.ones(1), to),
        lambda: group.recv(np.ones(1), by),
        lambda: group.split(0),
        pending.done,
        pending.wait,
    ]

    def is_refused_everything():
        for call in calls:
            with pytest.raises(
                ss.NotInitializedError, match=f"forked from rank {group.rank}; .*samestep run"
            ):
                call()
        dropped.clear()  # whose end the parent waits for
        group.close()
        return True

    assert in_child(is_refused_everything)()
    group.barrier()  # nobody sends before all children have looked
    for work, received in ((pending, x), (dropped[0], y)):
        group.send(np.full(3, float(group.rank)), to)
        work.wait()
        assert_same(received, np.full(3, float(by)))
    assert part.allreduce(1) == group.size
    with group.split(0) as another:
        assert another.allreduce(1) == group.size
    assert_same(group.allreduce(np.ones(100_000)), np.full(100_000, float(group.size)))


@pytest.mark.ranks(2, 3)
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:os.fork.. was called:RuntimeWarning")  # of JAX, loaded by other tests
def test_a_forked_child_may_drop_operations(group):
    to, by = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    x, sums = np.zeros(3), np.ones(100_000)
    pending = [group.irecv(x, by), group.iallreduce(sums)]

    def drops_them():
        seen = []
        sys.unraisablehook = seen.append
        pending.clear()
        gc.collect()
        return not seen

    assert in_child(drops_them)()
    group.barrier()  # nobody sends before all children have ended
    group.send(np.full(3, float(group.rank)), to)
    for work in pending:
        work.wait()
    assert_same(x, np.full(3, float(by)))
    assert_same(sums, np.full(100_000, float(group.size)))


@pytest.mark.ranks(2, fresh=True)
def test_mpi_started_by_us(ranks):
    world = ss.initialize()
    assert world.kind == "mpi"
    assert world.allreduce(1) == ranks
    from mpi4py import MPI

    assert MPI.Is_initialized()
    assert MPI.COMM_WORLD.allreduce(1) == ranks
    ss.finalize()
    assert MPI.COMM_WORLD.allreduce(1) == ranks


@pytest.mark.slow
@pytest.mark.ranks(3, fresh=True)
def test_hosts_with_unequal_numbers_of_ranks(ranks):
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    os.environ["SAMESTEP_HOST_ID"] = "aba"[rank]
    world = ss.initialize("mpi")
    assert world.node_count == 2
    assert (world.node_rank, world.local_rank, world.local_size) == [(0, 0, 2), (1, 0, 1), (0, 1, 2)][rank]
    node, cross = world.node, world.cross
    assert node.allgather_object(rank) == [[0, 2], [1], [0, 2]][rank]
    assert cross.allgather_object(rank) == [[0, 1], [0, 1], [2]][rank]
    assert (node.node_count, cross.local_size) == (1, 1)


@pytest.mark.ranks(1, fresh=True)
def test_alone_a_world_of_one_is_chosen(ranks):
    world = ss.initialize()
    assert (world.kind, world.rank, world.size) == ("native", 0, 1)


@pytest.mark.ranks(2, fresh=True)
def test_the_default_timeout_comes_from_the_environment(ranks):
    os.environ["SAMESTEP_TIMEOUT"] = "17.5"
    assert ss.initialize("mpi").timeout == 17.5
    ss.finalize()
    os.environ["SAMESTEP_TIMEOUT"] = "soon"
    with pytest.raises(ss.InvalidArgumentError, match=r"SAMESTEP_TIMEOUT.*soon"):
        ss.initialize("mpi")
    del os.environ["SAMESTEP_TIMEOUT"]
    assert ss.initialize("mpi").timeout == 600


@pytest.mark.ranks(2, fresh=True)
def test_a_wait_that_is_long_is_announced(ranks, caplog):
    os.environ["SAMESTEP_WARN_AFTER"] = "0.2"
    world = ss.initialize("mpi")
    part = world.split(0)
    if world.rank == 0:
        with pytest.raises(ss.TimeoutError):
            part.allreduce(np.ones(2), timeout=1.0)
        text = caplog.text
        assert "allreduce" in text
        assert "1" in text
    world.barrier()
