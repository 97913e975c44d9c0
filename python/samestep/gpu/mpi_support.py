"""Whether device memory that is only moved is passed to MPI: only on request.

A library that says it can may still crash, and one that says it cannot may do so in part; see `decide`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

from samestep import _settings
from samestep.errors import InvalidArgumentError

VARIABLE = _settings.GPU_AWARE_MPI
_TRIAL_TIMEOUT_S = 60.0
_COUNT = 1 << 16  # bytes: longer than any eager message
_QUERIES = {
    "cuda": ("MPIX_Query_cuda_support",),
    "hip": ("MPIX_Query_rocm_support", "MPIX_Query_hip_support"),
}
_OF_A_JOB = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDI_", "SLURM_", "PALS_", "FLUX_")


def decide(kind: str, device: int) -> tuple[bool, str]:
    """Whether MPI is given memory of this "cuda" or "hip" device, and why.

    With `auto`: if the library says that it can (MPIX_Query_cuda_support, MPIX_Query_rocm_support,
    MPIX_Query_hip_support) and has sent a device buffer in a process of its own, which a library that is wrong
    about itself takes down instead of this one. Once in a process.
    """
    asked = _settings.read(VARIABLE)
    if asked != "auto":
        return asked == "1", f"{VARIABLE}={asked}" if _settings.get(VARIABLE) is not None else "not asked for"
    return _tried(kind, device)


@functools.cache
def _tried(kind: str, device: int) -> tuple[bool, str]:
    if not query(kind):
        return False, "the MPI library says that it cannot"
    problem = _trial(kind, device)
    return not problem, problem or "the MPI library can, and did"


def query(kind: str) -> bool:
    """What the MPI library says of itself. False if it does not load or has no word for it."""
    from samestep._util import mpi_library

    path = mpi_library.load().path
    if not path:
        return False
    library = ctypes.CDLL(path)
    for name in _QUERIES[kind]:
        function = getattr(library, name, None)
        if function is not None:
            return bool(function())  # all of them are `int f(void)`
    return False


def _trial(kind: str, device: int) -> str:
    """Why a message from device memory to device memory did not arrive in a process of its own, or ""."""
    import subprocess  # not for those who only import the package

    from samestep._util import mpi_library

    env = {name: text for name, text in os.environ.items() if not _makes_a_rank(name)}
    try:
        trial = [sys.executable, "-m", "samestep.gpu.mpi_support", kind, str(device)]
        done = mpi_library.outcome(trial, _TRIAL_TIMEOUT_S, env)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the MPI library says that it can, but a trial did not end: {error}"
    if done.returncode == 0 and done.stdout.endswith("arrived\n"):
        return ""
    last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
    return f"the MPI library says that it can, but a trial failed with exit code {done.returncode}: {last}"


def _makes_a_rank(name: str) -> bool:
    """Whether with this variable the process of the trial would be a rank of the job, not alone."""
    is_choice = name.startswith("OMPI_MCA_") and "ess" not in name and "pmix" not in name
    return name.startswith(_OF_A_JOB) and not is_choice


def describe(kind: str) -> str:
    """One sentence for `samestep doctor`. Never raises; tries nothing."""
    try:
        asked = _settings.read(VARIABLE)
    except InvalidArgumentError as error:
        return str(error)
    says = f"the MPI library says that it {'can' if query(kind) else 'cannot'}"
    how = {"0": "off", "1": "on", "auto": "if a trial succeeds"}[asked]
    return f"{how} ({VARIABLE}={asked}); {says}"


def _main(kind: str, device: int) -> None:
    """The trial: a message from device memory to device memory, by this process to itself."""
    from mpi4py import MPI

    from samestep import _core
    from samestep.gpu import runtime
    from samestep.gpu.device_array import DeviceArray

    gpu = runtime.gpu(kind)
    gpu.set_device(device)
    arrays = [DeviceArray(gpu, "uint8", (_COUNT,), device=device) for _ in range(2)]
    sent = bytes(k % 251 for k in range(_COUNT))
    _core.unpack(bytearray(sent), [arrays[0]])
    buffers = [MPI.memory.fromaddress(array._memory.address, _COUNT) for array in arrays]
    requests = [MPI.COMM_SELF.Irecv(buffers[1], 0, 0), MPI.COMM_SELF.Isend(buffers[0], 0, 0)]
    MPI.Request.Waitall(requests)
    if arrays[1].numpy().tobytes() != sent:
        sys.exit("the message arrived with other bytes")
    print("arrived", flush=True)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
