"""Fresh interpreters for the tests of some files, and how they are told, watched and ended."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from samestep.testing import wire

START_S = 120.0  # every rank must have collected its files by then; importing frameworks is slow on few cores
QUIT_S = 30.0  # a normal end
TERM_S = 3.0  # between SIGTERM and SIGKILL
DUMP_S = 2.0  # for a rank to write where it is
POLL_S = 0.05
# MPICH's launcher signals the other ranks and ends when one dies; a shell between them hides the death.
SURVIVE = 'trap "" USR1; "$@"; true'


class LaunchError(Exception):
    """The ranks could not be started; the text says what happened and what they printed."""


class Launch:
    """`size` interpreters, ready to run the tests of the files at `paths` one after the other.

    Args:
      size: number of ranks; one rank needs no launcher.
      paths: the test files.
      options: options of pytest in the ranks.
      folder: an empty folder for the socket, the logs and temporary files.
      tolerant: ask the launcher to let the others live when a rank dies.

    Attributes:
      problems: what a rank says of each file it could not collect, by the part of a node id before "::".

    Raises:
      LaunchError: a rank did not start.
    """

    def __init__(
        self, size: int, paths: Sequence[Path], *, options: dict[str, Any], folder: Path, tolerant: bool
    ) -> None:
        self.size = size
        self.paths = list(paths)
        self.problems: dict[str, str] = {}
        self.folder = folder
        self.connections: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "s"))
            listener.listen(size)
            self._process = self._start(tolerant)
            try:
                self._meet(listener, options)
            except BaseException:
                self.kill()
                raise

    def _start(self, tolerant: bool) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "samestep.testing.worker", str(self.folder / "s"), str(self.folder)]
        env = {"OMP_NUM_THREADS": "1", **os.environ}
        if self.size > 1:
            argv, extra = _under_mpirun(self.size, argv, tolerant=tolerant)
            env |= extra
        with (self.folder / "launcher.log").open("wb") as log:
            return subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _meet(self, listener: socket.socket, options: dict[str, Any]) -> None:
        deadline = time.monotonic() + START_S
        for _ in range(self.size):
            self._until(deadline, lambda: select.select([listener], [], [], POLL_S)[0], "started")
            end, _ = listener.accept()
            connection = Connection(end.detach())
            hello = self._receive(connection, deadline)
            self.connections[hello.rank] = connection
            self._pids[hello.rank] = hello.pid
        if set(self.connections) != set(range(self.size)):
            raise LaunchError(f"of {self.size} ranks these came: {sorted(self.connections)}")
        for connection in self.connections.values():
            connection.send(wire.Setup(options, [str(path) for path in self.paths]))
        for rank, connection in self.connections.items():
            for file, problem in self._receive(connection, deadline).problems.items():
                self.problems.setdefault(file, f"rank {rank} could not collect {file}:\n{problem}")

    def problem(self, nodeid: str) -> str:
        """Why the file of test `nodeid`, or a folder it lies in, could not be collected; may be empty."""
        path = Path(nodeid.partition("::")[0])
        return next((text for p in (path, *path.parents) if (text := self.problems.get(str(p)))), "")

    def _receive(self, connection: Connection, deadline: float) -> Any:
        self._until(deadline, lambda: connection.poll(POLL_S), "answered")
        try:
            return connection.recv()
        except (EOFError, OSError):
            raise LaunchError(f"a rank ended while it was being started{self.printed()}") from None

    def _until(self, deadline: float, ready: Callable[[], Any], act: str) -> None:
        while not ready():
            gone = self._process.poll()
            if gone is not None or time.monotonic() > deadline:
                why = f"the launcher ended with {gone}" if gone is not None else f"{START_S:g} s have passed"
                raise LaunchError(f"not all of {self.size} ranks have {act}: {why}{self.printed()}")

    def tell(self, order: wire.Run) -> None:
        """Send `order` to all ranks that are alive."""
        for connection in self.connections.values():
            with contextlib.suppress(OSError):  # seen as an end of file by whoever listens
                connection.send(order)

    def dump(self, ranks: Iterable[int]) -> dict[int, str]:
        """Where each of `ranks` is now: the Python tracebacks of its threads."""
        before = {rank: self._log(rank) for rank in ranks}
        for rank in before:
            self._signal(self._pids[rank], signal.SIGUSR1)
        deadline = time.monotonic() + DUMP_S
        last: dict[int, str] = {}
        while time.monotonic() < deadline:  # until all have written and nobody writes any more
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

    def epitaph(self) -> str:
        """What the launcher says about a rank that died; unless tolerant, it then ends by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(TERM_S)
        return self._tail("launcher")

    def _tail(self, name: str, lines: int = 40) -> str:
        path = self.folder / f"{name}.log"
        text = _shorten(path.read_text(errors="replace")) if path.exists() else ""
        return f"\n--- {name}.log\n" + "\n".join(text.rstrip().split("\n")[-lines:]) if text else ""

    def _log(self, rank: int) -> str:
        return (self.folder / f"rank_{rank}.log").read_text(errors="replace")

    def quit(self) -> str:
        """End the ranks in the normal way, by finalising; whoever does not end in time is killed.

        Returns:
          What went wrong, or an empty string.
        """
        for connection in self.connections.values():
            with contextlib.suppress(OSError):
                connection.send(None)
        try:
            code = self._process.wait(QUIT_S)
        except subprocess.TimeoutExpired:
            places = "".join(f"\nrank {rank}: {text}" for rank, text in self.dump(self.connections).items())
            self.kill()
            return f"the ranks did not end within {QUIT_S:g} s{places}"
        self._close()
        return f"the ranks ended with exit code {code}{self.printed()}" if code else ""

    def kill(self) -> None:
        """End the ranks now: SIGTERM to the launcher, then SIGKILL to whatever is left."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(TERM_S)
        for rank, connection in self.connections.items():
            if _open(connection):  # so the process lives, and its id cannot have become another's
                self._signal(self._pids[rank], signal.SIGKILL)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._close()

    def forget(self, rank: int) -> None:
        """Rank has closed its socket: it is dead or about to be."""
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
    """Whether the other end is still there; what it said meanwhile is dropped."""
    try:
        while connection.poll(0):
            connection.recv()
    except (EOFError, OSError):
        return False
    return True


def _shorten(traceback: str) -> str:
    """Leave out of faulthandler's tracebacks what lies below the test function, which is pytest."""
    return re.sub(r"\n  File [^\n]* in pytest_pyfunc_call(\n  File [^\n]*)*", "", traceback)


def _under_mpirun(size: int, argv: list[str], *, tolerant: bool) -> tuple[list[str], dict[str, str]]:
    from samestep.launch import mpirun

    try:
        hydra = mpirun.find()[1] == "hydra"
        if hydra and tolerant:
            argv = ["sh", "-c", SURVIVE, "sh", *argv]
        command, extra = mpirun.command(size, argv)
    except mpirun.LaunchError as error:
        raise LaunchError(f"{size} ranks cannot be started: {error}") from None
    if tolerant:
        command.insert(1, "-disable-auto-cleanup" if hydra else "--continuous")
    return command, extra
