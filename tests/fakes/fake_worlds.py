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
import real_libraries
import samestep as ss
from device_group import DeviceGroup, through_group
from samestep.backend import Backend, MPIBackend, NCCLBackend
from samestep.testing import world as testing_world
from samestep.world import lifecycle

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
    if real_libraries.wanted():
        real_libraries.let_ranks_share_a_device()
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def _opener(backend: type[Backend], **settings: str) -> Any:
    def open_world(timeout: float, _: Path) -> Backend:
        _set_defaults()
        with variables(**fake_libraries.environment(), **settings):
            return lifecycle.initialize(backend, timeout=timeout)

    return open_world


FUNCTIONS = (ss.synchronize, ss.allreduce_gradients, ss.DistributedOptimizer)


def _native_opener(**settings: str) -> Any:
    def open_world(timeout: float, folder: Path) -> Backend:
        _set_defaults()
        with variables(**fake_libraries.environment(), **settings):
            return testing_world._native(timeout, folder)

    return open_world


def _for_numpy(name: str, open_world: Any) -> Any:
    def open_group(timeout: float, folder: Path) -> Any:
        os.environ["FAKE_GPU_HOST_ACCESS"] = "1" if name == "aware" else "0"
        backend = open_world(timeout, folder)
        for function in FUNCTIONS:
            setattr(ss, function.__name__, through_group(function))
        return DeviceGroup(backend, fake_arrays.Stream())

    return open_group


WORLDS = {
    "fakes": _opener(NCCLBackend),
    "staged": _opener(MPIBackend, SAMESTEP_STAGING_BYTES="65536"),
    "staged-native": _native_opener(SAMESTEP_STAGING_BYTES="65536"),
    "staged-default": _native_opener(),
    "aware": _opener(MPIBackend, SAMESTEP_STAGING_BYTES="65536", SAMESTEP_GPU_AWARE_MPI="1"),
    "staged-direct": _opener(MPIBackend, SAMESTEP_STAGING_BYTES="65536", SAMESTEP_MPI_TRANSPORT="mpi"),
}


NCCL_WORLDS = "device-fakes"
# Tests of tests/conformance that ask of device memory what is not promised of it: world, tests, why.
LEFT_OUT = (
    ("device-", "test_lifecycle.py", "each of these tests makes its own world"),
    (
        "device-",
        "test_shared_leaves.py|test_memory_in_use.py|test_arrays_that_share_some_elements|test_no_ranks_part_of_a_state_takes",
        "the wrapper copies each array to memory of its own",
    ),
    ("device-", "test_unknown_leaves.py", "the wrapper opens the containers of a tree itself"),
    ("device-", "test_likely_mistakes.py", "the texts name the wrapper's arrays"),
    (
        "device-",
        "test_immutable_arrays_cannot_be_received_into",
        "the wrapper copies an immutable array to the device",
    ),
    (
        "device-",
        "test_the_error_names_the_operation_its_number",
        "device operations have numbers of their own",
    ),
    (
        NCCL_WORLDS,
        "factor_of_each_rank",
        "NCCL rounds factors to the type of the array, and products with sums",
    ),
    (NCCL_WORLDS, "test_min_and_max_propagate_nan", "of a NaN and a number NCCL takes the number"),
    (
        NCCL_WORLDS,
        "test_operations_of_different_groups_may_interleave",
        "NCCL requires one order of the operations of all groups of a device",
    ),
    (NCCL_WORLDS, "test_mismatch.py", "ranks compare beside the operation: the group has ended"),
    ("device-", "test_objects_are_left_with_one_warning", "the warning names the wrapper's file"),
    (
        "device-",
        "test_a_dropped_(work|operation)_is_carried_out",
        "what it wrote is not brought back from the device",
    ),
    (
        "device-staged",
        "test_many_bad_steps_do_not_grow",
        "memory that an operation staged in when it failed is withdrawn until the end: docs/design/0018",
    ),
    (
        "device-",
        "test_a_cancelled_receive_leaves_its_message",
        "a staged receive does not give back a message that has begun to come",
    ),
    (
        NCCL_WORLDS,
        "test_a_rank_that_only_calls_collectives",
        "what NCCL does moves no messages: they go on while a rank waits for one or asks whether it is done",
    ),
    (
        f"{NCCL_WORLDS}-3",
        "test_a_short_wait",
        "to free memory waits for the device, and so for the other ranks",
    ),
    (
        "device-",
        "test_an_array_met_by_a_receive_of_an_object",
        "it is the host's array that the text describes",
    ),
    ("device-", "test_methods[.]py", "the wrapper of the group is no backend"),
    ("device-", "test_resized_arrays[.]py", "memory of a device has no exported buffer to hold"),
    (
        "device-",
        "test_(an_object_alone_is_no_tree|what_may_differ_is_named)",
        "the wrapper is what is called",
    ),
    (
        "device-",
        "test_user_calls[.]py::test_(an_operator_that_does_not_fit|ranks_that_call_something_else)",
        "operations on devices have texts of their own: tests/devices has the cases",
    ),
    (
        NCCL_WORLDS,
        "test_together[.]py::test_one_rank_returns_early",
        "nobody waits in a block for an operation on a device: its own deadline finds the missing call",
    ),
    (
        "device-",
        "test_(mismatch.*barrier|.*a_rank_that_leaves_early_is_named)",
        "of a barrier, which is on the host, the others learn by another text: see test_device_mixed.py",
    ),
)


def why_left_out(nodeid: str) -> str:
    """Why a test is not for a world of devices, "" if it is."""
    for worlds_, tests, why in LEFT_OUT:
        if re.search(worlds_, nodeid) and re.search(tests, nodeid):
            return why
    return ""


def register_all() -> None:
    """Names of the transports whose ranks have fake devices.

    `fakes`: NCCL. `late`: NCCL before 2.18, whose calls return before they have started.
    `aware`: MPI that is given device memory, which with FAKE_GPU_HOST_ACCESS=1 it survives; `device-aware` sets that.
    `staged`: MPI with shared memory, through pinned memory in small pieces; `staged-direct`: all through MPI;
    `staged-default`: in pieces of the usual length.

    `device-fakes` and so on are the same for tests that know NumPy only: what they pass is in device memory to the
    backend.
    """
    for name, opener in WORLDS.items():
        testing_world.register_world(name, opener)
        testing_world.register_world(f"device-{name}", _for_numpy(name, opener))
