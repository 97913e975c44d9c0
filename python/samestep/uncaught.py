"""Remembers the exception that ends the process, for `samestep run` and for the farewell to the other ranks.

`samestep run` gives each rank the name of a file in `SAMESTEP_ERROR_FILE`. Time and class in it tell the
launcher which rank failed first, and which failed only because another one did.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from types import TracebackType

_MOST_TEXT = 2000
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")

_last: BaseException | None = None
_installed = False


def install() -> None:
    """Wraps `sys.excepthook`, once; the hook that was there is called afterwards, unchanged.

    `SystemExit` does not pass the hook: such a process tells all by its exit code.
    """
    global _installed  # noqa: PLW0603
    if _installed:
        return
    _installed = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        global _last  # noqa: PLW0603
        _last = error
        path = os.environ.get("SAMESTEP_ERROR_FILE")
        if path:
            with contextlib.suppress(OSError):  # the traceback matters more
                _write(path, kind, error)
        before(kind, error, traceback)

    sys.excepthook = hook


def remember(error: BaseException) -> None:
    """Notes the exception that is about to end this process, where it does not pass `sys.excepthook`."""
    global _last  # noqa: PLW0603
    _last = error


def last_uncaught() -> BaseException | None:
    """The exception that is ending this process, or None."""
    return _last


def _write(path: str, kind: type[BaseException], error: BaseException) -> None:
    import json  # is rarely needed

    record = {
        "time": time.time(),
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "rank": _rank(),
        "text": _text_of(error),
        "pid": os.getpid(),
    }
    unfinished = f"{path}.{os.getpid()}"
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(record, file)
    os.replace(unfinished, path)


def _rank() -> int | None:
    for name in _RANK_VARIABLES:
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return None


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:_MOST_TEXT]
    except Exception:
        return ""
