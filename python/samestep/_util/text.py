"""Ranks and values as they are written in messages."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

LINE_HEAD = rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[\d+ / \d+\] "
"""What a line of `println` begins with, as a pattern. `samestep run` puts no prefix of its own before it."""


def ranks_text(numbers: Sequence[int]) -> str:
    """Names ranks briefly; `numbers` ascend.

    Example:
      >>> ranks_text([0, 1, 2, 5]), ranks_text([3]), ranks_text([])
      ('ranks 0-2, 5', 'rank 3', 'no rank')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(numbers) > 1 else ''} {text}" if text else "no rank"


def by_rank(texts: Sequence[str]) -> str:
    """`a on ranks 0, 2 and b on rank 1`"""
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(str(rank))
    return " and ".join(f"{text} on rank{'s' * (len(r) > 1)} {', '.join(r)}" for text, r in ranks.items())


def short_repr(value: Any) -> str:
    """What a user gave, for an error text, which has to stay readable."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python prints no int of more than 4300 digits
        return "a very large int"
