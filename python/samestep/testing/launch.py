"""Starts, watches and ends fresh interpreters for the tests of some files."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from samestep.launch import mpirun
from samestep.testing import protocol
from samestep.testing.processes import Processes
from samestep.testing.scheduling import Start

START_S = 120.0  # every rank must have collected its files by then; importing frameworks is slow on few cores
QUIT_S = 30.0  # a normal end
TERM_S = 3.0  # between SIGTERM and SIGKILL
DUMP_S = 2.0  # for a rank to write where it is
POLL_S = 0.05


class LaunchError(Exception):
    """The ranks could not be started; the text says what happened and what they printed."""


class Launch:
    """Fresh interpreters, ready to run the tests of the files at `paths` one after the other.

    Args:
      start: how many ranks, and whether by the launcher of an MPI library.
      paths: the test files.
      options: options of pytest in the ranks.
      folder: an empty folder for the socket, the logs and temporary files.
      tolerant: ask the launcher not to end the other ranks when one dies.

    Attributes:
      problems: the error of each file that a rank could not collect, by the part of a node id before "::".

    Raises:
      LaunchError: a rank did not start.
    """

    def __init__(
        self, start: Start, paths: Sequence[Path], *, options: dict[str, Any], folder: Path, tolerant: bool
    ) -> None:
        self.start = start
        self.size = start.size
        self.paths = list(paths)
        self.problems: dict[str, str] = {}
        self.folder = folder
        self.connections: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "s"))
            listener.listen(self.size)
            try:
                self._processes = Processes(start, folder, tolerant=tolerant)
            except mpirun.LaunchError as error:
                raise LaunchError(f"{self.size} ranks cannot be started: {error}") from None
            try:
                self._meet(listener, options)
            except BaseException:
                self.kill()
                raise

    def _meet(self, listener: socket.socket, options: dict[str, Any]) -> None:
        deadline = time.monotonic() + START_S
        for _ in range(self.size):
            self._until(deadline, lambda: select.select([listener], [], [], POLL_S)[0], "started")
            end, _ = listener.accept()
            connection = Connection(end.detach())
            hello = self._read(connection, deadline)
            self.connections[hello.rank] = connection
            self._pids[hello.rank] = hello.pid
        if set(self.connections) != set(range(self.size)):
            raise LaunchError(f"of {self.size} ranks these came: {sorted(self.connections)}")
        for connection in self.connections.values():
            connection.send(protocol.Setup(options, [str(path) for path in self.paths]))
        for rank, connection in self.connections.items():
            for file, problem in self._read(connection, deadline).problems.items():
                self.problems.setdefault(file, f"rank {rank} could not collect {file}:\n{problem}")

    def problem(self, nodeid: str) -> str:
        """Why the file of test `nodeid`, or a folder it lies in, could not be collected; may be empty."""
        path = Path(nodeid.partition("::")[0])
        return next((text for p in (path, *path.parents) if (text := self.problems.get(str(p)))), "")

    def _read(self, connection: Connection, deadline: float) -> Any:
        self._until(deadline, lambda: connection.poll(POLL_S), "answered")
        try:
            return connection.recv()
        except (EOFError, OSError):
            raise LaunchError(f"a rank ended while it was being started{self.printed()}") from None

    def _until(self, deadline: float, ready: Callable[[], Any], act: str) -> None:
        while not ready():
            gone = self._processes.first_code()
            if gone is not None or time.monotonic() > deadline:
                who = "the launcher" if self.start.mpi else "a rank"
                why = (
                    f"{who} ended with exit code {gone}" if gone is not None else f"{START_S:g} s have passed"
                )
                raise LaunchError(f"not all of {self.size} ranks have {act}: {why}{self.printed()}")

    def tell(self, order: protocol.Run) -> None:
        """Send `order` to all ranks that are alive."""
        for connection in self.connections.values():
            with contextlib.suppress(OSError):  # the reader sees the end of the file
                connection.send(order)

    def dump(self, ranks: Iterable[int]) -> dict[int, str]:
        """The Python tracebacks of all threads of each of `ranks`."""
        before = {rank: self._log(rank) for rank in ranks}
        for rank in before:
            self._signal(self._pids[rank], signal.SIGUSR1)
        deadline = time.monotonic() + DUMP_S
        last: dict[int, str] = {}
        while time.monotonic() < deadline:  # until all have written, and no rank writes any more
            now = {rank: self._log(rank)[len(text) :] for rank, text in before.items()}
            if now == last and all(now.values()):
                break
            last = now
            time.sleep(POLL_S)
        return {rank: _shorten(text) for rank, text in last.items()}

    def printed(self, rank: int | None = None) -> str:
        """The last lines that a rank, or all of them and the launcher, wrote past pytest; may be empty."""
        if rank is None:
            return "".join(self._tail(f"rank_{r}") for r in range(self.size)) + self._tail("launcher")
        return self._tail(f"rank_{rank}")

    def last_output(self) -> str:
        """The message of the launcher about a rank that died. Unless tolerant, the launcher then ends by itself."""
        if not self.start.mpi:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes.wait(TERM_S)
        return self._tail("launcher")

    def _tail(self, name: str, lines: int = 40) -> str:
        path = self.folder / f"{name}.log"
        text = _shorten(path.read_text(errors="replace")) if path.exists() else ""
        return f"\n--- {name}.log\n" + "\n".join(text.rstrip().split("\n")[-lines:]) if text else ""

    def _log(self, rank: int) -> str:
        return (self.folder / f"rank_{rank}.log").read_text(errors="replace")

    def quit(self) -> str:
        """End the ranks normally, by finalising; a rank that does not end in time is killed.

        Returns:
          What went wrong, or an empty string.
        """
        for connection in self.connections.values():
            with contextlib.suppress(OSError):
                connection.send(None)
        try:
            code = self._processes.wait(QUIT_S)
        except subprocess.TimeoutExpired:
            places = "".join(f"\nrank {rank}: {text}" for rank, text in self.dump(self.connections).items())
            self.kill()
            return f"the ranks did not end within {QUIT_S:g} s{places}"
        self._processes.close()
        self._close()
        return f"the ranks ended with exit code {code}{self.printed()}" if code else ""

    def kill(self) -> None:
        """End the ranks now, by SIGTERM and then by SIGKILL."""
        self._processes.terminate(TERM_S)
        for rank, connection in self.connections.items():
            if _open(connection):  # so the process still exists, and its id has not been reused
                self._signal(self._pids[rank], signal.SIGKILL)
        self._processes.kill()
        self._close()

    def forget(self, rank: int) -> None:
        """The rank has closed its socket: it has ended or is about to."""
        self.connections.pop(rank).close()
        self._pids.pop(rank)

    def _signal(self, pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def _close(self) -> None:
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()
        self._pids.clear()


def _open(connection: Connection) -> bool:
    """Whether the other end is still open; discards what it has sent meanwhile."""
    try:
        while connection.poll(0):
            connection.recv()
    except (EOFError, OSError):
        return False
    return True


def _shorten(traceback: str) -> str:
    """Leave out of faulthandler's tracebacks what lies below the test function, which is pytest."""
    return re.sub(r"\n  File [^\n]* in pytest_pyfunc_call(\n  File [^\n]*)*", "", traceback)
