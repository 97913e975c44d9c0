"""Worlds of ranks with fake devices, for the mark `ranks(..., backends=["fakes"])`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_libraries
from samestep import world
from samestep.backend import Backend, MPIBackend, NCCLBackend
from samestep.testing import world as worlds

DELAY_US = (
    "300"  # the longest before each thing in a stream: enough for wrong numbers where an order is missing
)


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


def _opening(backend: type[Backend], **settings: str) -> Any:
    def open_world(timeout: float, _: Path) -> Backend:
        os.environ.setdefault("FAKE_GPU_DELAY_US", DELAY_US)
        with variables(**fake_libraries.environment(), **settings):
            return world.initialize(backend, timeout=timeout)

    return open_world


def offer() -> None:
    """Names of worlds.

    `fakes`: NCCL. `late`: NCCL that returns before it has begun. `checked`: NCCL, where ranks compare first.
    `staged`: MPI, through pinned memory in small pieces.
    """
    worlds.offer("fakes", _opening(NCCLBackend))
    worlds.offer("late", _opening(NCCLBackend, FAKE_NCCL_IN_PROGRESS="1"))
    worlds.offer("checked", _opening(NCCLBackend, SAMESTEP_NCCL_CHECK="before"))
    worlds.offer("staged", _opening(MPIBackend, SAMESTEP_STAGING_PIECE="65536"))
