"""Runs in a process that `spawn` has started."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from samestep._util import launchers
from samestep.launch import processes
from samestep.world import crash_report


def run(fn: Callable[..., Any], index: int, args: tuple[Any, ...], report: Connection, parent: int) -> None:
    """Calls `fn(index, *args)`; what it raises is sent to the parent, with the time. Dies with the parent."""
    processes.die_with_parent(parent, signal.SIGKILL)
    # The parent is that rank of MPI.
    for name in os.environ.keys() - launchers.without_mpi(os.environ).keys():
        del os.environ[name]
    try:
        fn(index, *args)
    except KeyboardInterrupt:  # the parent has got it, too
        pass
    except Exception as error:
        crash_report.remember(error)
        record = {**crash_report.record_of(error), "traceback": traceback.format_exc()}
        report.send_bytes(json.dumps(record).encode())
        sys.exit(1)
    finally:
        report.close()
