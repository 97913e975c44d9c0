"""Runs in a rank that a notebook has started: executes its commands one by one and answers each."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import linecache
import pickle
import signal
import sys
import traceback
import types
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from samestep.errors import StepError
from samestep.launch import processes
from samestep.world import crash_report
from samestep.world.lifecycle import finalize, get_distributed_backend, initialized


def main(fd: int, parent: int) -> None:
    """Executes the commands that arrive at the socket `fd` until it is closed; dies with the process `parent`."""
    processes.die_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the notebook gets it, and ends the ranks
    sys.modules["__main__"] = types.ModuleType("__main__")
    with Connection(fd) as notebook, contextlib.suppress(EOFError, ConnectionError):
        sys.path[:] = pickle.loads(notebook.recv_bytes())
        while True:
            kind, content = pickle.loads(notebook.recv_bytes())
            answer, error = _answer(
                partial(_call, content) if kind == "call" else partial(_run_cell, *content)
            )
            if kind == "call" and error is not None:
                crash_report.remember(error)  # the other ranks are given it as the reason
            notebook.send_bytes(answer)
            if kind == "call":
                return
    finalize()


def _answer(act: Callable[[], bytes]) -> tuple[bytes, BaseException | None]:
    """The result or the exception of `act`, as bytes. Flushes its output first."""
    try:
        error, answer = None, pickle.dumps(("result", act()))
    except BaseException as raised:
        error = raised.__cause__ if isinstance(raised, StepError) and raised.__cause__ else raised
        answer = pickle.dumps(("error", {**crash_report.record_of(error), "traceback": _traceback(error)}))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the user's code may have closed it
            stream.flush()
    ctypes.CDLL(None).fflush(None)
    return answer, error


def _traceback(error: BaseException) -> str:
    """The traceback without the lines of this file, which are above the user's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _call(order: bytes) -> bytes:
    """Calls the function of a `launch`; returns its pickled result."""
    function, arguments, keywords = pickle.loads(order)
    result = function(*arguments, **keywords)
    finalize()
    return dumps(result)


def _run_cell(source: str, number: int) -> bytes:
    """Runs a cell in `__main__`, and prints the value of an expression at its end.

    If there is a world, an exception on one rank ends the cell on all of them.
    """
    name = f"<ranks cell {number}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    namespace = sys.modules["__main__"].__dict__
    with get_distributed_backend().together() if initialized() else contextlib.nullcontext():
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
            if value is not None:
                print(repr(value))
    return b""


def dumps(value: Any) -> bytes:
    """The pickled value; by cloudpickle if it is installed, because that takes functions defined anywhere."""
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(value)
    return bytes(cloudpickle.dumps(value))
