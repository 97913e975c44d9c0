"""Signals whose handler raises while a call waits, however busy the machine."""

import contextlib
import os
import signal
import traceback

import samestep as ss

PACKAGE = os.path.dirname(ss.__file__)
EVERY_S = 0.2


class Stopped(Exception):
    """What the handler of a signal raises."""


@contextlib.contextmanager
def raised_inside():
    """Raises Stopped in this block, once two signals in a row have come inside of samestep: the first of a call may
    come before it has begun an operation."""
    before = False

    def stop(_, frame):
        nonlocal before
        inside = any(each.f_code.co_filename.startswith(PACKAGE) for each, _ in traceback.walk_stack(frame))
        if before and inside:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise Stopped
        before = inside

    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, EVERY_S, EVERY_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
