"""Ends that nobody planned: exits without destroy, requests that are pending, peers that die."""

import os
import signal

import numpy as np
import pytest
import samestep as ss
import samestep.distributed as dist
from dist_jobs import DistributedJob, launch
from running import program


@pytest.mark.parametrize("launcher", ["--native", "--mpi"])
@pytest.mark.parametrize("count", [1, 3_000_000])
@pytest.mark.parametrize("operation", ["send", "broadcast"])
def test_what_is_under_way_is_delivered_by_a_process_that_ends(tmp_path, count, launcher, operation):
    backend = {"--native": "gloo", "--mpi": "mpi"}[launcher]
    sends = program("distributed/dist_exits", "end_while_sending", backend, operation, count)
    run = ["-m", "samestep", "run", launcher, "--raw", "-n", "2", *sends]
    ended = DistributedJob(tmp_path, *run, env={"SAMESTEP_MPI_TRANSPORT": "mpi"}).wait()
    assert (ended.code, ended.err, ended.left) == (0, "", [])
    assert ended.out == f"{7.0 * count}\n"


@pytest.mark.parametrize("code", [0, 5])
def test_without_destroy_the_exit_code_is_the_scripts(tmp_path, code):
    exits = program("distributed/dist_exits", "exit_without_destroy", code)
    ended = launch(tmp_path, exits, "--nproc_per_node=2", "--use_env")
    assert ended.code == code
    assert ended.left == []
    assert "Traceback" not in ended.err
    assert "warning" not in ended.err.lower()
    assert ended.err == "" if code == 0 else "root cause" in ended.err


@pytest.mark.slow
def test_many_worlds_in_one_process(tmp_path):
    starts = program("distributed/dist_exits", "start_and_destroy_five_times")
    ended = launch(tmp_path, starts, "--nproc_per_node=2", "--use_env")
    assert (ended.code, ended.err) == (0, "")
    assert sorted(ended.out.splitlines()) == ["0 2.0", "1 2.0"]


@pytest.mark.ranks(2, 3, dies={1}, backends=["native", "mpi"])
def test_a_peer_that_dies_is_named_to_all_and_a_new_world_may_follow(group):
    part = dist.new_group()
    request = None if group.rank == 1 else dist.irecv(np.empty(1), 1)
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    pending = dist.all_reduce(np.ones(1000), group=part, async_op=True)
    with pytest.raises(ss.PeerLostError, match="rank 1"):
        pending.wait()
    for act in (
        request.wait,
        lambda: dist.barrier(part),
        dist.barrier,
        lambda: dist.all_reduce(np.ones(2)),
        lambda: dist.recv(np.empty(1), 1),
    ):
        with pytest.raises(ss.PeerLostError):
            act()
    assert request.is_completed()
    assert isinstance(request.exception(), ss.PeerLostError)
    dist.destroy_process_group(part)
    dist.destroy_process_group()
    dist.init_process_group("gloo", "tcp://127.0.0.1:0", rank=0, world_size=1)
    x = np.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [1, 1]
    dist.destroy_process_group()
