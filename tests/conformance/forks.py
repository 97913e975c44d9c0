"""Children that a test makes by fork."""

import contextlib
import os
from collections.abc import Callable


def in_child(work: Callable[[], bool]) -> Callable[[], bool]:
    """Starts `work()` in a forked child. Returns what waits for its end and says whether it returned True."""
    pid = os.fork()
    if pid == 0:
        ended_well = False
        with contextlib.suppress(BaseException):
            ended_well = work()
        os._exit(0 if ended_well is True else 1)
    return lambda: os.waitpid(pid, 0)[1] == 0
