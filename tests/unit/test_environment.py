"""What is found out before a backend is chosen: launchers as a table, devices and NCCL with made-up libraries."""

import subprocess
import sys

import pytest
from running import program
from samestep._util import launchers
from samestep._util.launchers import Launcher
from samestep.gpu import discovery
from samestep.world import choice

SRUN = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_NPROCS": "8"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3"}
HYDRA = {"PMI_SIZE": "3", "PMI_RANK": "2", "MPI_LOCALNRANKS": "3"}
TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
OURS, OF_TORCHRUN = {"SAMESTEP_LAUNCHER": "samestep run"}, {"TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        ({}, Launcher()),
        (OPEN_MPI, Launcher("openmpi", 4, 3, "OMPI_COMM_WORLD_SIZE")),
        (HYDRA, Launcher("hydra", 3, 2, "PMI_SIZE")),
        ({"PMI_SIZE": "3", "PMI_RANK": "2"}, Launcher("hydra", 3, 2, "PMI_SIZE")),
        (SRUN, Launcher("srun", 2, 1, "SLURM_STEP_NUM_TASKS")),
        (SRUN | {"PMIX_RANK": "1"}, Launcher("slurm", 2, 1, "SLURM_STEP_NUM_TASKS")),
        # srun speaks PMI-2 to its tasks
        (
            SRUN | {"PMI_SIZE": "2", "PMI_RANK": "1", "PMI_FD": "9"},
            Launcher("slurm", 2, 1, "SLURM_STEP_NUM_TASKS"),
        ),
        # a batch script, an interactive shell and an allocation are no ranks
        (BATCH, Launcher()),
        (SRUN | {"SLURM_STEP_ID": str(0xFFFFFFFA)}, Launcher()),
        (SRUN | {"SLURM_STEP_ID": str(0xFFFFFFFB)}, Launcher()),
        # mpirun inside of srun's or a batch job's environment
        (SRUN | OPEN_MPI, Launcher("openmpi", 4, 3, "OMPI_COMM_WORLD_SIZE")),
        (SRUN | HYDRA, Launcher("hydra", 3, 2, "PMI_SIZE")),
        (BATCH | HYDRA, Launcher("hydra", 3, 2, "PMI_SIZE")),
        (TORCHRUN, Launcher("torchrun", 2, 1, "WORLD_SIZE")),
        (TORCHRUN | OURS, Launcher("samestep", 2, 1, "WORLD_SIZE")),
        (TORCHRUN | OURS | OF_TORCHRUN, Launcher("torchrun", 2, 1, "WORLD_SIZE")),
        # samestep run --mpi sets both
        (TORCHRUN | OPEN_MPI, Launcher("openmpi", 4, 3, "OMPI_COMM_WORLD_SIZE")),
        # srun has started torchrun on each host
        (SRUN | TORCHRUN, Launcher("torchrun", 2, 1, "WORLD_SIZE")),
        # one alone, or no number, says nothing
        ({"WORLD_SIZE": "2"}, Launcher()),
        ({"OMPI_COMM_WORLD_SIZE": "two", "OMPI_COMM_WORLD_RANK": "0"}, Launcher()),
    ],
)
def test_launchers(env, launcher):
    assert launchers.launcher(env) == launcher


FAMILIES = {
    "openmpi": OPEN_MPI,
    "hydra": HYDRA,
    "srun": SRUN,
    "slurm": SRUN | {"PMIX_RANK": "1"},
    "torchrun": TORCHRUN | {"WORLD_SIZE": "6", "RANK": "5"},
}
SLURM = ("srun", "slurm")


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "bare"])
@pytest.mark.parametrize("same_rank", [True, False], ids=["same-rank", "other-rank"])
@pytest.mark.parametrize(
    ("outer", "inner"), [(a, b) for a in FAMILIES for b in FAMILIES if a != b and not {a, b} <= set(SLURM)]
)
def test_the_inner_launcher_wins_whatever_its_kind(outer, inner, same_rank, marked):
    """An ancestor that has the variables of one alone is a process between the two launchers."""
    around, within = dict(FAMILIES[outer]), dict(FAMILIES[inner])
    if same_rank:  # the first rank of the inner job is often started by the first one of the outer
        numbers = launchers.launcher(around)
        within |= {name: str(numbers.size) for name in within if name.endswith(("_SIZE", "NUM_TASKS"))}
        within |= {name: str(numbers.rank) for name in within if name.endswith(("RANK", "PROCID"))}
    mark = OF_TORCHRUN if marked and "torchrun" in (outer, inner) else {}
    env = around | within | mark
    alike = same_rank and not mark
    expected = launchers.launcher(within | mark)
    found = launchers.launcher(env, past=[env, env, around, {}])
    assert (found.size, found.rank) == (expected.size, expected.rank)
    if not alike:
        assert found.variable == expected.variable
        alone = launchers.launcher(launchers.own_variables(env, [around]))
        assert (alone.variable, alone.size, alone.rank) == (found.variable, found.size, found.rank)
    assert bool(launchers.contradiction(env, past=[])) != same_rank
    assert launchers.contradiction(env, past=[around]) == ""


def test_variables_made_of_another_launchers_are_of_one_job():
    """As `samestep run --mpi` and scripts make RANK of the rank that MPI has given."""
    env = OPEN_MPI | {"WORLD_SIZE": "4", "RANK": "3"}
    assert launchers.launcher(env, past=[OPEN_MPI]).name == "openmpi"
    assert launchers.own_variables(env, past=[OPEN_MPI]) == env


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_a_contradiction_names_both_sizes(variable):
    env = next(env for env in FAMILIES.values() if variable in env)
    for other in ({"WORLD_SIZE": "9", "RANK": "5"}, {"WORLD_SIZE": "9"}):
        text = launchers.contradiction(env | other)
        assert "WORLD_SIZE" in text and "9" in text and f"{variable}={env[variable]}" in text


def test_what_is_outside_any_job_has_nothing_of_it():
    kept = {"SLURM_JOB_ID": "7", "LOCAL_DIR": "/tmp", "HOME": "/root", "SAMESTEP_TIMEOUT": "9"}
    mine = {"LOCAL_RANK": "1", "SAMESTEP_RANK_PROCESS": "1 x"}
    inside = OPEN_MPI | HYDRA | TORCHRUN | OURS | OF_TORCHRUN | mine | {"SLURM_PROCID": "0"}
    assert launchers.outside_any_job(inside | kept) == kept


class FakeCuda:
    """libcuda.so.1 with `count` devices, or with an error from cuInit."""

    def __init__(self, count=0, code=0):
        self.count, self.code = count, code

    def cuInit(self, flags):
        return self.code

    def cuDeviceGetCount(self, count):
        count._obj.value = self.count
        return 0

    def cuDeviceGetName(self, text, length, device):
        text.value = f"Card {device}".encode()
        return 0


@pytest.fixture
def load(monkeypatch):
    """Says what ctypes loads instead of every library; None: nothing."""

    def use(library):
        def cdll(name, *args, **kwargs):
            if library is None:
                raise OSError(name)
            return library

        monkeypatch.setattr(discovery.ctypes, "CDLL", cdll)

    for variable in (
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "SAMESTEP_NCCL_LIBRARY",
    ):
        monkeypatch.delenv(variable, raising=False)
    return use


@pytest.mark.parametrize(
    ("library", "count", "message"),
    [
        (None, 0, "libcuda.so.1 does not load"),
        (FakeCuda(2), 2, "Card 0, Card 1"),
        (FakeCuda(0), 0, "no device (100)"),
        (FakeCuda(1, code=100), 0, "no device (100)"),
        (FakeCuda(1, code=35), 0, "the driver is older than the runtime (35)"),
        (FakeCuda(1, code=34), 0, "a stub library instead of a driver (34)"),
        (FakeCuda(1, code=803), 0, "versions differ (803)"),
        (FakeCuda(1, code=999), 0, "error (999)"),
    ],
)
def test_cuda_devices(load, library, count, message):
    load(library)
    found = discovery.cuda_devices()
    assert found.count == count and message in found.detail


def test_a_mask_is_reported(load, monkeypatch):
    load(FakeCuda(0, code=100))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert discovery.cuda_devices().detail.endswith("CUDA_VISIBLE_DEVICES=''")


def test_no_amd_driver_is_no_error():
    assert discovery.hip_devices().count == 0


@pytest.fixture
def disk(tmp_path, monkeypatch, load):
    """Made-up NCCL files: each "version" is the folder it lies in."""
    load(None)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setattr(discovery, "_loaded", lambda name: [])
    monkeypatch.setattr(
        discovery, "_ccl_version", lambda path: "1.2.3" if path.startswith(str(tmp_path)) else ""
    )
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path / "conda"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.delenv("CUDA_PATH", raising=False)

    def put(name):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        return str(file)

    return put


def test_nccl_is_found_in_the_documented_order(disk, monkeypatch):
    def found():
        return discovery.communication_library("cuda", may_open=True).path

    assert found() == ""
    toolkit = disk("cuda/lib64/libnccl.so.2")
    assert found() == toolkit
    conda = disk("conda/lib/libnccl.so.2")
    assert found() == conda
    wheel = disk("site/nvidia/nccl/lib/libnccl.so.2")
    assert found() == wheel
    loaded = disk("framework/libnccl.so.2")
    monkeypatch.setattr(discovery, "_loaded", lambda name: [loaded])
    assert found() == loaded
    chosen = disk("chosen/my_nccl.so")
    monkeypatch.setenv("SAMESTEP_NCCL_LIBRARY", chosen)
    assert found() == chosen


def test_what_was_looked_for_is_reported(disk):
    detail = discovery.communication_library("cuda", may_open=True).detail
    assert detail == (
        "no NCCL; looked in: libraries already loaded, nvidia/nccl/lib on sys.path, CONDA_PREFIX/lib, "
        "the loader's path (libnccl.so.2), CUDA_HOME"
    )


def test_a_chosen_library_that_does_not_load_is_not_replaced(disk, monkeypatch):
    disk("conda/lib/libnccl.so.2")
    monkeypatch.setenv("SAMESTEP_NCCL_LIBRARY", "/no/such/libnccl.so")
    found = discovery.communication_library("cuda", may_open=True)
    assert (
        found.path == "" and "SAMESTEP_NCCL_LIBRARY=/no/such/libnccl.so, which does not load" in found.detail
    )


def test_without_a_device_nothing_is_opened(disk, monkeypatch):
    wheel = disk("site/nvidia/nccl/lib/libnccl.so.2")
    monkeypatch.setattr(discovery, "_ccl_version", pytest.fail)
    found = discovery.communication_library("cuda", may_open=False)
    assert found.path == wheel and "not opened because there is no device" in found.detail


@pytest.mark.parametrize(
    ("number", "text"), [(2804, "2.8.4"), (21303, "2.13.3"), (22809, "2.28.9"), (23004, "2.30.4")]
)
def test_versions(load, number, text):
    class Library:
        def ncclGetVersion(self, code):
            code._obj.value = number
            return 0

    load(Library())
    assert discovery._ccl_version("x") == text


def test_gather_alone():
    known = choice.gather(probe_mpi=False, cuda=False, hip=False)
    assert known.launcher_size >= 1
    assert (known.devices, known.device_detail, known.mpi_loadable) == (0, "not looked for", False)


def test_importing_facts_loads_nothing():
    heavy = ("mpi4py", "torch", "jax", "samestep._util.mpi_library")
    script = f"import samestep.world.choice, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_probing_mpi_does_not_start_it():
    pytest.importorskip("mpi4py")
    done = subprocess.run(
        [sys.executable, *program("unit/mpi4py_imports", "probe")], capture_output=True, text=True, check=True
    )
    assert done.stdout in ("True False\n", "False False\n")
