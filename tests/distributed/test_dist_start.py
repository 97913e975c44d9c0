"""Start and end: ways to meet, wrong arguments, again and again, what is left behind."""

import contextlib
import gc
import os
import re
import threading
from datetime import timedelta

import numpy as np
import pytest
import samestep as ss
import samestep.distributed as dist
from samestep.launch import network

SECONDS = 60


@pytest.fixture
def place(group, tmp_path_factory):
    """(rank, size, a port, a path) of a job that is to meet without MPI; there is no world yet."""
    rank, size = group.rank, group.size
    holder = network.reserve_port() if rank == 0 else None
    port = group.bcast_object(holder.getsockname()[1] if holder else None)
    path = group.bcast_object(str(tmp_path_factory.mktemp("meet") / "file") if rank == 0 else None)
    ss.finalize()
    yield rank, size, port, path
    dist.destroy_process_group()
    if holder:
        holder.close()


def works(rank, size, backend="gloo"):
    """That the world is the one that was asked for."""
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, size, backend)
    x = np.full(3, float(rank))
    dist.all_reduce(x)
    assert (x == sum(range(size))).all()
    assert ss.get_distributed_backend().rank == rank
    return True


@pytest.mark.ranks(1, 2, 3, backends=["mpi"])
def test_by_tcp_again_and_again(place):
    rank, size, port, _ = place
    for i in range(3):
        url = f"tcp://127.0.0.1:{port}"
        if i == 1:
            dist.init_process_group(
                "gloo", f"{url}?rank={rank}&world_size={size}", timedelta(seconds=SECONDS)
            )
        else:
            dist.init_process_group("GLOO", url, SECONDS, size, rank, None, "ignored")
        assert works(rank, size)
        with pytest.raises(ss.InvalidArgumentError, match="twice"):
            dist.init_process_group("gloo", url, SECONDS, size, rank)
        dist.destroy_process_group()
        assert not dist.is_initialized()


@pytest.mark.ranks(1, 2, 3, backends=["mpi"])
def test_by_file_whose_name_is_free_afterwards(place):
    rank, size, _, one = place
    for path in (one, f"{one}-2", one, f"{one}-2"):  # no rank can be two meetings ahead
        dist.init_process_group(
            "gloo", init_method=f"file://{path}", rank=rank, world_size=size, timeout=SECONDS
        )
        assert works(rank, size)
        dist.destroy_process_group()
        assert not os.path.exists(path)


@pytest.mark.ranks(1, 2, 3, backends=["mpi"])
@pytest.mark.parametrize("said", [True, False], ids=["variables", "arguments"])
def test_by_the_environment(place, monkeypatch, said):
    rank, size, port, _ = place
    monkeypatch.setenv("MASTER_PORT", str(port))
    if rank:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    else:
        monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("RANK", str(rank) if said else "77")
    monkeypatch.setenv("WORLD_SIZE", str(size) if said else "99")
    arguments = {} if said else {"rank": rank, "world_size": size}
    dist.init_process_group("gloo", timeout=SECONDS, **arguments)
    assert works(rank, size)


@pytest.mark.ranks(1, 2, 3, backends=["mpi"])
@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_by_a_store_that_serves_several_worlds(place, kind):
    rank, size, port, path = place
    if kind == "tcp":
        store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout=SECONDS)
    else:
        store = dist.FileStore(path, size, timeout=SECONDS)
    for _ in range(2):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=SECONDS)
        assert works(rank, size)
        assert store.num_keys() == 0
        dist.destroy_process_group()
    assert store.add("mine", 1) <= size
    store.close()


@pytest.mark.ranks(1, 2, 3, backends=["mpi"])
def test_by_a_handler_of_the_application(place):
    rank, size, port, _ = place
    stores = []

    def handler(url):
        query = dict(part.split("=") for part in url.partition("?")[2].split("&"))
        stores.append(dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout=SECONDS))
        yield stores[-1], int(query["rank"]), int(query["world_size"])

    scheme = f"mine{os.getpid()}p{port}"
    dist.register_rendezvous_handler(scheme, handler)
    with pytest.raises(ss.InvalidArgumentError, match="taken"):
        dist.register_rendezvous_handler(scheme, handler)
    dist.init_process_group("gloo", f"{scheme}://x", SECONDS, size, rank)
    assert works(rank, size)
    dist.destroy_process_group()
    stores[0].close()


@pytest.mark.ranks(1, 2, 3, backends=["mpi"])
def test_mpi_brings_its_ranks_together_itself(place):
    rank, size, _, _ = place
    for arguments in ({}, {"init_method": "env://"}, {"rank": rank, "world_size": size}):
        dist.init_process_group("mpi", timeout=SECONDS, **arguments)
        assert works(rank, size, "mpi")
        dist.destroy_process_group()
    for name in ("rank", "world_size"):
        with pytest.raises(ss.InvalidArgumentError, match=f"{name}=77"):
            dist.init_process_group("mpi", **{name: 77})
    assert not dist.is_initialized()


@pytest.mark.ranks(2, 3, backends=["mpi"])
def test_a_world_size_that_differs_is_told_to_both(place):
    rank, size, port, _ = place
    expected = size + 1 if rank == 1 else size
    if rank < 2:
        with pytest.raises(ss.MismatchError, match=f"world_size.*{size}.*{size + 1}|{size + 1}.*{size}"):
            dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", SECONDS, expected, rank)
    assert not dist.is_initialized()


@pytest.mark.ranks(1, backends=["self"])
def test_wrong_arguments_are_named(place, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    url, store = "tcp://127.0.0.1:0", dist.HashStore()
    one = {"rank": 0, "world_size": 1}
    wrong = [
        (ss.InvalidArgumentError, "no backend 'tcp'", {"backend": "tcp", "init_method": url, **one}),
        (ss.InvalidArgumentError, "exclude", {"init_method": url, "store": store, **one}),
        (ss.InvalidArgumentError, "store needs.*rank is missing", {"store": store, "world_size": 1}),
        (ss.InvalidArgumentError, "store needs.*world_size is missing", {"store": store, "rank": 0}),
        (ss.InvalidArgumentError, "rank", {"store": store, "rank": -2, "world_size": 1}),
        (ss.InvalidArgumentError, "rank 1 is outside", {"store": store, "rank": 1, "world_size": 1}),
        (TypeError, "store must be", {"store": {}, **one}),
        (TypeError, "init_method must be a str", {"init_method": 3, **one}),
        (TypeError, "rank must be an int", {"init_method": url, "rank": "0", "world_size": 1}),
        (TypeError, "world_size must be an int", {"init_method": url, "rank": 0, "world_size": 1.0}),
        (TypeError, "timeout", {"init_method": url, "timeout": "30", **one}),
        (ss.InvalidArgumentError, "timeout", {"init_method": url, "timeout": timedelta(0), **one}),
        (ss.InvalidArgumentError, "rank", {"init_method": url, "rank": -3, "world_size": 1}),
        (ss.InvalidArgumentError, "RANK|WORLD_SIZE|MASTER_PORT", {}),
        (ss.InvalidArgumentError, "known|there are", {"init_method": "nowhere://x", **one}),
        (ss.InvalidArgumentError, "port", {"init_method": "tcp://127.0.0.1", **one}),
        (ss.InvalidArgumentError, "once", {"init_method": f"{url}?rank=0", **one}),
    ]
    for kind, text, arguments in wrong:
        with pytest.raises(kind, match=text):
            dist.init_process_group(**{"backend": "gloo", **arguments})
        assert not dist.is_initialized()
    with pytest.raises(ss.UnavailableError, match="NCCL"):
        dist.init_process_group("nccl", init_method=url, **one)
    dist.init_process_group("gloo", store=store, **one)
    assert works(0, 1)


@pytest.mark.ranks(1, backends=["self"])
def test_the_timeout_is_the_one_given_else_of_the_variable_else_half_an_hour(place, monkeypatch):
    url = "tcp://127.0.0.1:0?rank=0&world_size=1"
    monkeypatch.delenv("SAMESTEP_TIMEOUT", raising=False)
    for variable, given, seconds in [(None, None, 1800), ("70", None, 70), ("70", timedelta(minutes=2), 120)]:
        if variable:
            monkeypatch.setenv("SAMESTEP_TIMEOUT", variable)
        dist.init_process_group("gloo", url, given)
        assert ss.get_distributed_backend().timeout == seconds
        dist.destroy_process_group()


def descriptors():
    """What each stands for, such as "socket:[]"."""
    kinds = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            kinds[int(fd)] = re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{fd}"))
    return kinds


@pytest.mark.ranks(1, 2, backends=["mpi"])
def test_nothing_is_left_behind(place):
    rank, size, port, _ = place

    def held():
        return descriptors(), threading.active_count(), sorted(os.listdir("/dev/shm"))

    def once():
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", SECONDS, size, rank)
        part = dist.new_group()
        dist.all_reduce(np.ones(1000), group=part)
        dist.destroy_process_group()

    gc.disable()  # closes what it finds, at times of its own
    try:
        once()
        before = held()
        for _ in range(3):
            once()
        after = held()
    finally:
        gc.enable()
    assert after[:2] == before[:2]
    assert not [name for name in set(after[2]) - set(before[2]) if str(os.getpid()) in name]


@pytest.mark.ranks(1, 2)
def test_a_world_of_samestep_is_the_same_world(group):
    assert dist.is_initialized()
    with pytest.raises(ss.InvalidArgumentError, match="twice"):
        dist.init_process_group("gloo")
    dist.destroy_process_group()
    assert not ss.initialized()
    with pytest.raises(ss.NotInitializedError, match="init_process_group"):
        dist.barrier(group)
