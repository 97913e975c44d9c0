"""`spawn`: the same function in several fresh interpreters."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import multiprocessing.spawn
import os
import pickletools
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing import popen_spawn_posix
from multiprocessing.connection import Connection
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

from samestep._util import launchers
from samestep._util.at_failure import at_failure
from samestep.errors import InvalidArgumentError
from samestep.launch import processes
from samestep.multiprocessing.context import ProcessContext
from samestep.world import crash_report


def spawn(  # noqa: PLR0917 - positions that scripts rely on
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Run `fn(i, *args)` in `nprocs` fresh interpreters, i = 0, 1, ...

    If one fails, the others are stopped, and the first that failed is reported. A process that
    only lost a peer or timed out is reported only if no other failed. Processes end with their parent.
    They get no variables of a launcher: `fn` passes `rank=i` to `init_process_group`.

    Args:
      fn: a function at the top level of a module. A script may define it itself, a notebook may not.
      args: what it gets after the index.
      nprocs: how many processes, at least 1.
      join: wait for all of them.
      daemon: whether they are daemons, as `multiprocessing` has it.
      start_method: "spawn".

    Returns:
      None once all have ended well; with `join=False` a `ProcessContext` at once.

    Raises:
      InvalidArgumentError: a wrong number or start method, `fn` and `args` that cannot be pickled or are defined in a
        notebook, or a call outside of `if __name__ == "__main__":`; nothing has been started.
      ProcessRaisedException, ProcessExitedException: as `ProcessContext.join`.

    Example:
      >>> import samestep.multiprocessing as mp
      >>> mp.spawn(print, nprocs=0)
      Traceback (most recent call last):
      ...
      samestep.InvalidArgumentError: spawn: nprocs must be at least 1, got 0
    """
    if isinstance(nprocs, bool) or not isinstance(nprocs, int):
        raise TypeError(f"spawn: nprocs must be an int, got {type(nprocs).__name__}")
    if nprocs < 1:
        raise InvalidArgumentError(f"spawn: nprocs must be at least 1, got {nprocs}")
    if start_method != "spawn":
        raise InvalidArgumentError(f"spawn: start_method must be 'spawn', got {start_method!r}")
    _check_pickles(fn, args)
    context = _start(fn, tuple(args), nprocs, daemon=daemon)
    if not join:
        return context
    context.join()
    return None


def _start(fn: Callable[..., Any], args: tuple[Any, ...], nprocs: int, *, daemon: bool) -> ProcessContext:
    fresh = multiprocessing.get_context("spawn")
    started: list[Any] = []
    with at_failure(lambda: ProcessContext(started)._end(0.0)):
        for i in range(nprocs):
            ours, theirs = fresh.Pipe(duplex=False)
            process = fresh.Process(target=_run, args=(fn, i, args, theirs, os.getpid()), daemon=daemon)
            with at_failure(ours.close), theirs:
                process.start()
            started.append((process, ours))
    return ProcessContext(started)


def _run(fn: Callable[..., Any], index: int, args: tuple[Any, ...], report: Connection, parent: int) -> None:
    """In the new process: calls `fn(index, *args)`, and sends what it raises, with the time. Dies with the parent."""
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


class _TrialRun:
    """Stands for a process that is being started, so that locks and queues can be pickled."""

    DupFd = popen_spawn_posix._DupFd

    def duplicate_for_child(self, fd: int) -> int:
        return fd


def _check_pickles(fn: Any, args: Any) -> None:
    """Refuse objects that cannot be sent to a new process, while the caller can still be advised."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InvalidArgumentError(
            "spawn: called while a process that it has started imports this script. Put the call under "
            "`if __name__ == '__main__':`, so that it is made once"
        )
    if not callable(fn):
        raise TypeError(f"spawn: fn must be a function, got {type(fn).__name__}")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"spawn: args must be a tuple, got {type(args).__name__}")
    cures = {
        "fn": "Define it with `def` at the top level of a module",
        "args": "Pass numbers, arrays and other plain data, and open files and the like in fn",
    }
    main = multiprocessing.spawn.get_preparation_data("")  # by which a new process looks for `__main__`
    can_import_main = "init_main_from_name" in main or os.path.isfile(main.get("init_main_from_path", ""))
    for name, value in (("fn", fn), ("args", tuple(args))):
        try:
            pickled = _try(value)
        except Exception as error:
            raise InvalidArgumentError(
                f"spawn: {name} cannot be pickled, which is how it gets to the new processes ({error}). {cures[name]}"
            ) from error
        if (of_main := _name_in_main(pickled)) and not can_import_main:
            raise InvalidArgumentError(
                f"spawn: {of_main} is defined in a notebook or an interactive session, which new processes cannot "
                f"import. Write it to a file and import it from there: in a notebook begin the cell with "
                f"`%%writefile train.py`, then `import train` and pass train.{of_main}"
            )


def _try(value: Any) -> bytes:
    rehearsal: Any = _TrialRun()
    set_spawning_popen(rehearsal)
    try:
        return bytes(ForkingPickler.dumps(value))
    finally:
        set_spawning_popen(None)


def _name_in_main(pickled: bytes) -> str:
    """The first function or class of `__main__` that is part of a pickle, or ""."""
    texts = [argument for _, argument, _ in pickletools.genops(pickled) if isinstance(argument, str)]
    return next((name for module, name in itertools.pairwise(texts) if module == "__main__"), "")
