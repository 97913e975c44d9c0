"""Starts one rank on its host, passes on what it prints, and reports how it ended.

Process tree of a rank, by `mpirun` and without it::

    mpirun -> stub -> agent -> rank -> whatever the rank starts
    launcher       -> agent -> rank -> whatever the rank starts
    ssh    -> stub -> agent -> rank -> whatever the rank starts       (no stub for a host's only rank)

`mpirun` may kill the stub at any time and without warning. The agent, in a session of its own, learns of
it, passes on what the rank still printed, ends the rank and tells the launcher. A rank dies with its agent,
and an agent ends its rank when the connection to the launcher breaks. Runs under `python -I -S`, so it can
use the standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from functools import partial
from typing import Any, NoReturn

from samestep.launch import frames, processes
from samestep.launch.bootstrap import BOOTSTRAP, connect, rank_and_size, told
from samestep.launch.lines import Lines
from samestep.launch.loop import Loop
from samestep.launch.rank_process import Feeder, spawn

_MOST_UNSENT = 1 << 20  # bytes waiting for the launcher, above which the rank's output stays in its pipe
_MOST_PARTIAL = 4096  # bytes of an unfinished line that are worth showing
_GRACE_S = 1.0  # between SIGTERM and SIGKILL, where there is no launcher to say
_LAST_WORDS_S = 0.2  # time for a rank that called MPI_Abort to end by itself, with its own exit code


class Agent:
    """Keeper of one rank, until the launcher lets it go."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._decoder = frames.Decoder(most=1 << 24)
        self._unsent = bytearray()
        self._connected = True
        self._leave = False

        self._rank_pid = 0
        self._rank_ended = False
        self._all_gone = False
        self._signals: list[int] = []
        self._signalled_at: float | None = None
        self._error_file = ""
        self._lines = {1: Lines(), 2: Lines()}
        self._live: set[int] = set()
        self._pipes: dict[int, int] = {}  # pipe -> the rank's descriptor
        self._feeder: Feeder | None = None
        self._loop = Loop()

    def run(self) -> None:
        """Serves until the launcher says leave, or until it is gone and so is the rank."""
        for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(signum, signal.SIG_IGN)
        self._loop.on_signals((signal.SIGCHLD, signal.SIGTERM), self._on_signals)
        self._link.setblocking(False)
        self._loop.reading(self._link.fileno(), self._receive)
        while not self._leave and (self._connected or not self._all_gone):
            self._loop.turn()
            self._look_for_the_end()
            if self._connected:
                self._loop.writing(self._link.fileno(), self._transmit if self._unsent else None)
            for pipe in self._pipes:
                keeps_up = len(self._unsent) <= _MOST_UNSENT
                self._loop.reading(pipe, partial(self._read, pipe) if keeps_up else None)

    # --- the launcher

    def _send(self, kind: bytes, content: object = b"") -> None:
        if self._connected:
            self._unsent += frames.encode(kind, content)

    def _transmit(self) -> None:
        try:
            del self._unsent[: self._link.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._disconnect()

    def _receive(self) -> None:
        try:
            data = self._link.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._disconnect()
        for kind, payload in self._decoder.feed(data):
            self._obey(kind, payload)

    def _disconnect(self) -> None:
        """The launcher is gone, or out of reach: so must the rank be, soon."""
        self._loop.reading(self._link.fileno(), None)
        self._loop.writing(self._link.fileno(), None)
        self._connected = False
        self._unsent.clear()
        self._end_rank()

    def _obey(self, kind: bytes, payload: bytes) -> None:
        if kind == frames.START and not self._all_gone:
            self._start(**json.loads(payload))
        elif kind == frames.INPUT and self._feeder is not None:
            self._feeder.feed(payload)
        elif kind == frames.SIGNAL:
            self._signal(json.loads(payload))
        elif kind == frames.LEAVE:
            self._leave = True

    # --- the rank

    def _start(self, argv: list[str], env: dict[str, str], cwd: str, stdin: bool, live: list[int]) -> None:
        self._live = set(live)
        self._error_file = os.path.join(
            os.environ.get("TMPDIR", "/tmp"), f"samestep-{os.urandom(8).hex()}.json"
        )
        environment = {**os.environ, **env, "SAMESTEP_ERROR_FILE": self._error_file}
        environment.pop(BOOTSTRAP, None)
        self._rank_pid, pipe, outputs = spawn(argv, environment, cwd, stdin=stdin)
        self._pipes = {pipe: fd for fd, pipe in outputs.items()}
        if pipe is not None:
            self._feeder = Feeder(self._loop, pipe, lambda nbytes: self._send(frames.TAKEN, nbytes))
        self._send(frames.STARTED, {"pid": self._rank_pid})

    def _signal(self, signum: int) -> None:
        """To the rank's process group; SIGKILL to everything below, whatever its group."""
        self._signals.append(signum)
        self._signalled_at = self._signalled_at or time.time()
        if signum == signal.SIGKILL:
            processes.send_signal(processes.descendants(os.getpid()), signum)
        elif self._rank_pid:
            processes.send_signal([-self._rank_pid], signum)

    def _end_rank(self) -> None:
        """Ends the rank without being told to: the launcher or `mpirun` is gone."""
        self._signal(signal.SIGTERM)
        self._loop.after(_GRACE_S, self._kill)
        if not self._rank_pid:
            self._rank_ended = True

    def _kill(self) -> None:
        if not self._all_gone:
            self._signal(signal.SIGKILL)
            self._loop.after(0.1, self._kill)  # again, for what a process started just before it died

    def _read(self, pipe: int) -> bool:
        """Passes on what is in `pipe` now; False when it is empty or closed."""
        fd = self._pipes[pipe]
        try:
            data = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return False
        if data:
            whole = self._lines[fd].feed(data)
        else:
            whole = self._lines[fd].rest()
            self._loop.reading(pipe, None)
            os.close(pipe)
            del self._pipes[pipe]
        if whole:
            self._send(frames.LINES[fd], whole)
        if data and fd in self._live:
            self._send(frames.PARTIAL[fd], self._lines[fd].unfinished[-_MOST_PARTIAL:])
        return bool(data)

    def _drain(self) -> None:
        for pipe in list(self._pipes):
            while self._read(pipe):
                continue

    def _take_error(self) -> Any:
        """What the rank's uncaught exception left in its file (see `samestep.uncaught`), or None."""
        try:
            with open(self._error_file, "rb") as file:
                record = json.loads(file.read(1 << 20))
            os.unlink(self._error_file)
        except (OSError, ValueError):
            return None
        return record

    def _look_for_the_end(self) -> None:
        if self._rank_ended and not self._all_gone and not processes.descendants(os.getpid()):
            self._drain()
            for fd, lines in self._lines.items():
                if rest := lines.rest():
                    self._send(frames.LINES[fd], rest)
            self._all_gone = True
            self._send(frames.DONE)

    def _on_signals(self, signums: bytes) -> None:
        if signal.SIGTERM in signums:  # sent by the kernel: the stub is gone
            self._send(frames.CUT_OFF)
            self._loop.after(_LAST_WORDS_S, self._end_rank)
        ended = time.time()
        for pid, status in processes.reap():
            if pid == self._rank_pid:
                self._drain()
                self._rank_ended = True
                asked = {"signals": self._signals, "signalled_at": self._signalled_at}
                self._send(
                    frames.EXITED, {"status": status, "time": ended, "error": self._take_error(), **asked}
                )
                processes.send_signal(processes.descendants(os.getpid()), signal.SIGTERM)
                self._loop.after(_GRACE_S, self._kill)


def _one_of(ranks: list[int]) -> int:
    """The rank that this process is the agent of; one process for each returns, and another waits for them all."""
    if len(ranks) == 1:
        return ranks[0]
    parent = os.getpid()
    for rank in ranks:
        if os.fork() == 0:
            processes.die_with_parent(parent, signal.SIGTERM)
            return rank
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) & 0xFF for _ in ranks]
    os._exit(max(codes))


def _split_off() -> None:
    stub = os.getpid()
    agent = os.fork()
    if agent:
        _, status = os.waitpid(agent, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    os.setsid()
    processes.die_with_parent(stub, signal.SIGTERM)


def main() -> NoReturn:
    """Under `mpirun` splits into stub and agent, in a remote shell into an agent for each rank; serves."""
    bootstrap = told()
    if "ranks" in bootstrap:
        bootstrap["rank"] = _one_of(bootstrap["ranks"])
    else:
        _split_off()
    processes.adopt_orphans()
    hello = {"token": bootstrap["token"], "host": socket.gethostname(), **rank_and_size(bootstrap)}
    link = connect(bootstrap)
    link.sendall(frames.encode(frames.HELLO, hello))
    Agent(link).run()
    sys.exit(0)
