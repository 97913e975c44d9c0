"""What is found before ranks use their devices: which device each has, wrong libraries, shared devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import device_jobs
import fake_libraries
import pytest
import samestep as ss
from running import program
from samestep import _core
from samestep.gpu import group


def outcome(tmp_path, n=2, backend="nccl", devices=None, *, of_rank=None, **variables):
    reduce = program("devices/device_start", "reduce_once", backend, devices)
    ended = device_jobs.run(tmp_path, reduce, n, of_rank=of_rank, **variables)
    assert all(len(rank.reports) == 1 for rank in ended), ended
    return [rank.reports[0] for rank in ended]


def test_round_robin(tmp_path):
    got = outcome(tmp_path, 3)
    assert [one["result"] for one in got] == [["nccl", rank, [3.0] * 3] for rank in range(3)]


LAUNCHERS = {
    "samestep": ["samestep", "run", "--raw", "-n", "2"],
    "mpi": ["samestep", "run", "--raw", "--mpi", "-n", "2"],
    "torch": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


def launched(launcher, backend, devices=None):
    """What two ranks print, each line twice."""
    reduce = program("devices/device_launched", "reduce_under_a_launcher", backend, devices)
    hidden = ("RANK", "WORLD_SIZE", "MASTER_PORT")
    clean = {k: v for k, v in os.environ.items() if k not in hidden and not k.startswith("OMPI_")}
    done = subprocess.run(
        [sys.executable, "-m", *LAUNCHERS[launcher], *reduce],
        env=clean | fake_libraries.environment() | {"PYTHONPATH": device_jobs.with_fakes()},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.split("\n"))[1:]


@pytest.mark.parametrize("launcher", ["samestep", "torch"])
def test_each_launcher_gives_each_rank_a_device(launcher):
    """Under mpirun those of tests/fakes/fake_worlds.py do."""
    if launcher == "torch":
        pytest.importorskip("torch")
    lines = [f"nccl {rank} {rank} [3.0, 3.0, 3.0]" for rank in (0, 0, 1, 1)]
    assert launched(launcher, "NCCLBackend") == lines


def test_a_list_names_the_devices_over_mpi_too():
    lines = [f"mpi {rank} {device} [3.0, 3.0, 3.0]" for rank, device in ((0, 3), (0, 3), (1, 1), (1, 1))]
    assert launched("mpi", "MPIBackend", [3, 1]) == lines


@pytest.mark.parametrize("backend", ["nccl", "native"])
def test_a_list_names_the_devices(tmp_path, backend):
    got = outcome(tmp_path, 2, backend, [3, 1])
    assert [one["result"][1] for one in got] == [3, 1]


def test_native_ranks_take_device_arrays_and_may_share_a_device(tmp_path):
    got = outcome(tmp_path, 3, "native", FAKE_GPU_DEVICES="2")
    assert [one["result"] for one in got] == [["native", device, [3.0] * 3] for device in (0, 1, 0)]


def test_missing_leaves_devices_alone(tmp_path):
    for rank in device_jobs.run(tmp_path, program("devices/device_start", "reduce_without_devices"), 2):
        assert rank.reports[0] == {"device": None}, rank
        assert rank.reports[1]["kind"] == "UnavailableError", rank
        assert "move it to host memory" in rank.reports[1]["text"]


def fails_alike(got, *texts):
    assert {one.get("kind") for one in got} == {"UnavailableError"}, got
    for one in got:
        for text in texts:
            assert text in one["text"], got


def test_one_rank_without_a_device(tmp_path):
    got = outcome(tmp_path, 3, of_rank={1: {"FAKE_GPU_ERROR": "35"}})
    fails_alike(got, "be used")
    assert "on rank 1" in got[0]["text"]
    assert "driver is older" in got[1]["text"]


@pytest.mark.parametrize(
    ("ours", "of_nccl", "named"), [("lo", "", "=lo"), ("lo", "l", "l"), ("", "", ""), ("", "^eth", "^eth")]
)
def test_nccl_uses_the_network_interface_of_the_package(tmp_path, ours, of_nccl, named):
    """Its variable takes prefixes of names, unless an equals sign stands before them."""
    variables = {"SAMESTEP_SOCKET_IFNAME": ours, "NCCL_SOCKET_IFNAME": of_nccl}
    for rank in device_jobs.run(tmp_path, program("devices/device_start", "name_interfaces"), 2, **variables):
        assert rank.reports == [{"named": named}], rank


def test_ranks_that_share_a_device(tmp_path):
    fails_alike(
        outcome(tmp_path, 2, FAKE_GPU_DEVICES="1"), "ranks 0 and 1 use the same device (0000:00:00.0)", "2.30"
    )
    got = outcome(
        tmp_path, 2, FAKE_GPU_DEVICES="1", FAKE_NCCL_VERSION="23004", NCCL_MULTI_RANK_GPU_ENABLE="1"
    )
    assert [one["result"][2] for one in got] == [[2.0] * 3] * 2


def test_ranks_that_have_mig_instances_of_one_device(tmp_path):
    instances = {"FAKE_GPU_DEVICES": "2", "FAKE_GPU_SAME": "0", "FAKE_GPU_MIG": "1"}
    got = outcome(tmp_path, 2, FAKE_NCCL_VERSION="23004", **instances)
    assert [one["result"][2] for one in got] == [[2.0] * 3] * 2, got
    fails_alike(outcome(tmp_path, 2, **instances), "ranks 0 and 1 use the same device", "MIG instances")


def test_ranks_that_share_a_device_with_hosts_of_their_own(tmp_path):
    shared = {"FAKE_GPU_DEVICES": "1", "FAKE_GPU_SAME": "0"}
    names = {rank: {"NCCL_HOSTID": f"rank-{rank}"} for rank in range(3)}
    got = outcome(tmp_path, 3, of_rank=names, **shared)
    assert [one["result"][2] for one in got] == [[3.0] * 3] * 3, got
    names[2] = names[0]
    fails_alike(
        outcome(tmp_path, 3, of_rank=names, **shared), "ranks 0 and 2 use the same device", "NCCL_HOSTID"
    )


@pytest.mark.parametrize(
    "setting", ["NCCL_COMM_BLOCKING=0", "NCCL_COMM_BLOCKING=1", "NCCL_COMM_SPLIT_SHARE_RESOURCES=0"]
)
def test_a_variable_that_overrides_what_nccl_is_asked_for(tmp_path, setting):
    got = outcome(tmp_path, 2, of_rank={1: dict([setting.split("=")])})
    fails_alike(got, f"rank 1: {setting} is set", "unset it")


def test_a_configuration_file_that_overrides_what_nccl_is_asked_for(tmp_path):
    file = tmp_path / "nccl.conf"
    file.write_text("# of all jobs\nNCCL_DEBUG=WARN\n#NCCL_COMM_BLOCKING=0\nNCCL_COMM_BLOCKING=1\n")
    got = outcome(tmp_path, 2, of_rank={1: {"NCCL_CONF_FILE": str(file)}})
    fails_alike(got, f"rank 1: NCCL_COMM_BLOCKING=1 is in {file}", "remove it there")


def test_an_empty_variable_hides_that_of_a_configuration_file(tmp_path):
    file = tmp_path / "nccl.conf"
    file.write_text("NCCL_COMM_BLOCKING=1\n")
    got = outcome(tmp_path, 2, NCCL_CONF_FILE=str(file), NCCL_COMM_BLOCKING="")
    assert [one["result"][2] for one in got] == [[2.0] * 3] * 2, got


def test_variables_that_change_nothing_of_what_nccl_is_asked_for(tmp_path):
    got = outcome(tmp_path, 2, NCCL_COMM_BLOCKING="", NCCL_COMM_SPLIT_SHARE_RESOURCES="1")
    assert [one["result"][2] for one in got] == [[2.0] * 3] * 2, got


def test_ranks_with_different_versions(tmp_path):
    got = outcome(tmp_path, 3, of_rank={2: {"FAKE_NCCL_VERSION": "22907"}})
    fails_alike(got, "the same NCCL", "2.28.9 on rank 0", "2.29.7 on rank 2")


def test_an_old_version(tmp_path):
    fails_alike(outcome(tmp_path, 2, FAKE_NCCL_VERSION="21705"), "rank 0: NCCL 2.17.5", "too old", "2.18")


def library(folder, text):
    source, target = folder / "library.cpp", folder / "libother.so"
    source.write_text(text)
    subprocess.run(
        [fake_libraries.compiler(), "-shared", "-fPIC", "-o", str(target), str(source)], check=True
    )
    return str(target)


def test_a_library_without_a_symbol(tmp_path):
    other = library(
        tmp_path,
        'extern "C" int ncclGetVersion(int* v) { *v = 22809; return 0; }'
        'extern "C" const char* ncclGetErrorString(int) { return ""; }'
        'extern "C" const char* ncclGetLastError(void*) { return ""; }',
    )
    got = outcome(tmp_path, 2, of_rank={1: {"SAMESTEP_NCCL_LIBRARY": other}})
    fails_alike(got, f"rank 1: {other} (NCCL 2.28.9) has no ncclGetUniqueId")


def test_a_file_that_is_no_library(tmp_path):
    (tmp_path / "libnccl.so.2").write_text("text")
    got = outcome(tmp_path, 2, SAMESTEP_NCCL_LIBRARY=str(tmp_path / "libnccl.so.2"))
    fails_alike(got, "NCCL", "libnccl.so.2")


def test_a_runtime_without_a_symbol(tmp_path):
    with pytest.raises(ss.UnavailableError, match="has no cudaGetDevice"):
        _core.GpuLibrary.open(
            "cuda", library(tmp_path, 'extern "C" int cudaGetDeviceCount(int* n) { *n = 1; return 0; }')
        )


def test_the_hip_runtime_has_the_same_face():
    runtime, nccl = fake_libraries.build(hip=True)
    gpu = _core.GpuLibrary.open("rocm", str(runtime))
    assert (gpu.kind, gpu.device_count(), gpu.bus_id(1)) == ("rocm", 4, "0000:01:00.0")
    assert _core.NcclLibrary.open(str(nccl)).version == "2.28.9"
    memory = gpu.allocate(100, 2)
    assert (gpu.device_of(memory.address), gpu.current_device()) == (2, 0)


@pytest.mark.parametrize("backend", ["nccl", "native"])
def test_an_operation_with_hip_leaves_no_error_behind(tmp_path, backend):
    """HIP notes that an event is not complete as the thread's last error, which the user's next check would find."""
    reduce = program("devices/device_start", "reduce_with_hip", backend)
    for ended in device_jobs.run(tmp_path, reduce, 2, hip=True):
        assert ended.reports == [{"kind": "rocm", "was_done": False, "last": 0, "result": [4.0] * 3}], ended


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_arrays_with_the_interface_of_cuda_alone_may_be_of_rocm(tmp_path, backend):
    reduce = program("devices/device_start", "reduce_an_interface_with_hip", backend)
    for ended in device_jobs.run(tmp_path, reduce, 2, hip=True):
        assert ended.reports == [{"result": [[4.0] * 3] * 2}] * 2, ended


def test_an_old_hip_runtime_is_refused(monkeypatch):
    monkeypatch.setenv("FAKE_HIP_VERSION", "50731921")
    with pytest.raises(ss.UnavailableError, match=r"is of version 5\.7; ROCm 6 or newer"):
        _core.GpuLibrary.open("rocm", str(fake_libraries.build(hip=True)[0]))


def test_host_memory_cannot_be_read_as_device_memory(tmp_path):
    """What the fakes are good for: a process that touches device memory on the host dies."""
    (ended,) = device_jobs.run(tmp_path, program("devices/device_start", "read_device_memory"), 1)
    assert ended.reports == [{"alive": True}]
    assert ended.code == -11


def test_requirements_are_compared_in_order():
    joined = group.DeviceInfo
    group.require_all([joined("", "2.28.9", "a 0"), joined("", "2.28.9", "a 1"), joined("", "2.28.9", "b 0")])
    with pytest.raises(ss.UnavailableError, match="rank 1: no"):
        group.require_all([joined("", "2.28.9", "a 0"), joined("no", "", "")])


def headers():
    """Folders with a real nccl.h and cuda_runtime.h."""
    homes = [Path(folder) / "nvidia" for folder in sys.path]
    places = [*(home / part / "include" for home in homes for part in ("nccl", "cu13", "cuda_runtime"))]
    places += [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include", Path("/usr/include")]
    return [place for place in places if place.is_dir()]


def test_our_numbers_are_those_of_the_header(tmp_path):
    found = headers()
    if not any((place / "nccl.h").exists() for place in found):
        pytest.skip("no nccl.h")
    source = Path(fake_libraries.HERE) / "check_header.cpp"
    words = [f"-I{place}" for place in (source.parent.parent.parent / "csrc", *found)]
    check = str(tmp_path / "check")
    subprocess.run([fake_libraries.compiler(), "-std=c++20", *words, "-o", check, str(source)], check=True)
    subprocess.run([check], check=True)


def test_the_doctor_names_the_files_in_use(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "samestep", "doctor", "--json"],
        env=os.environ | fake_libraries.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["devices"]["cuda"]["count"] == 4
    assert "libfake_cudart.so" in found["runtimes"]["cuda"]["detail"]
    assert "libfake_nccl.so" in found["nccl"]["detail"]
    assert "2.28.9" in found["nccl"]["detail"]
