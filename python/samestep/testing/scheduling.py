"""The world that each item runs in, and how its ranks are started."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from samestep.testing import markers
from samestep.testing.options import BACKENDS_INI

WORLD = "_samestep_world"


def world_of(item: pytest.Item) -> markers.World:
    """The world in which `item`, which has the mark, runs."""
    world: markers.World = item.callspec.params[WORLD]  # type: ignore[attr-defined]
    return world


class Start(NamedTuple):
    """How the ranks of an item are started: how many, and whether by the launcher of an MPI library."""

    size: int
    mpi: bool


def start_of(item: pytest.Item) -> Start:
    """How to start the ranks of `item`, which has the mark. MPI is started only for jobs that use it.

    A test without `group` makes its own world. MPI starts its ranks if the mark, or else the ini
    option, names an MPI backend.
    """
    world, mark = world_of(item), markers.of(item)
    names = [world.backend] if world.backend else (mark and mark.backends) or item.config.getini(BACKENDS_INI)
    return Start(world.size, world.size > 1 and any(name not in markers.WITHOUT_MPI for name in names))
