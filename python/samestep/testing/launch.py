"""Starts, watches and ends fresh interpreters for the tests of some files."""

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

from samestep import _settings
from samestep._util.at_failure import at_failure
from samestep.launch import mpirun, network, plan, processes
from samestep.testing import protocol
from samestep.testing.markers import Start

START_S = 120.0  # every rank must have collected its files by then; importing frameworks is slow on few cores
QUIT_S = 30.0  # a normal end
TERM_S = 3.0  # between SIGTERM and SIGKILL
DUMP_S = 2.0  # for a rank to write where it is
POLL_S = 0.05
_LAST_LINES = 40
# MPICH's launcher signals the other ranks and ends when one dies; a shell between them hides the death.
SURVIVE = 'trap "" USR1; "$@"; true'


class LaunchError(Exception):
    """The ranks could not be started; the text says what happened and what they printed."""


class Launch:
    """Fresh interpreters, ready to run the tests of the files at `paths` one after the other.

    Args:
      options: options of pytest in the ranks.
      folder: an empty folder for the socket, the logs and temporary files.
      tolerant: ask the launcher not to end the other ranks when one dies.

    Attributes:
      problems: the error of each file that a rank could not collect, by the part of a node id before "::".
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
        self._port = network.reserve_port() if start.size > 1 and not start.mpi else None
        self._processes: list[subprocess.Popen[bytes]] = []
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "s"))
            listener.listen(self.size)
            try:
                commands = self._commands(tolerant=tolerant)
            except mpirun.LaunchError as error:
                raise LaunchError(f"{self.size} ranks cannot be started: {error}") from None
            how: Any = {"stdin": subprocess.DEVNULL, "start_new_session": True}
            with at_failure(self.kill), (self.folder / "launcher.log").open("ab") as log:
                for argv, env in commands:
                    self._processes.append(subprocess.Popen(argv, env=env, stdout=log, stderr=log, **how))
                self._meet(listener, options)

    def _commands(self, *, tolerant: bool) -> list[tuple[list[str], dict[str, str]]]:
        """Command line and environment of one interpreter, of an `mpirun` of several, or of several without MPI."""
        socket_and_folder = [str(self.folder / "s"), str(self.folder)]
        worker = [sys.executable, "-m", "samestep.testing.worker", *socket_and_folder]
        env = {"OMP_NUM_THREADS": "1", **os.environ}
        if self.start.mpi:
            hydra = mpirun.find()[1] == "hydra"
            survive = ["sh", "-c", SURVIVE, "sh"] if hydra and tolerant else []
            command, extra = mpirun.command(self.size, [*survive, *worker])
            if tolerant:
                command.insert(1, "-disable-auto-cleanup" if hydra else "--continuous")
            return [(command, env | extra)]
        if self._port is None:
            return [(worker, env)]
        port = self._port.getsockname()[1]
        variables_of_ranks = plan.of_new_job(
            [""] * self.size, launcher="samestep run", master_addr="127.0.0.1", master_port=port
        )
        return [
            (
                [*worker, str(rank)],
                env | variables | {_settings.ERROR_FILE: str(self.folder / f"error_{rank}.json")},
            )
            for rank, variables in enumerate(variables_of_ranks)
        ]

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
            codes = [code for process in self._processes if (code := process.poll()) is not None]
            gone = next(filter(None, codes), codes[0] if codes else None)  # a failure if there is one
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
        processes.send_signal([self._pids[rank] for rank in before], signal.SIGUSR1)
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
        names = [f"rank_{r}" for r in range(self.size)] + ["launcher"] if rank is None else [f"rank_{rank}"]
        return "".join(map(self._tail, names))

    def last_output(self) -> str:
        """The message of the launcher about a rank that died. Unless tolerant, the launcher then ends by itself."""
        if not self.start.mpi:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(TERM_S)
        return self._tail("launcher")

    def _tail(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        text = _shorten(path.read_text(errors="replace")) if path.exists() else ""
        return f"\n--- {name}.log\n" + "\n".join(text.rstrip().split("\n")[-_LAST_LINES:]) if text else ""

    def _log(self, rank: int) -> str:
        return (self.folder / f"rank_{rank}.log").read_text(errors="replace")

    def quit(self) -> str:
        """End the ranks by finalising, or kill those that are late; returns what went wrong, or an empty string."""
        for connection in self.connections.values():
            with contextlib.suppress(OSError):
                connection.send(None)
        try:
            code = self._wait(QUIT_S)
        except subprocess.TimeoutExpired:
            places = "".join(f"\nrank {rank}: {text}" for rank, text in self.dump(self.connections).items())
            self.kill()
            return f"the ranks did not end within {QUIT_S:g} s{places}"
        self._close()
        return f"the ranks ended with exit code {code}{self.printed()}" if code else ""

    def kill(self) -> None:
        """End the ranks now, by SIGTERM and then by SIGKILL."""
        for process in self._processes:
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(TERM_S)
        # Those that are open still exist, and their ids have not been reused.
        alive = [self._pids[rank] for rank, connection in self.connections.items() if _open(connection)]
        processes.send_signal(alive, signal.SIGKILL)
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._close()

    def _wait(self, timeout: float) -> int:
        """The first exit code that is a failure, or 0. Raises subprocess.TimeoutExpired while a process runs."""
        deadline = time.monotonic() + timeout
        codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in self._processes]
        return next(filter(None, codes), 0)

    def forget(self, rank: int) -> None:
        """The rank has closed its socket: it has ended or is about to."""
        self.connections.pop(rank).close()
        self._pids.pop(rank)

    def _close(self) -> None:
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()
        self._pids.clear()
        if self._port is not None:
            self._port.close()


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
