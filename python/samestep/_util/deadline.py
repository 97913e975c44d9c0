"""Timeouts in seconds as users give them, and the time that remains of them."""

from __future__ import annotations

import math
import time
from typing import Any

from samestep._util.text import short_repr
from samestep.errors import InvalidArgumentError

MAX_SECONDS = 1e9
"""The longest timeout, 31 years."""


def seconds(timeout: Any, what: str = "timeout", *, may_be_over: bool = False) -> float:
    """A timeout that a user gave, checked before anything is started.

    Args:
      what: the name of the argument or the variable, for the error.
      may_be_over: a number <= 0 is a deadline that has passed already.

    Raises:
      InvalidArgumentError: it is not a number, is not a time to wait, or is longer than `MAX_SECONDS`.

    Example:
      >>> seconds("2.5")
      2.5
    """
    try:
        value = float(timeout)
    except (TypeError, ValueError):
        value = math.nan
    except OverflowError:
        value = math.inf
    least = -math.inf if may_be_over else 0.0
    if not least < value <= MAX_SECONDS:
        bounds = "at most 1e9" if may_be_over or value > 0 else "> 0"
        raise InvalidArgumentError(f"{what} must be a number of seconds {bounds}, got {short_repr(timeout)}")
    return value


class Deadline:
    """The end of one call's time, for all of its steps."""

    __slots__ = ("_end",)

    def __init__(self, timeout: float) -> None:
        self._end = time.monotonic() + timeout

    def left(self) -> float:
        """Seconds, never below 0."""
        return max(0.0, self._end - time.monotonic())
