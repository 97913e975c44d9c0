"""Starts one rank on its host, passes on what it prints, and reports how it ended.

Process tree of a rank, by `mpirun` and without it::

    mpirun -> stub -> agent -> rank -> whatever the rank starts
    launcher       -> agent -> rank -> whatever the rank starts
    ssh    -> stub -> agent -> rank -> whatever the rank starts       (no stub for a host's only rank)

`mpirun` may kill the stub at any time and without warning. The agent, in a session of its own, detects
it, forwards the remaining output of the rank, ends the rank and notifies the launcher. A rank dies with its agent,
and an agent ends its rank when the connection to the launcher breaks. Runs under `python -I -S`, so it can
use the standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from samestep import _settings
from samestep._util import cpus, silence
from samestep._util.frames import Channel
from samestep.launch import frames, processes
from samestep.launch.find_launcher import BOOTSTRAP, connect, rank_and_size, read_bootstrap
from samestep.launch.lines import Lines
from samestep.launch.loop import Loop


def spawn(
    argv: list[str], env: dict[str, str], cwd: str, *, stdin: str
) -> tuple[int, int | None, dict[int, int]]:
    """Starts a program in a process group of its own, which dies with this process.

    Its standard input is a "pipe", "inherited" from this process, or for any other `stdin` /dev/null.

    Returns:
      Its pid; the pipe to its standard input, or None unless `stdin` is "pipe"; the pipes from its outputs, by its
      descriptor (1, 2). Our ends of the pipes do not block. A program that cannot be started ends with
      code 127 and says why on its stderr.
    """
    pipes = {fd: os.pipe() for fd in ((0, 1, 2) if stdin == "pipe" else (1, 2))}
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        processes.die_with_parent(parent, signal.SIGKILL)
        ends = {fd: ends[0 if fd == 0 else 1] for fd, ends in pipes.items()}
        if stdin == "inherited":
            ends[0] = 0
        _become(argv, env, cwd, ends)
    ours = {}
    for fd, (reading, writing) in pipes.items():
        ours[fd], theirs = (writing, reading) if fd == 0 else (reading, writing)
        os.close(theirs)
        os.set_blocking(ours[fd], False)
    return pid, ours.pop(0, None), ours


def _become(argv: list[str], env: dict[str, str], cwd: str, descriptors: dict[int, int]) -> NoReturn:
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if signal.getsignal(signum) not in (signal.SIG_DFL, None):
                signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        descriptors.setdefault(0, os.open(os.devnull, os.O_RDONLY))
        for fd, end in descriptors.items():
            os.dup2(end, fd)
        os.chdir(cwd)
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        text = f"samestep: cannot start {argv[0]} in {cwd} on {socket.gethostname()}: {error.strerror}\n"
        os.write(2, text.encode(errors="backslashreplace"))
    os._exit(127)


class Feeder:
    """Writes what arrives for the rank's standard input as fast as the rank reads it.

    The end to write to, `pipe`, does not block; it is closed after the input, or when the rank has closed its end.
    `on_taken` is called with the number of bytes that need no more room here.
    """

    def __init__(self, loop: Loop, pipe: int, on_taken: Callable[[int], None]) -> None:
        self._loop = loop
        self._pipe: int | None = pipe
        self._on_taken = on_taken
        self._waiting = bytearray()
        self._ended = False

    def feed(self, data: bytes) -> None:
        """More input; b"" is its end."""
        self._ended = self._ended or not data
        self._waiting += data
        self._write()

    def _write(self) -> None:
        if self._pipe is None:
            self._on_taken(len(self._waiting))
            self._waiting.clear()
            return
        try:
            if self._waiting:
                n_written = os.write(self._pipe, self._waiting)
                del self._waiting[:n_written]
                self._on_taken(n_written)
        except BlockingIOError:
            pass
        except OSError:  # the rank has closed its end
            self._close()
            self._write()
            return
        self._loop.writing(self._pipe, self._write if self._waiting else None)
        if self._ended and not self._waiting:
            self._close()

    def _close(self) -> None:
        if self._pipe is not None:
            self._loop.writing(self._pipe, None)
            os.close(self._pipe)
            self._pipe = None


_MAX_UNSENT = 1 << 20  # bytes waiting for the launcher, above which the rank's output stays in its pipe
_MAX_PARTIAL = 4096  # bytes of an unfinished line that are shown
# A rank writes a line in several pieces; one read for all that arrive within this time is cheaper. The longer time is
# for ranks that write much, see `next_moment`.
_GATHER_S, _LONGEST_GATHER_S = 0.005, 0.04
_MUCH = 512  # bytes in one read: more than a progress bar or a line writes
# Bytes that a pipe takes before its writer has to wait; the most that an ordinary user may ask for.
_PIPE = 1 << 20
_AT_ONCE = 1 << 18  # bytes that are read in one piece
_LOOK_S = 1.0  # between checks that the launcher's host answers
_GRACE_S = 1.0  # seconds between SIGTERM and SIGKILL if there is no launcher to decide
_LAST_WORDS_S = 0.2  # time for a rank that called MPI_Abort to end by itself, with its own exit code


class Agent:
    """Supervises one rank until the launcher, at the other end of `link`, releases it.

    `own`: arguments of `_start` that hold instead of the launcher's, for a rank that has joined the job; else None.
    """

    def __init__(self, link: socket.socket, channel: Channel, own: dict[str, Any] | None = None) -> None:
        self._link, self._own = link, own
        self._channel = channel
        self._parent = os.getppid()
        self._unsent = bytearray()
        self._connected = True
        self._leave: int | None = None

        self._rank_pid = 0
        self._rank_ended = False
        self._all_gone = False
        self._signals: list[int] = []
        self._signalled_at: float | None = None
        self._error_file = ""
        self._n_out_of_memory = 0
        self._lines = {1: Lines(), 2: Lines()}
        self._live: set[int] = set()
        self._pipes: dict[int, int] = {}  # pipe -> the rank's descriptor
        self._gathering: set[int] = set()  # pipes that are not polled for a moment
        self._moments: dict[int, float] = {}  # pipe -> length of that moment
        self._rooms: dict[int, int] = {}  # pipe -> bytes
        self._feeder: Feeder | None = None
        self._loop = Loop()

    def run(self) -> int | None:
        """Serve until the launcher sends LEAVE, whose exit code is returned; or until both have ended: None."""
        for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGUSR1):
            signal.signal(signum, signal.SIG_IGN)
        self._loop.on_signals((signal.SIGCHLD, signal.SIGTERM), self._on_signals)
        self._link.setblocking(False)
        self._loop.reading(self._link.fileno(), self._read_commands)
        self._look_for_silence()
        while self._leave is None and (self._connected or not self._all_gone):
            self._loop.turn()
            self._look_for_the_end()
            if self._connected:
                self._loop.writing(self._link.fileno(), self._transmit if self._unsent else None)
            for pipe in self._pipes:
                wanted = len(self._unsent) <= _MAX_UNSENT and pipe not in self._gathering
                self._loop.reading(pipe, partial(self._gather, pipe) if wanted else None)
        return self._leave

    # --- the launcher

    def _send(self, kind: bytes, content: object = b"") -> None:
        if self._connected:
            self._unsent += self._channel.seal(kind, content)

    def _transmit(self) -> None:
        try:
            del self._unsent[: self._link.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._disconnect()

    def _read_commands(self) -> None:
        try:
            data = self._link.recv(1 << 16)
            commands = list(self._channel.feed(data))
        except BlockingIOError:
            return
        except (OSError, ValueError):  # the connection broke; or the data are not the launcher's
            data, commands = b"", []
        if not data:
            self._disconnect()
        for kind, payload in commands:
            self._obey(kind, payload)

    def _disconnect(self) -> None:
        """The launcher has ended or cannot be reached: end the rank soon."""
        self._loop.reading(self._link.fileno(), None)
        self._loop.writing(self._link.fileno(), None)
        self._connected = False
        self._unsent.clear()
        self._end_rank()

    def _look_for_silence(self) -> None:
        if self._connected and silence.is_silent(self._link):
            self._disconnect()
        elif self._connected:
            self._loop.after(_LOOK_S, self._look_for_silence)

    def _obey(self, kind: bytes, payload: bytes) -> None:
        if kind == frames.START:
            self._start(**json.loads(payload) | (self._own or {}))
        elif kind == frames.INPUT and self._feeder is not None:
            self._feeder.feed(payload)
        elif kind == frames.SIGNAL:
            self._signal(json.loads(payload))
        elif kind == frames.LEAVE:
            self._leave = json.loads(payload or b"0")

    # --- the rank

    def _start(self, argv: list[str], env: dict[str, str], cwd: str, stdin: str, live: list[int]) -> None:
        self._live = set(live)
        self._rank_ended = self._all_gone = False  # of the rank that ran here before, if any
        self._signals, self._signalled_at = [], None
        folders = (os.environ.get("TMPDIR", ""), "/tmp", "/dev/shm")
        folder = next((one for one in folders if os.access(one, os.W_OK | os.X_OK)), "/tmp")
        self._error_file = os.path.join(folder, f"samestep-{os.urandom(8).hex()}.json")
        self._n_out_of_memory = processes.n_out_of_memory()
        environment = {**os.environ, **env, _settings.ERROR_FILE: self._error_file}
        environment.pop(BOOTSTRAP, None)
        environment |= cpus.threads_of_ranks(int(environment.get("LOCAL_WORLD_SIZE", "1")), environment)
        self._rank_pid, pipe, outputs = spawn(argv, environment, cwd, stdin=stdin)
        self._pipes = {pipe: fd for fd, pipe in outputs.items()}
        for one in self._pipes:
            with contextlib.suppress(OSError):  # because the number of processes of a user is limited
                fcntl.fcntl(one, fcntl.F_SETPIPE_SZ, _PIPE)
            self._rooms[one] = fcntl.fcntl(one, fcntl.F_GETPIPE_SZ)
        if pipe is not None:
            self._feeder = Feeder(self._loop, pipe, lambda nbytes: self._send(frames.TAKEN, nbytes))
        self._send(frames.STARTED, {"pid": self._rank_pid})

    def _signal(self, signum: int) -> None:
        """Signal the process group of the rank; SIGKILL is sent to all its descendants."""
        if signum != signal.SIGUSR1:  # which does not end everyone
            self._signals.append(signum)
            self._signalled_at = self._signalled_at or time.time()
        if signum == signal.SIGKILL:
            processes.send_signal(processes.descendants(os.getpid()), signum)
        elif self._rank_pid:
            processes.send_signal([-self._rank_pid], signum)

    def _end_rank(self, signum: int = signal.SIGTERM) -> None:
        """End the rank because the launcher or `mpirun` has ended."""
        self._signal(signum)
        self._loop.after(_GRACE_S, partial(self._kill, self._rank_pid))
        if not self._rank_pid:
            self._rank_ended = True

    def _kill(self, pid: int) -> None:
        if not self._all_gone and pid == self._rank_pid:
            self._signal(signal.SIGKILL)
            self._loop.after(0.1, partial(self._kill, pid))  # again, for processes started just before

    def _gather(self, pipe: int) -> None:
        """Read `pipe` after a short delay, because more is likely to arrive."""

        def read() -> None:
            self._gathering.discard(pipe)
            if pipe in self._pipes:
                self._read(pipe)

        self._gathering.add(pipe)
        self._loop.reading(pipe, None)
        self._loop.after(self._moments.get(pipe, _GATHER_S), read)

    def _read(self, pipe: int) -> bool:
        """Forward the current contents of `pipe`; False if it is empty or closed."""
        fd = self._pipes[pipe]
        try:
            data = os.read(pipe, _AT_ONCE)
        except BlockingIOError:
            return False
        if data:
            moment = self._moments.get(pipe, _GATHER_S)
            self._moments[pipe] = next_moment(moment, len(data), self._rooms[pipe])
            whole = self._lines[fd].feed(data)
        else:
            whole = self._lines[fd].remainder()
            self._loop.reading(pipe, None)
            os.close(pipe)
            del self._pipes[pipe]
        if whole:
            self._send(frames.LINES[fd], whole)
        if data and fd in self._live:
            self._send(frames.PARTIAL[fd], self._lines[fd].unfinished[-_MAX_PARTIAL:])
        return bool(data)

    def _drain(self) -> None:
        for pipe in list(self._pipes):
            while self._read(pipe):
                continue

    def _take_error(self) -> Any:
        """The uncaught exception that the rank has written to its file (see `samestep.world.crash_report`), or None."""
        try:
            with open(self._error_file, "rb") as file:
                return json.loads(file.read(1 << 20))
        except (OSError, ValueError):
            return None
        finally:
            unfinished = f"{self._error_file}.{self._rank_pid}"  # of a rank that was killed as it wrote
            for path in (self._error_file, unfinished):
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def _look_for_the_end(self) -> None:
        if self._rank_ended and not self._all_gone and not processes.descendants(os.getpid()):
            self._drain()
            for fd, lines in self._lines.items():
                if remainder := lines.remainder():
                    self._send(frames.LINES[fd], remainder)
            self._all_gone = True
            self._send(frames.DONE)

    def _on_signals(self, signums: bytes) -> None:
        is_called = signal.SIGTERM in signums and os.getppid() == self._parent
        if is_called and self._own is None:  # all processes of the host are asked to end
            self._signal(signal.SIGTERM)
        elif signal.SIGTERM in signums:  # from PR_SET_PDEATHSIG: the parent has ended; or from `join`
            self._send(frames.CUT_OFF)
            # SIGTERM would ask a `TrainState` to stop the job, which goes on without a rank that has joined it.
            signum = signal.SIGKILL if self._own else signal.SIGTERM
            self._loop.after(_LAST_WORDS_S, partial(self._end_rank, signum))
        ended = time.time()
        for pid, status in processes.reap():
            if pid == self._rank_pid:
                self._drain()
                self._rank_ended = True
                how = {"signals": self._signals, "signalled_at": self._signalled_at}
                how["out_of_memory"] = processes.n_out_of_memory() > self._n_out_of_memory
                self._send(
                    frames.EXITED, {"status": status, "time": ended, "error": self._take_error(), **how}
                )
                processes.send_signal(processes.descendants(os.getpid()), signal.SIGTERM)
                self._loop.after(_GRACE_S, partial(self._kill, pid))


def next_moment(seconds: float, nbytes: int, room: int) -> float:
    """How long to gather output before the next read. Pure.

    Args:
      seconds: how long it was gathered before the last read.
      nbytes: what that read has found, at most `_AT_ONCE`.
      room: bytes that the pipe takes before its writer has to wait; an eighth of it is wanted in the next read.

    Example:
      >>> next_moment(0.005, 20_000, 1 << 20), next_moment(0.04, 20_000, 1 << 20), next_moment(0.04, 100, 1 << 20)
      (0.01, 0.04, 0.005)
      >>> next_moment(0.04, 1 << 18, 1 << 20), next_moment(0.04, 1 << 16, 1 << 16)
      (0.01, 0.005)
    """
    if nbytes < _MUCH:
        return _GATHER_S
    is_all = nbytes < _AT_ONCE
    wanted = seconds * room / 8 / nbytes if is_all else seconds / 4
    return min(wanted, 2 * max(seconds, 0.001), _LONGEST_GATHER_S)


def _one_of(ranks: list[int]) -> int:
    """Fork one agent for each rank. Each returns its rank; the parent waits for them all."""
    if len(ranks) == 1:
        return ranks[0]
    parent = os.getpid()
    for rank in ranks:
        if os.fork() == 0:
            processes.die_with_parent(parent, signal.SIGTERM)
            return rank
    for signum in (signal.SIGTERM, signal.SIGUSR1):  # if the whole host gets one, ranks end their step first
        signal.signal(signum, signal.SIG_IGN)
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


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more
        os.write(2, f"samestep: {text}\n".encode())


def main() -> NoReturn:
    """Under `mpirun` splits into stub and agent, in a remote shell into an agent for each rank; serves."""
    bootstrap = read_bootstrap()
    if "ranks" in bootstrap:
        bootstrap["rank"] = _one_of(bootstrap["ranks"])
    else:
        _split_off()
    processes.adopt_orphans()
    hello = {"host": socket.gethostname(), **rank_and_size(bootstrap)}
    link, channel = connect(bootstrap)
    link.sendall(channel.seal(frames.HELLO, hello))
    if (own := bootstrap.get("own")) is None:
        Agent(link, channel).run()
        sys.exit(0)
    job = f"the job at {bootstrap['host']}:{bootstrap['port']}"
    _say(f"joined {job}, whose launcher shows what the ranks print")
    code = Agent(link, channel, own).run()
    lost = "has ended, or its launcher cannot be reached, so the ranks here have ended, too"
    how = lost if code is None else f"has ended with exit code {code}"
    _say(f"{job} {how}")
    sys.exit(1 if code is None else code)
