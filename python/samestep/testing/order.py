"""Which worlds each item is for, and the order that needs the fewest launches."""

from __future__ import annotations

import pytest

from samestep.testing import marks
from samestep.testing.options import backend_names

WORLD = "_samestep_world"


def parametrise(metafunc: pytest.Metafunc) -> None:
    """Make one item of a marked test for each world it is for."""
    mark = marks.of(metafunc.definition)
    if mark is None:
        return
    worlds = mark.worlds(backend_names(metafunc.config), with_group="group" in metafunc.fixturenames)
    metafunc.fixturenames.append(WORLD)
    metafunc.parametrize(WORLD, worlds, indirect=True, ids=str)


def world_of(item: pytest.Item) -> marks.World:
    """The world that `item`, which has the mark, is for."""
    world: marks.World = item.callspec.params[WORLD]  # type: ignore[attr-defined]
    return world


def sort(items: list[pytest.Item]) -> None:
    """Bring together what shares a launch; items of a launch of their own follow those of their rank count.

    Unmarked items come first. Files, and the items of a file on one backend, keep the order they had.
    """
    first_seen: dict[object, int] = {}
    for item in items:
        first_seen.setdefault(item.path, len(first_seen))

    def key(item: pytest.Item) -> tuple[object, ...]:
        mark = marks.of(item)
        if mark is None:
            return (0, False, first_seen[item.path], "")
        world = world_of(item)
        return (world.size, mark.alone, first_seen[item.path], world.backend or "")

    items.sort(key=key)
