"""torchft over samestep: its groups, and a replica that is killed, restarted and healed."""

import datetime
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchft")

import torch.distributed as dist  # noqa: E402

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "third_party" / "torchft_restart.py"
LIMIT = datetime.timedelta(seconds=30)


@pytest.fixture
def opened():
    """`opened()`: a group of one rank, configured; again for the next quorum."""
    from samestep.torchft import ProcessGroupSamestep

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group, quorums = ProcessGroupSamestep(timeout=LIMIT), itertools.count(1)

    def configure():
        quorum = next(quorums)
        group.configure(f"127.0.0.1:{store.port}/quorum/{quorum}", "replica_0", 0, 1, quorum)
        return group

    yield configure
    group.shutdown()


def test_each_quorum_has_a_group_of_its_own_which_errors_name(opened):
    first = opened().parent
    assert "torchft of quorum 1" in repr(first)
    group = opened()
    assert group.parent is not first
    assert "torchft of quorum 2" in repr(group)
    assert (group.size(), group.getBackendName()) == (1, "torchft-samestep")
    with pytest.raises(Exception, match="quorum 1"):
        first.allreduce([torch.ones(2)], dist.ReduceOp.SUM).wait()


def test_a_new_timeout_applies_at_once(opened):
    group = opened()
    group.set_timeout(datetime.timedelta(seconds=7))
    assert group.parent._timeout == 7


def test_a_group_that_was_shut_down_is_refused(opened):
    group = opened()
    group.shutdown()
    with pytest.raises(AssertionError, match="not initialized"):
        group.size()


@pytest.mark.slow
def test_a_replica_that_is_killed_within_a_step_is_restarted_and_healed(environment, tmp_path):
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM)],
        env=environment | {"SAMESTEP_REPLACE_GLOO": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "equal"
    # Two replicas have discarded the step, with an error that names samestep's group.
    assert ended.stdout.count("rank 1 has left group 'torchft of quorum") == 2, ended.stdout
