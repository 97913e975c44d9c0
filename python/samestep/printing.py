"""Printing from many ranks without a muddle."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samestep.backend import Backend


def println(backend: Backend, *args: Any, timeout: float | None = None) -> None:
    """Print from each rank, collectively: whole lines in order of rank, with time and `[rank / size]`.

    Rank 0 does the writing, so the lines cannot mix on their way through a launcher. Arguments are joined
    as by `print`.

    Example:
      >>> import samestep as ss
      >>> backend = ss.initialize()
      >>> ss.println(backend, "loss", 0.25)  # doctest: +SKIP
      2026-11-21 09:25:01 [0 / 1] loss 0.25
    """
    write(backend, " ".join(map(str, args)), end="\n", timeout=timeout)


def write(backend: Backend, text: str, *, end: str, timeout: float | None = None) -> None:
    """Write each rank's `text` in order of rank, with a head on each line and `end` behind it. Collective."""
    head = f"{now()} [{backend.rank} / {backend.size}] "
    mine = "\n".join(head + line for line in text.split("\n")) + end
    texts = backend.gather_object(mine, root=0, timeout=timeout)
    if texts is not None:
        sys.stdout.write("".join(texts))
        sys.stdout.flush()


def now() -> str:
    """This host's local time, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S")
