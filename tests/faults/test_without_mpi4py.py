"""Ranks of Open MPI's mpirun for whom mpi4py is not installed: on one host they meet where its daemon keeps files."""

import json
import re

import jobs
import pytest
from running import program
from samestep._util import mpi_library

pytestmark = pytest.mark.skipif(mpi_library.probe().family != "openmpi", reason="needs Open MPI's mpirun")


@pytest.fixture
def without(tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ModuleNotFoundError('No module named mpi4py')\n")
    return {"PYTHONPATH": str(tmp_path)}


@pytest.mark.parametrize(
    ("n", "backend"),
    [
        (1, "native"),
        (3, None),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in [(1, None), (3, "native")]),
    ],
)
def test_ranks_meet_again_and_again(n, backend, without):
    ended = jobs.run(n, program("rendezvous/pmi", "total", backend, 2), **without)
    assert ended.code == 0, ended.text
    found = sorted(
        json.loads(line) for line in re.findall(r"\[\[.*?\]\]\]", ended.text)
    )  # mpirun may join lines
    world = [["native", rank, n, n * (n + 1) / 2, list(range(n))] for rank in range(n)]
    assert found == [[row, row] for row in world]
    # A job that asks for this backend, or has one rank, lacks nothing. There are two worlds, one after the other.
    notices = 2 if n > 1 and backend is None else 0
    assert ended.text.count("started this job, which runs without MPI: mpi4py is not installed") == notices
    assert ended.text.count("pip install 'samestep[mpi]'") == notices


def test_ranks_of_torch_meet(without):
    pytest.importorskip("torch")
    script = (
        "import torch, torch.distributed as dist; dist.init_process_group('samestep'); "
        "total = torch.ones(2) * (dist.get_rank() + 1); dist.all_reduce(total); print(total); "
        "dist.destroy_process_group()"
    )
    ended = jobs.run(2, ["-c", script], **without)
    assert ended.code == 0, ended.text
    assert ended.text.count("tensor([3., 3.])") == 2, ended.text


def test_ranks_on_several_hosts_are_told_what_to_install(without):
    several = {
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1"
    }  # which mpirun sets; so this is a rank of a job of two hosts
    rank = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "PMIX_NAMESPACE": "j", **several}
    ended = jobs.run(0, program("faults/start", "be_refused", None), **rank, **without)
    assert ended.text.startswith("refused: "), ended.text
    assert "mpi4py is not installed" in ended.text and "pip install 'samestep[mpi]'" in ended.text
