"""The errors of the package: one class for each reaction of a caller.

Each derives from `Error` and from the builtin class that a user would catch.
"""

from __future__ import annotations

import builtins

__all__ = [
    "Error",
    "InvalidArgumentError",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "StepError",
    "TimeoutError",
    "UnavailableError",
]


class Error(Exception):
    """Base of every error that samestep raises."""


class InvalidArgumentError(Error, ValueError):
    """An argument has a wrong value. Nothing was sent; retrying cannot help."""


class MismatchError(Error, ValueError):
    """Ranks called different operations, or passed different arguments. All ranks raise the same text.

    The group stays usable.
    """


class NotInitializedError(Error, RuntimeError):
    """There is no backend yet, the group is closed, or this process was forked from a rank."""


class UnavailableError(Error, RuntimeError):
    """A backend, library or device is missing or unusable. The text says where it was searched, and what to do."""


class _RanksError(Error):
    """What other ranks have caused."""

    ranks: tuple[int, ...] = ()
    """Those ranks, numbered as in the group of the call; empty where they are not known."""
    hosts: tuple[str, ...] = ()
    """The host of each of `ranks`; empty where all ranks run on one host."""


class TimeoutError(_RanksError, builtins.TimeoutError):
    """A deadline has passed. The text names the operation and the ranks that are missing, which may be alive.

    `ranks` and `hosts` are those that are missing.
    """


class PeerLostError(_RanksError, ConnectionError):
    """A peer has ended or left the group. The group can no longer be used.

    `ranks` and `hosts` are the cause, and all ranks that this one knows to have died. Not those that have left in
    consequence.

    Example:
      >>> PeerLostError("rank 1 has left").ranks  # that raised by a call of a group holds (1,)
      ()
    """


class StepError(Error, RuntimeError):
    """An exception on one rank has ended a block of `Backend.together`, on all ranks; the group stays usable.

    On the rank that raised the exception it is the `__cause__`. Arrays that the block has written may hold anything.
    """

    # Of the class, because JAX makes errors of programs without this constructor.
    rank = -1
    """The rank that raised the exception, in the group of the block; -1 while the ranks have not met."""
    kind = ""
    """Name of its class."""
    text = ""
    """Its text."""
    line = ""
    """Where it was raised: "file:line, in function"."""
    is_here = False
    """Whether this rank raised it."""

    def __init__(
        self, message: str, *, rank: int = -1, kind: str = "", text: str = "", line: str = ""
    ) -> None:
        super().__init__(message)
        self.rank, self.kind, self.text, self.line = rank, kind, text, line


for _name in __all__:  # users see and pickle the public name
    globals()[_name].__module__ = "samestep"
