"""Ends that nobody planned: exits without destroy, requests under way, peers that die."""

import os
import signal

import numpy as np
import pytest
import samestep as ss
import samestep.distributed as dist
from dist_jobs import Job, launch

BEGIN = """
import numpy as np, samestep.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
"""


@pytest.mark.parametrize("way", ["--native", "--mpi"])
@pytest.mark.parametrize("count", [1, 3_000_000])
@pytest.mark.parametrize(
    ("begin", "get"),
    [
        ("dist.isend(x, 1)", "dist.recv(got, 0)"),
        ("dist.broadcast(x, 0, async_op=True)", "dist.broadcast(got, 0)"),
    ],
    ids=["send", "broadcast"],
)
def test_what_is_under_way_is_delivered_by_a_process_that_ends(tmp_path, count, way, begin, get):
    script = f"""
import atexit
from pathlib import Path
x = np.full({count}, 7.0)
if rank == 0:
    {begin}
    atexit.register(Path("ends").touch)  # called before what was registered earlier
else:
    while not Path("ends").exists():
        pass
    got = np.empty({count})
    {get}
    print(got.sum())
"""
    script = BEGIN.replace("gloo", {"--native": "gloo", "--mpi": "mpi"}[way]) + script
    run = ["-m", "samestep", "run", way, "--raw", "-n", "2", "train.py"]
    ended = Job(tmp_path, *run, script=script, env={"SAMESTEP_MPI_ENGINE": "direct"}).wait()
    assert (ended.code, ended.err, ended.left) == (0, "", [])
    assert ended.out == f"{7.0 * count}\n"


@pytest.mark.parametrize("code", [0, 5])
def test_without_destroy_the_exit_code_is_the_scripts(tmp_path, code):
    script = f"""
import sys
part = dist.new_group([0])
dist.all_reduce(np.ones(3))
dist.irecv(np.ones(3), 1 - rank)
sys.exit({code})
"""
    ended = launch(tmp_path, BEGIN + script, "--nproc_per_node=2")
    assert ended.code == code
    assert ended.left == []
    assert "Traceback" not in ended.err
    assert "warning" not in ended.err.lower()
    assert ended.err == "" if code == 0 else "root cause" in ended.err


def test_many_worlds_in_one_process(tmp_path):
    script = """
for i in range(5):
    part = dist.new_group([0, 1])
    x = np.ones(3)
    dist.all_reduce(x, group=part)
    dist.irecv(np.ones(1), 1 - rank)  # nobody sends
    dist.destroy_process_group()
    dist.init_process_group("gloo")
print(rank, x[0])
"""
    ended = launch(tmp_path, BEGIN + script, "--nproc_per_node=2")
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
