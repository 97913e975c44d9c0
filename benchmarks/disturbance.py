"""Which rounds other processes disturbed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import machine
from processes import Ranks

DISTURBED = 0.1
"""Cores that others may use during a round before it counts as disturbed."""


@dataclass(frozen=True)
class Use:
    """Where the time of some cores went between two moments, in processor seconds of all of them.

    Attributes:
      wall: seconds that passed.
      cores: how many cores.
      idle: for which they had nothing to do.
      own: used by the processes that measure.
      stolen: for which the hypervisor ran something else.
    """

    wall: float
    cores: int
    idle: float
    own: float
    stolen: float

    @property
    def others(self) -> float:
        """Cores that others used, at least 0. Pure.

        What was neither idle nor ours was somebody's. Kernels without steal accounting count stolen time as
        ours, so it is looked at by itself as well.

        Example:
          >>> Use(wall=2.0, cores=2, idle=1.0, own=2.0, stolen=0.0).others
          0.5
        """
        return max(0.0, self.wall * self.cores - self.idle - self.own, self.stolen) / self.wall

    @property
    def disturbed(self) -> bool:
        """Whether others used more than `DISTURBED` cores, beyond what the kernel's ticks can hide. Pure."""
        return self.others > DISTURBED + self.cores * machine.TICK / self.wall


class Watch:
    """Watches the cores the job may run on, from when it is made. Collective."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._cpus = ranks.together(os.sched_getaffinity(0))
        self._start = self._now()

    def use(self) -> Use:
        """Since this was made; the same on all ranks."""
        now = self._now()
        wall, idle, stolen, own = (after - before for after, before in zip(now, self._start, strict=True))
        return self._ranks.agree(Use(wall, len(self._cpus), idle, self._ranks.total(own), stolen))

    def _now(self) -> tuple[float, float, float, float]:
        return machine.clock(self._cpus)


def kept(rounds: Sequence[Use]) -> list[int]:
    """Which rounds the figures come from: the undisturbed ones, or all if there is none. Pure.

    In a round each contender has one turn, so leaving one out favours nobody.
    """
    quiet = [i for i, use in enumerate(rounds) if not use.disturbed]
    return quiet or list(range(len(rounds)))


def together(rounds: Sequence[Use]) -> Use:
    """Rounds as one, in which the kernel's ticks hide less. Pure."""
    fields = ("wall", "idle", "own", "stolen")
    return Use(cores=rounds[0].cores, **{name: sum(getattr(use, name) for use in rounds) for name in fields})
