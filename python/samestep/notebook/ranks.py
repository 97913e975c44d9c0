"""The notebook's side: starts interpreters as the ranks of a job on this host, and reads their output and answers."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import IO, Any, TextIO

from samestep._util import cpus, launchers
from samestep._util.at_failure import at_failure
from samestep.errors import InvalidArgumentError
from samestep.launch import network, plan, processes
from samestep.launch.causes import ProcessExit
from samestep.launch.lines import Lines
from samestep.multiprocessing.context import ProcessException, ProcessExitedException, ProcessRaisedException
from samestep.notebook.rank import dumps

_TERM_S = 3.0  # between SIGTERM and SIGKILL
_QUIT_S = 10.0  # for ranks to finalize after their pipe is closed


@dataclass(eq=False)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    link: Connection
    lines: dict[int, Lines] = field(default_factory=lambda: {1: Lines(), 2: Lines()})

    def pipe(self, fd: int) -> IO[bytes]:
        """The pipe from its descriptor 1 or 2."""
        pipe = self.process.stdout if fd == 1 else self.process.stderr
        assert pipe is not None
        return pipe


class Ranks:
    """`n` interpreters, the ranks of a new job. They end with this process, or by `end`."""

    def __init__(self, n: int) -> None:
        self._port = network.reserve_port()
        self._ranks: list[_Rank] = []
        port = self._port.getsockname()[1]
        with at_failure(lambda: self.end(now=True)):
            for variables in plan.of_new_job(
                [""] * n, launcher="samestep.launch", master_addr="127.0.0.1", master_port=port
            ):
                self._ranks.append(self._start(len(self._ranks), variables))
            for rank in self._ranks:
                rank.link.send_bytes(pickle.dumps(sys.path))

    def _start(self, number: int, variables: dict[str, str]) -> _Rank:
        ours, theirs = socket.socketpair()
        code = f"from samestep.notebook import rank; rank.main({theirs.fileno()}, {os.getpid()})"
        with ours, theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                env={
                    **launchers.outside_any_job(os.environ),
                    **variables,
                    **cpus.threads_of_ranks(int(variables["LOCAL_WORLD_SIZE"]), os.environ),
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # an interrupt reaches the notebook alone
            )
            link = Connection(ours.detach())
        rank = _Rank(number, process, link)
        for fd in (1, 2):
            os.set_blocking(rank.pipe(fd).fileno(), False)
        return rank

    @property
    def n(self) -> int:
        """How many there are."""
        return len(self._ranks)

    @property
    def alive(self) -> bool:
        """Whether all of them still run."""
        return bool(self._ranks) and all(rank.process.poll() is None for rank in self._ranks)

    def order(self, kind: str, content: Any, *, grace: float) -> list[Any]:
        """Sends one command to all ranks, relays their output, and returns their results by rank.

        `grace`: seconds for the others after one has failed; then all ranks are stopped.

        Raises:
          ProcessException: the rank that failed first; not one that failed because of another.
          KeyboardInterrupt: all ranks have been ended.
        """
        answers: dict[int, tuple[str, Any]] = {}
        with at_failure(lambda: self.end(now=True)):
            message = pickle.dumps((kind, content))
            for rank in self._ranks:
                with contextlib.suppress(ConnectionError):  # the rank has ended; handled below
                    rank.link.send_bytes(message)
            self._collect(answers, grace)
        if all(kind == "result" for kind, _ in answers.values()) and len(answers) == self.n:
            return [answers[rank.number][1] for rank in self._ranks]
        error = self._failure(answers)
        if len(answers) < self.n or any(kind == "exit" for kind, _ in answers.values()):
            self.end(now=True)
        raise error

    def _collect(self, answers: dict[int, tuple[str, Any]], grace: float) -> None:
        watched: dict[Any, tuple[_Rank, int]] = {rank.link: (rank, 0) for rank in self._ranks}
        watched |= {rank.pipe(fd): (rank, fd) for rank in self._ranks for fd in (1, 2)}
        deadline = math.inf
        while len(answers) < self.n and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(watched), None if math.isinf(left) else left):
                rank, fd = watched[ready]
                if not fd:
                    answers[rank.number] = self._answer(rank)
                    if answers[rank.number][0] != "result":
                        deadline = min(deadline, time.monotonic() + grace)
                if not fd or self._show(rank, fd) == b"":
                    del watched[ready]
        for rank in self._ranks:
            for fd in (1, 2):
                while self._show(rank, fd):
                    continue
                _print(rank.number, fd, rank.lines[fd].remainder())

    def _answer(self, rank: _Rank) -> tuple[str, Any]:
        try:
            kind, content = pickle.loads(rank.link.recv_bytes())
        except (EOFError, OSError):
            return "exit", {"time": time.time(), "status": rank.process.wait()}
        return kind, content

    def _show(self, rank: _Rank, fd: int) -> bytes | None:
        """Reads what a rank has written, and prints whole lines. None: no data yet; b"": end of file."""
        data: bytes | None = rank.pipe(fd).read(1 << 16)
        if data:
            _print(rank.number, fd, rank.lines[fd].feed(data))
        return data

    def _failure(self, answers: dict[int, tuple[str, Any]]) -> ProcessException:
        """The error of the rank that failed first; not of one that failed because of another."""
        endings = {i: self._ending(i, *answer) for i, answer in answers.items() if answer[0] != "result"}
        of_others = {i for i, one in endings.items() if one.is_consequence or one.error_name == "StepError"}
        number = min(endings, key=lambda i: (i in of_others, endings[i].since))
        first = endings[number]
        waiting = [str(rank.number) for rank in self._ranks if rank.number not in answers]
        others = f"\nStill busy, and ended: rank {', '.join(waiting)}" if waiting else ""
        if first.error is not None:
            text = f"rank {number} raised {first.error_name}\n\n{first.error['traceback']}{others}"
            return ProcessRaisedException(text, number, first.pid)
        status = first.status or 0
        name = first.fate.removeprefix("signal ") if status < 0 else None
        return ProcessExitedException(
            f"rank {number} ended with {first.fate}{others}", number, first.pid, status, name
        )

    def _ending(self, number: int, kind: str, content: dict[str, Any]) -> ProcessExit:
        error = content if kind == "error" else None
        process = self._ranks[number].process
        status = 1 if error else content["status"]
        return ProcessExit(f"rank {number}", process.pid, status, content["time"], error=error, rank=number)

    def end(self, *, now: bool = False) -> None:
        """Stops all ranks by closing their command pipes (SIGTERM if `now`), then by SIGKILL."""
        for rank in self._ranks:
            rank.link.close()
            if now:
                processes.send_signal([-rank.process.pid], signal.SIGTERM)
        deadline = time.monotonic() + (_TERM_S if now else _QUIT_S)
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            processes.send_signal([-rank.process.pid], signal.SIGKILL)  # and the processes it started
            rank.process.wait()
            for fd in (1, 2):
                rank.pipe(fd).close()
        self._ranks = []
        self._port.close()


def _print(number: int, fd: int, data: bytes) -> None:
    """Prints the lines of a rank, with its number, as Python prints: in a notebook below the cell."""
    if data:
        to: TextIO = sys.stdout if fd == 1 else sys.stderr
        text = data.decode(errors="replace")
        to.write("".join(f"[{number}] {line.rpartition(chr(13))[2]}\n" for line in text[:-1].split("\n")))
        to.flush()


_GRACE_S = 1.0  # for the other ranks to report, after one has failed


def launch_ranks(
    function: Callable[..., Any], n: int, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> list[Any]:
    """See `samestep.launch`."""
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"launch: n must be an int, got {type(n).__name__}")
    if n < 1:
        raise InvalidArgumentError(f"launch: n must be at least 1, got {n}")
    if not callable(function):
        raise TypeError(f"launch: the function must be callable, got {type(function).__name__}")
    try:
        order = dumps((function, tuple(arguments), dict(keywords)))
    except Exception as error:
        raise InvalidArgumentError(
            f"launch: the function or an argument cannot be pickled: {error}{_advice()}"
        ) from error
    if getattr(function, "__module__", "") == "__main__" and _advice():
        raise InvalidArgumentError(f"launch: other processes do not have this __main__{_advice()}")
    ranks = Ranks(n)
    results = ranks.order("call", order, grace=_GRACE_S)
    ranks.end()
    return [pickle.loads(result) for result in results]


def _advice() -> str:
    """What to install; empty if cloudpickle is there."""
    try:
        import cloudpickle  # noqa: F401
    except ImportError:
        return "; functions defined in a notebook or script need cloudpickle: pip install samestep[notebook]"
    return ""
