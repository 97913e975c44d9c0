"""Worlds of ranks with fake devices, for the mark `ranks(..., backends=["fakes"])`."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_arrays
import fake_libraries
import samestep as ss
from device_group import DeviceGroup, through_group
from samestep import world
from samestep.backend import Backend, MPIBackend, NCCLBackend
from samestep.testing import world as worlds

# For as long as the process lives, in which threads look at devices also when no test runs.
DEFAULTS = {
    "FAKE_GPU_DELAY_US": "300",  # the longest before each thing in a stream: wrong numbers where an order is missing
    "FAKE_GPU_DEVICES": "8",  # two for each of four ranks
}


@contextlib.contextmanager
def variables(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _set_defaults() -> None:
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def _opening(backend: type[Backend], **settings: str) -> Any:
    def open_world(timeout: float, _: Path) -> Backend:
        _set_defaults()
        with variables(**fake_libraries.environment(), **settings):
            return world.initialize(backend, timeout=timeout)

    return open_world


FUNCTIONS = (ss.synchronize, ss.allreduce_gradients, ss.DistributedOptimizer)


def _native(timeout: float, folder: Path) -> Backend:
    _set_defaults()
    with variables(**fake_libraries.environment(), SAMESTEP_STAGING_PIECE="65536"):
        return worlds._native(timeout, folder)


def _for_numpy(name: str, open_world: Any) -> Any:
    def open_group(timeout: float, folder: Path) -> Any:
        os.environ["FAKE_GPU_HOST_ACCESS"] = "1" if name == "aware" else "0"
        backend = open_world(timeout, folder)
        for function in FUNCTIONS:
            setattr(ss, function.__name__, through_group(function))
        return DeviceGroup(backend, fake_arrays.Stream())

    return open_group


WORLDS = {
    "fakes": _opening(NCCLBackend),
    "late": _opening(NCCLBackend, FAKE_NCCL_IN_PROGRESS="3"),
    "checked": _opening(NCCLBackend, SAMESTEP_NCCL_CHECK="before"),
    "staged": _opening(MPIBackend, SAMESTEP_STAGING_PIECE="65536"),
    "staged-native": _native,
    "aware": _opening(MPIBackend, SAMESTEP_GPU_AWARE_MPI="1"),
    "staged-direct": _opening(MPIBackend, SAMESTEP_STAGING_PIECE="65536", SAMESTEP_MPI_ENGINE="direct"),
}


NCCL_WORLDS = "device-(fakes|late|checked)"
# Tests of tests/conformance that ask of device memory what is not promised of it: worlds, tests, why.
LEFT_OUT = (
    ("device-", "test_lifecycle.py", "these tests make worlds of their own"),
    ("device-", "test_the_error_names_the_operation_its_number", "device operations are numbered apart"),
    (NCCL_WORLDS, "factor_of_each_rank.*float16", "NCCL rounds factors to the type of the array"),
    ("device-(fakes|late)", "test_mismatch.py", "ranks compare beside the operation: the group has ended"),
    ("device-", "test_objects_are_left_with_one_warning", "the warning names the wrapper's file"),
    (
        "device-",
        "test_a_dropped_(work|operation)_is_carried_out",
        "what it wrote is not brought back from the device",
    ),
    (
        NCCL_WORLDS,
        "test_a_rank_that_only_calls_collectives",
        "what NCCL does moves no messages: they go on while a rank waits for one or asks whether it is done",
    ),
    (
        NCCL_WORLDS,
        "test_lists.py::test_ranks_that_differ",
        "where lists of devices are known other texts say it: tests/devices/test_device_lists.py has the cases",
    ),
    (
        f"{NCCL_WORLDS}-3",
        "test_a_short_wait",
        "to free memory waits for the device, and so for the other ranks",
    ),
    ("device-", "test_mismatch.*barrier", "barriers are of the host: the others wait until the deadline"),
)


def why_left_out(nodeid: str) -> str:
    """Why a test is not for a world of devices, "" if it is."""
    for worlds_, tests, why in LEFT_OUT:
        if re.search(worlds_, nodeid) and re.search(tests, nodeid):
            return why
    return ""


def offer() -> None:
    """Names of worlds whose ranks have fake devices.

    `fakes`: NCCL. `late`: NCCL that returns before it has begun. `checked`: NCCL, where ranks compare first.
    `aware`: MPI that is given device memory, which with FAKE_GPU_HOST_ACCESS=1 it survives; `device-aware` sets that.
    `staged`: MPI with shared memory, through pinned memory in small pieces; `staged-direct`: all through MPI.

    `device-fakes` and so on are the same for tests that know NumPy only: what they pass is in device memory to the
    backend.
    """
    for name, opening in WORLDS.items():
        worlds.offer(name, opening)
        worlds.offer(f"device-{name}", _for_numpy(name, opening))
