"""The jobs that each item runs in, and the order that needs the fewest launches."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from samestep.testing import markers
from samestep.testing.options import backend_names

WORLD = "_samestep_world"


def parametrise(metafunc: pytest.Metafunc) -> None:
    """Make one item of a marked test for each world it is for."""
    mark = markers.of(metafunc.definition)
    if mark is None:
        return
    names = backend_names(metafunc.config)
    jobs = mark.jobs(names, with_group="group" in metafunc.fixturenames)
    if not jobs:
        node, given = metafunc.definition.nodeid, ", ".join(mark.backends or names) or "nothing"
        pytest.fail(
            f"{node}: ranks: no backend for {mark.sizes}: samestep_backends or the mark names {given}",
            pytrace=False,
        )
    metafunc.fixturenames.append(WORLD)
    metafunc.parametrize(WORLD, jobs, indirect=True, ids=str)


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
    names = [world.backend] if world.backend else (mark and mark.backends) or backend_names(item.config)
    return Start(world.size, world.size > 1 and any(name not in markers.WITHOUT_MPI for name in names))


def sort(items: list[pytest.Item]) -> None:
    """Group the items that share a launch. Items with a launch of their own follow those with the same start.

    Unmarked items come first. Files, and the items of a file on one backend, keep the order they had.
    """
    first_seen: dict[object, int] = {}
    for item in items:
        first_seen.setdefault(item.path, len(first_seen))

    def key(item: pytest.Item) -> tuple[object, ...]:
        mark = markers.of(item)
        if mark is None:
            return (Start(0, mpi=False), False, first_seen[item.path], "")
        return (start_of(item), mark.alone, first_seen[item.path], world_of(item).backend or "")

    items.sort(key=key)
