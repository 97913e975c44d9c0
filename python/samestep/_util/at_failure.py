"""What has to be undone if a block fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def at_failure(undo: Callable[[], object]) -> Iterator[None]:
    """Calls `undo` if the block raises anything, which goes on."""
    try:
        yield
    except BaseException:
        undo()
        raise
