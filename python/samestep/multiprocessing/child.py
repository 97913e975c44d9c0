"""What runs in a process that `spawn` has started."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from samestep import uncaught
from samestep.launch import processes

__all__ = ["run"]


def run(fn: Callable[..., Any], index: int, args: tuple[Any, ...], report: Connection, parent: int) -> None:
    """Calls `fn(index, *args)`; what it raises goes to the parent, with the time. Dies with the parent."""
    processes.die_with_parent(parent, signal.SIGKILL)
    try:
        fn(index, *args)
    except KeyboardInterrupt:  # the parent has got it, too
        pass
    except Exception as error:
        uncaught.remember(error)
        record = {
            "time": time.time(),
            "class": f"{type(error).__module__}.{type(error).__qualname__}",
            "text": traceback.format_exc(),
            "pid": os.getpid(),
        }
        report.send_bytes(json.dumps(record).encode())
        sys.exit(1)
    finally:
        report.close()
