"""The errors of the package: one class for each way a caller can react.

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
    "TimeoutError",
    "UnavailableError",
]


class Error(Exception):
    """Base of every error that samestep raises."""

    # Users see and pickle the public name.
    __module__ = "samestep"


class InvalidArgumentError(Error, ValueError):
    """The caller's mistake: a wrong value. Nothing has happened; retrying cannot help."""

    __module__ = "samestep"


class MismatchError(Error, ValueError):
    """Ranks disagree about one operation. Raised with the same text on every rank; the group stays usable."""

    __module__ = "samestep"


class NotInitializedError(Error, RuntimeError):
    """There is no backend yet, the group has been closed, or this process was forked from a rank."""

    __module__ = "samestep"


class UnavailableError(Error, RuntimeError):
    """A backend, library or device cannot be used. Says what was looked for, and the cure."""

    __module__ = "samestep"


class TimeoutError(Error, builtins.TimeoutError):
    """A deadline has passed. Names the operation, who arrived and who did not; the peers may still be alive."""

    __module__ = "samestep"


class PeerLostError(Error, ConnectionError):
    """A peer has ended or left the group, which cannot be used any more."""

    __module__ = "samestep"
