"""Arrays that share memory: which are views of the same elements, and which have some elements in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from samestep import _core


class Place(NamedTuple):
    """The elements of one array in memory."""

    leaf: int
    """Its number."""
    dtype: str
    begin: int
    """The lowest address."""
    nbytes: int
    """From there to the end of the last element."""
    axes: tuple[tuple[int, int], ...]
    """(stride, extent) from the outermost to the innermost: strides positive, extents above 1, runs joined."""
    itemsize: int
    written: bool
    folded: bool
    """Whether elements share memory with each other, as after `expand`."""
    address: int
    strides: tuple[int, ...]

    @property
    def elements(self) -> tuple[object, ...]:
        """Equal for arrays that have the same elements, in whatever order."""
        return (self.dtype, self.begin, self.axes)

    @property
    def is_run(self) -> bool:
        """Whether the elements have no gaps."""
        return not self.axes or (len(self.axes) == 1 and self.axes[0][0] == self.itemsize)


def place(leaf: int, array: Any) -> Place:
    """The place of an array that has elements."""
    known = _core.view_info(array)
    begin, nbytes, folded = _core.memory_span(array)
    itemsize = known.nbytes // math.prod(known.shape)
    axes: list[tuple[int, int]] = []
    for stride, extent in sorted(zip(map(abs, known.strides), known.shape, strict=True), reverse=True):
        if axes and axes[-1][0] == stride * extent:
            axes[-1] = (stride, axes[-1][1] * extent)
        elif extent > 1:
            axes.append((stride, extent))
    return Place(
        leaf,
        known.dtype,
        begin,
        nbytes,
        tuple(axes),
        itemsize,
        known.writable,
        folded,
        known.address,
        known.strides,
    )


def neighbours(places: Sequence[Place]) -> list[list[Place]]:
    """Places in groups, each reaching into another; in order of their numbers. Alone are those that are folded."""
    groups: list[list[Place]] = []
    end = 0
    for one in sorted(places, key=lambda p: p.begin):
        if one.begin >= end:
            groups.append([])
        groups[-1].append(one)
        end = max(end, one.begin + one.nbytes)
    return [sorted(group) for group in groups if len(group) > 1 or group[0].folded]


def find_clash(places: Sequence[Place]) -> tuple[int, int] | None:
    """Two arrays with an element in common that one of them writes. Exact."""
    runs = [p for p in places if p.is_run]
    found = _core.find_conflict([(p.begin, p.nbytes, p.written) for p in runs])
    if found is not None:
        return runs[found[0]].leaf, runs[found[1]].leaf
    if len(runs) == len(places):
        return None
    start = min(p.begin for p in places)
    unit = math.gcd(
        *(n for p in places for n in (p.begin - start, p.itemsize, *(stride for stride, _ in p.axes)))
    )
    taken = np.zeros((max(p.begin + p.nbytes for p in places) - start) // unit, np.bool_)
    done: list[Place] = []
    for one in sorted(places, key=lambda p: not p.written):  # what is only read clashes with what is written
        elements = np.lib.stride_tricks.as_strided(
            taken[(one.begin - start) // unit :],
            (*(extent for _, extent in one.axes), one.itemsize // unit),
            (*(stride // unit for stride, _ in one.axes), 1),
        )
        if elements.any():
            if len(places) == 2:
                return min(one.leaf, done[0].leaf), max(one.leaf, done[0].leaf)
            return next(pair for other in done if (pair := find_clash([other, one])))
        if one.written:
            elements[...] = True
            done.append(one)
    return None
