"""The process of one rank and its three descriptors."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from typing import NoReturn

from samestep.launch import processes
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

    Args:
      loop: watches the pipe while something waits.
      pipe: the end to write to, not blocking; closed after the input, or when the rank has closed its end.
      on_taken: called with the number of bytes that need no more room here.
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
