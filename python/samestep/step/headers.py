"""The exchange before the data of a step: each rank's tree, weights and problems, as a few words."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from samestep.group.group import Group
    from samestep.trees.fusion import Timer

__all__ = ["ALL_PRESENT", "NO_OPINION", "Header", "StepHeaders"]

_N_WORDS = 4  # before the weights

NO_OPINION = 0
ALL_PRESENT = 1


class Header(NamedTuple):
    """The description of one rank's part of a step."""

    digest: int
    """Of the tree; 0 on a rank that has seen none."""
    present: int
    """Which leaves had an array: a hash, or one of the numbers above."""
    problem: int
    """Whether something is wrong on this rank, which the ranks then tell each other."""
    weights: list[float]
    """Of its nodes, in order."""


class StepHeaders:
    """Exchanges headers, step after step, in the same memory.

    Args:
      backend: the group.
      n_weights: the largest number of nodes of a rank.
    """

    def __init__(self, backend: Group, n_weights: int) -> None:
        self._backend = backend
        self._row = np.zeros(_N_WORDS + n_weights, np.uint64)
        self._weights = self._row[_N_WORDS:].view(np.float64)
        self._table = np.zeros((backend.size, len(self._row)), np.uint64)
        self._table_weights = self._table[:, _N_WORDS:].view(np.float64)

    def exchange(self, mine: Header, left: Timer) -> list[Header]:
        """The headers of all ranks, in order. Collective."""
        n_weights = len(mine.weights)
        self._row[:_N_WORDS] = mine.digest, mine.present, mine.problem, n_weights
        self._weights[:n_weights] = mine.weights
        self._backend.allgather(self._row, out=self._table, timeout=left())
        rows = zip(self._table[:, :_N_WORDS].tolist(), self._table_weights.tolist(), strict=True)
        return [
            Header(digest, present, problem, weights[:count])
            for (digest, present, problem, count), weights in rows
        ]
