"""Ranks that `samestep run` started meet, as processes."""

import re

import pytest
from launching import told
from samestep.launch import network

MEET = """
import json, os, signal, sys, time
import samestep as ss
from samestep.rendezvous import meet
rank = int(os.environ["RANK"])
"""


@pytest.fixture
def start(begin):
    """Starts a run whose script begins with MEET."""
    return lambda script, way="--native", *words, **options: begin(way, MEET + script, *words, **options)


def test_ranks_meet_with_a_secret_that_nobody_chose(start, way):
    run = start(
        "m = meet(timeout=60)\n"
        "given = m.exchange(b'%d' % rank)\n"
        "print(json.dumps([x.decode() for x in given] + [os.environ['SAMESTEP_SECRET']]))\n"
        "m.close()",
        way,
        n=3,
    )
    found = told(run)
    secret = found[0][3]
    assert re.fullmatch("[0-9a-f]{32}", secret)
    assert found == {r: ["0", "1", "2", secret] for r in range(3)}


def test_rank_0_is_killed(start):
    run = start(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "m = meet(timeout=60)\n"
        "if rank == 0: m.exchange(b''); os.kill(os.getpid(), signal.SIGKILL)\n"
        "try: m.exchange(b''); m.exchange(b'')\n"
        "except ss.PeerLostError as error: print('lost:', error)"
    )
    assert run.wait() == 137
    assert re.search(
        r"^\[1\] lost: rank 0, which keeps the store at 127\.0\.0\.1:\d+, has ended", run.out, re.M
    )


def test_a_second_job_on_the_port_is_refused_and_the_first_goes_on(start, tmp_path):
    first = """
m = meet(timeout=60)
print("ready")
while not os.path.exists("go"):
    time.sleep(0.01)
assert m.exchange(b"%d" % rank) == [b"0", b"1"]
m.close()
"""
    second = """
try: meet(timeout=60)
except ss.UnavailableError as error: print(json.dumps(str(error)))
"""
    with network.reserve_port() as holder:
        port = holder.getsockname()[1]
        one = start(first, "--native", "--master-port", str(port))
        one.until_all_say("ready")
        refused = told(start(second, "--native", "--master-port", str(port)))
        (tmp_path / "go").touch()
        assert one.wait() == 0, one.err
    assert refused[0].startswith(
        f"rank 0 of 2 cannot join: cannot listen at 127.0.0.1:{port}: the port is taken"
    )
    assert refused[1].startswith(f"rank 1 of 2 cannot join: the store at 127.0.0.1:{port} is another job's")


def test_shared_memory_is_for_one_host(start):
    run = start(
        "os.environ['SAMESTEP_HOST_ID'] = str(rank)\n"
        "os.environ['SAMESTEP_NATIVE_ENGINE'] = 'node'\n"
        "try: ss.initialize('native', timeout=60)\n"
        "except ss.UnavailableError as error: print(json.dumps(str(error)))"
    )
    found = told(run)
    assert found[0] == found[1]
    assert "SAMESTEP_NATIVE_ENGINE=node needs all ranks on one host, but there are 2" in found[0]


@pytest.mark.parametrize("claim", ["rank=rank + 1", "world_size=3"])
def test_a_claim_that_differs_from_the_launcher(start, claim):
    run = start(
        f"try: ss.initialize({claim}, timeout=60)\n"
        "except ss.InvalidArgumentError as error: print(json.dumps(str(error)))"
    )
    name = claim.partition("=")[0]
    assert all(
        re.search(rf"{name}=\d was given but the launcher \(samestep\)", text) for text in told(run).values()
    )


def test_the_native_world_opens_ends_and_opens_again(start):
    script = """
import threading
import numpy as np
def held():
    return len(os.listdir("/proc/self/fd")), threading.active_count()
seen = []
for _ in range(3):
    with ss.initialize(timeout=60) as world:
        total = ss.allreduce(world, np.full(5, world.rank + 1.0))
    seen.append(held())
print(json.dumps([world.kind, total.tolist(), seen[1] == seen[2]]))
"""
    assert told(start(script, n=3)) == {rank: ["native", [6.0] * 5, True] for rank in range(3)}
