"""The library that stock jaxlib loads in place of MPI, and programs of several JAX processes over it."""

import ctypes
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from running import RUN_COMMAND, script
from samestep import doctor
from samestep._util import jax_variables
from samestep.jax.__main__ import main

PROGRAM = str(Path(__file__).with_name("jax_processes.py"))


def run(n_processes, *arguments, n_devices=1, **variables):
    from samestep.jax import check

    return check.run_processes([PROGRAM, *arguments], n_processes, n_devices, **variables)


def test_the_library_has_the_version_and_the_symbols_that_jaxlib_looks_up():
    library = ctypes.CDLL(jax_variables.library())
    assert ctypes.c_int.in_dll(library, "mpiabi_version_major").value == 2
    assert ctypes.c_int.in_dll(library, "mpiabi_version_minor").value >= 10
    for name in ("MPIABI_Allreduce", "MPIABI_Win_create", "MPIXABI_Query_cuda_support"):
        assert getattr(library, name)
    values = [
        ctypes.c_int.in_dll(library, f"MPIABI_{name}").value for name in ("SUCCESS", "UNDEFINED", "FLOAT")
    ]
    assert values[:2] == [0, -32766]
    assert values[2] not in values[:2]


def test_a_function_that_is_not_implemented_ends_with_its_name():
    program = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).MPIABI_Scan()"
    ended = subprocess.run(
        [sys.executable, "-c", program, jax_variables.library()], capture_output=True, text=True, check=False
    )
    assert ended.returncode == -6
    assert "MPIABI_Scan" in ended.stderr


def test_an_error_before_the_start_is_reported():
    library = ctypes.CDLL(jax_variables.library())
    text, length, rank = ctypes.create_string_buffer(1024), ctypes.c_int(), ctypes.c_int()
    world = ctypes.c_size_t.in_dll(library, "MPIABI_COMM_WORLD")
    assert library.MPIABI_Comm_rank(world, ctypes.byref(rank)) != 0
    library.MPIABI_Error_string(1, text, ctypes.byref(length))
    assert text.value == b"MPI_Init_thread has not been called"
    assert length.value == len(text.value)


def test_the_variables_give_way_to_what_is_asked_for(monkeypatch):
    monkeypatch.setattr(jax_variables, "_jaxlib_version", lambda: "0.10.2")
    library = jax_variables.library()
    found = jax_variables.environment({"PYTHONPATH": "/a:/b"})
    folder, *others = found.pop("PYTHONPATH").split(":")
    assert Path(folder, "jax_plugins").is_dir()
    assert others == ["/a", "/b"]
    assert found == {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "mpi", "MPITRAMPOLINE_LIB": library}
    assert jax_variables.environment({"PYTHONPATH": f"{folder}:/a"})["PYTHONPATH"] == f"{folder}:/a"
    named = {"MPITRAMPOLINE_LIB": library}  # by `import samestep.jax`
    assert jax_variables.environment(named)["PYTHONPATH"] == folder
    assert not jax_variables.environment({"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"})
    assert not jax_variables.environment({"MPITRAMPOLINE_LIB": "/else.so"})
    assert "/else.so" in jax_variables.describe({"MPITRAMPOLINE_LIB": "/else.so"})


def test_the_command_prints_what_to_set(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == [
        "export JAX_CPU_COLLECTIVES_IMPLEMENTATION=mpi",
        f"export MPITRAMPOLINE_LIB={jax_variables.library()}",
    ]
    assert printed[2].startswith("export PYTHONPATH=")
    assert main(["--library"]) == 0
    assert capsys.readouterr().out.strip() == jax_variables.library()


@pytest.mark.parametrize(("version", "by_default"), [("0.10.2", True), ("0.10.3", False), ("", False)])
def test_ranks_use_samestep_with_tested_versions_and_where_asked(monkeypatch, version, by_default):
    monkeypatch.setattr(jax_variables, "_jaxlib_version", lambda: version)
    used = {asked: bool(jax_variables.for_ranks({}, asked)) for asked in (None, True, False)}
    assert used == {None: by_default, True: bool(version), False: False}
    assert ("--jax" in jax_variables.describe({})) == (bool(version) and not by_default)


def test_doctor_tells_what_jax_uses():
    found = doctor.examine()
    assert ("JAX on CPU", jax_variables.describe(), None) in doctor.rows(found)


def test_the_plugin_names_the_library_only_where_mpi_is_asked_for(monkeypatch):
    jax = pytest.importorskip("jax")
    monkeypatch.setenv("MPITRAMPOLINE_LIB", "")
    jax_variables.name_library()
    assert not jax_variables.os.environ["MPITRAMPOLINE_LIB"]
    before = jax.config.jax_cpu_collectives_implementation
    jax.config.update("jax_cpu_collectives_implementation", "mpi")
    try:
        jax_variables.name_library()
    finally:
        jax.config.update("jax_cpu_collectives_implementation", before)
    assert jax_variables.os.environ["MPITRAMPOLINE_LIB"] == jax_variables.library()


@pytest.mark.slow
def test_a_program_may_select_mpi_itself():
    pytest.importorskip("jax")
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    done = subprocess.run(
        [sys.executable, script("interop/jax_selects_mpi"), str(port)],
        env={name: value for name, value in os.environ.items() if name != jax_variables.LIBRARY},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.split() == ["1", jax_variables.library()], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("n_processes", "n_devices"), [(2, 1), (2, 3), (3, 1)])
def test_every_collective_is_that_of_numpy(n_processes, n_devices, capsys):
    pytest.importorskip("jax")
    from samestep.jax import check

    assert check.main(n_processes, n_devices) == 0, capsys.readouterr()


@pytest.mark.slow
@pytest.mark.parametrize("n_devices", [1, 2])
def test_a_program_over_some_of_the_devices_is_refused_at_once(n_devices):
    pytest.importorskip("jax")
    results = run(3, "orders_and_parts", n_devices=n_devices)
    assert [code for code, *_ in results] == [0, 0, 0], results


@pytest.mark.slow
@pytest.mark.parametrize("n_processes", [1, 2])
def test_psum_scatter_over_24_devices_asynchronously(n_processes):
    pytest.importorskip("jax")
    times = {"JAX_TEST_TIMES": "200", "SAMESTEP_TIMEOUT": "100"}
    results = run(n_processes, "many_times", n_devices=24 // n_processes, **times)
    assert [(code, out) for code, out, _ in results] == [(0, "wrong: 0\n")] * n_processes, results


@pytest.mark.parametrize(
    ("n_devices", "given", "expected"),
    [(24, {}, 48 + len(os.sched_getaffinity(0))), (1, {}, None), (24, {"NPROC": "3"}, None)],
)
def test_xla_gets_threads_for_all_devices_unless_told_otherwise(n_devices, given, expected, monkeypatch):
    pytest.importorskip("jax")
    from samestep.jax import meeting

    environment = dict(given)
    monkeypatch.setattr(os, "environ", environment)
    meeting._size_xla_thread_pool(n_devices)
    assert environment.get("PJRT_NPROC") == (expected and str(expected))


@pytest.mark.slow
def test_sums_of_float16_are_rounded_once_where_jit_divides_them():
    pytest.importorskip("jax")
    results = run(2, "float16_by_jit", n_devices=2)
    assert [code for code, *_ in results] == [0, 0], results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "text", "last"),
    [
        ("killed", "rank 2", -9),
        ("otherwise", "rank 2: allreduce of float32[50]", 7),
    ],
)
def test_what_goes_wrong_is_told_on_every_process(how, text, last):
    pytest.importorskip("jax")
    results = run(3, "ending", how)
    assert [code for code, *_ in results] == [7, 7, last], results
    for _, out, _ in results[:2]:
        assert text in out
        assert "allreduce of float32[100]" in out


@pytest.mark.slow
def test_a_process_that_does_not_come_is_named_at_the_deadline():
    pytest.importorskip("jax")
    results = run(3, "ending", "absent", SAMESTEP_TIMEOUT="25")
    assert [code for code, *_ in results[:2]] == [7, 7], results
    for _, out, _ in results[:2]:
        assert "25 s" in out
        assert "rank 2" in out
        assert "allreduce of float32[100]" in out


@pytest.mark.slow
def test_without_arguments_under_samestep_run():
    pytest.importorskip("jax")
    command = [*RUN_COMMAND, "-n", "3", "--native", PROGRAM, "found_by_cluster"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
    for process in range(3):
        assert f"process {process} of 3: {jax_variables.library()}" in ended.stdout


@pytest.mark.slow
def test_without_arguments_from_the_variables_of_torchrun():
    pytest.importorskip("jax")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    common = {**os.environ, **jax_variables.environment(), "WORLD_SIZE": "2", "JAX_PLATFORMS": "cpu"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, PROGRAM, "found_by_cluster"]
    ranks = [
        subprocess.Popen(
            command, env={**common, "RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE, text=True
        )
        for rank in "01"
    ]
    for number, rank in enumerate(ranks):
        out, _ = rank.communicate(timeout=120)
        assert rank.returncode == 0
        assert f"process {number} of 2" in out


def test_the_part_of_jax_plugins_leaves_others_in_it(tmp_path):
    other = tmp_path / "jax_plugins" / "of_another"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("here = True")
    env = {**os.environ, **jax_variables.environment({"PYTHONPATH": str(tmp_path)})}
    program = "import jax_plugins.of_another as other; assert other.here"
    subprocess.run([sys.executable, "-c", program], env=env, check=True)


@pytest.mark.slow
def test_a_training_loop_of_flax():
    pytest.importorskip("flax.nnx")
    pytest.importorskip("optax")
    results = run(2, "flax_training", JAX_ENABLE_X64="0")
    assert [code for code, *_ in results] == [0, 0], results


@pytest.mark.slow
def test_orbax_saves_and_reads_arrays_of_all_processes(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    results = run(2, "orbax_checkpoint", str(tmp_path))
    assert [code for code, *_ in results] == [0, 0], results


@pytest.mark.slow
def test_a_training_loop_of_equinox():
    pytest.importorskip("equinox")
    pytest.importorskip("optax")
    results = run(2, "equinox_training", n_devices=2, JAX_ENABLE_X64="0")
    assert [code for code, *_ in results] == [0, 0], results


@pytest.mark.slow
def test_the_tests_that_orbax_contains(tmp_path):
    pytest.importorskip("orbax.checkpoint._src.checkpointers.checkpointer_test_utils")
    results = run(2, "orbax_own_tests", str(tmp_path), n_devices=4, JAX_ENABLE_X64="0")
    assert [code for code, *_ in results] == [0, 0], results
