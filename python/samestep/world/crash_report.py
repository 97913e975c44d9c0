"""Remembers the exception that ends the process, for `samestep run` and for the leave notice to the other ranks.

`samestep run` gives each rank the name of a file in `SAMESTEP_ERROR_FILE`. Time and class in it tell the
launcher which rank failed first, and which failed only because another one did.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from types import TracebackType
from typing import Any

from samestep import _settings
from samestep._util.text import chain, error_text, sendable
from samestep.errors import Error, PeerLostError

_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")

_last: BaseException | None = None
_hook: Any = None


def install() -> None:
    """Wraps `sys.excepthook`, once; the hook that was there is called afterwards, unchanged.

    `SystemExit` does not pass the hook: such a process tells all by its exit code.
    """
    global _hook  # noqa: PLW0603
    if _hook is not None:
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        global _last  # noqa: PLW0603
        _last = error
        path = _settings.get(_settings.ERROR_FILE)
        if path:
            with contextlib.suppress(Exception):  # the traceback matters more
                _write(path, error)
        before(kind, error, traceback)

    sys.excepthook = _hook = hook


def remember(error: BaseException) -> None:
    """Notes the exception that is about to end this process, if it does not reach `sys.excepthook`."""
    global _last  # noqa: PLW0603
    _last = error


def last_uncaught() -> BaseException | None:
    """The exception that is ending this process, or None."""
    if _last is None and sys.excepthook is not _hook and not hasattr(sys, "ps1"):
        # Another hook has taken the place of ours. Python notes the exception before it calls any; in an interactive
        # session, which goes on, that is not its end.
        return getattr(sys, "last_value", None)
    return _last


def record_of(error: BaseException) -> dict[str, Any]:
    """What the process that started this one is to know of an exception that ends it, as it can stand in JSON."""
    record: dict[str, Any] = {
        "time": time.time(),
        "class": _class_of(error),
        "rank": _rank(),
        "text": error_text(error),
        "pid": os.getpid(),
    }
    for below in itertools.islice(chain(error, suppressed=False), 1, None):
        if issubclass(type(below), Error):  # that `error` was raised from, or while handling
            record["because"] = {"class": _class_of(below), "text": error_text(below)}
            break
    return record


def _class_of(error: BaseException) -> str:
    return sendable(f"{type(error).__module__}.{type(error).__qualname__}")


def is_of_lost_peer(error: BaseException | None) -> bool:
    """Whether it is a PeerLostError, or was raised while one was handled.

    Example:
      >>> from samestep import PeerLostError
      >>> try:
      ...     try:
      ...         raise PeerLostError("rank 1 has left")
      ...     except PeerLostError as error:
      ...         raise RuntimeError("training failed") from error
      ... except RuntimeError as error:
      ...     is_of_lost_peer(error), is_of_lost_peer(KeyError())
      (True, False)
    """
    return any(issubclass(type(one), PeerLostError) for one in chain(error))


def _write(path: str, error: BaseException) -> None:
    import json  # is rarely needed

    unfinished = f"{path}.{os.getpid()}"
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(record_of(error), file)
    os.replace(unfinished, path)


def _rank() -> int | None:
    world = getattr(sys.modules.get("samestep.world.lifecycle"), "_world", None)
    if world is not None:
        return int(world.rank)
    for name in _RANK_VARIABLES:
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return None
