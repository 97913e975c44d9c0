"""Writes the output of the ranks as whole lines to stdout and stderr, and to one file per rank."""

from __future__ import annotations

import math
import os
import re
import select
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial

from samestep._util.text import LINE_HEAD, numbers_text
from samestep.launch.arguments import Options
from samestep.launch.loop import Loop


def redraws(fd: int, env: Mapping[str, str] = os.environ) -> bool:
    """Whether `fd` is an interactive terminal whose last line can be redrawn.

    A pseudo-terminal whose output ends in a file or a web page, as of a CI service or a notebook, shows each new state
    behind the one before. It is recognised by `TERM`, which is missing or "dumb"; by a width of 0, which nobody has
    set; by `CI`, which CI services set; or by `JPY_PARENT_PID`, which Jupyter sets for its kernels.

    Example:
      >>> redraws(0, {"TERM": "dumb"})
      False
    """
    if env.get("TERM", "") in ("", "dumb") or env.get("CI", "").lower() not in ("", "0", "false"):
        return False
    try:
        return "JPY_PARENT_PID" not in env and os.isatty(fd) and os.get_terminal_size(fd).columns > 0
    except OSError:
        return False


def columns(fd: int) -> int:
    """The width of the terminal `fd`, 80 where it cannot be known."""
    try:
        return os.get_terminal_size(fd).columns or 80
    except OSError:
        return 80


_AT_ONCE = 4096  # bytes that a ready pipe takes without blocking (PIPE_BUF)
_MAX_PIECES = 16  # of that size, before the loop polls the ranks again
_HOLD_S = 0.5  # for equal tracebacks of other ranks to arrive
_MAX_HELD = 1 << 20
_TRACEBACK = re.compile(rb'^(?:Traceback \(most|  \+ Exception Group Traceback|  File ")', re.MULTILINE)
_CLEAR_LINE = b"\r\x1b[K"
_WITHOUT_HEAD = re.compile(rb"^(?!" + LINE_HEAD + rb")", re.MULTILINE)


class Output:
    """Writes lines of many ranks so that no line is ever torn and no write blocks the caller.

    On a terminal that can redraw a line, the newest unfinished one (a progress bar, a question) stands below the
    finished ones; elsewhere it is shown once it is finished, in its last state. A line that `samestep.println` has
    written names its rank itself and gets no second prefix. Equal tracebacks of several ranks, within half a second,
    are shown once.

    Args:
      loop: watches stdout and stderr while something waits to be written.
      raw: leave out the rank in front of each line, and all bytes as they are.
      logs: the files of `--logs`, or nothing.
      shown: which of the ranks' descriptors 1 and 2 are shown at all.
      on_lost: called once with the error when stdout can no longer be written.
    """

    def __init__(
        self,
        loop: Loop,
        *,
        raw: bool,
        logs: dict[tuple[int, int], int],
        on_lost: Callable[[OSError], None],
        shown: Collection[int] = (1, 2),
    ) -> None:
        self._loop = loop
        self._raw = raw
        self._logs = logs
        self._on_lost = on_lost
        self._shown = shown
        self._waiting: deque[tuple[int, memoryview]] = deque()
        self._lost: set[int] = set()
        self._unfinished: tuple[int, int, bytes] | None = None  # rank, descriptor, what the terminal shows
        self._held: dict[int, bytes] = {}  # rank -> the end of what it has written to stderr
        self.live = [fd for fd in shown if redraws(fd)]
        self.n_waiting = 0

    def lines(self, rank: int, fd: int, data: bytes) -> None:
        """Whole lines that `rank` wrote to its descriptor `fd` (1 or 2)."""
        visible = _last_states(data) if b"\r" in data and (not self._raw or fd in self.live) else data
        if self._logs:
            self._log(rank, fd, data if self._raw else visible)
        if fd not in self._shown:
            return
        if self._unfinished and self._unfinished[:2] == (rank, fd):
            self._hide_unfinished(forget=True)
        if fd == 2 and not self._raw:
            visible = self._hold(rank, visible)
        if visible:
            self._put(fd, visible if self._raw else _with_prefix(b"[%d] " % rank, visible))

    def _hold(self, rank: int, data: bytes) -> bytes:
        """Hold back a traceback and what follows it, to compare with other ranks; returns the lines before it."""
        if rank not in self._held:
            found = _TRACEBACK.search(data) if b"Traceback (" in data or b'  File "' in data else None
            if found is None:
                return data
            if not self._held:
                self._loop.after(_HOLD_S, self.release)
            data, self._held[rank] = data[: found.start()], data[found.start() :]
            return data
        self._held[rank] += data
        if len(self._held[rank]) > _MAX_HELD:
            self.release()
        return b""

    def release(self) -> None:
        """Show the tracebacks that are held back; equal ones of several ranks as one."""
        held, self._held = self._held, {}
        ranks: dict[bytes, list[int]] = {}
        for rank, text in sorted(held.items()):
            ranks.setdefault(text, []).append(rank)
        for text, same in ranks.items():
            self._put(2, _with_prefix(f"[{numbers_text(same)}] ".encode(), text))

    def unfinished(self, rank: int, fd: int, text: bytes) -> None:
        """What `rank` has written of a line so far; shown on a terminal only."""
        if not text and (self._unfinished is None or self._unfinished[:2] != (rank, fd)):
            return
        self._hide_unfinished(forget=True)
        if text:
            shown = (b"" if self._raw else b"[%d] " % rank) + _visible(text)
            width = columns(fd) - 1
            self._unfinished = (rank, fd, shown.decode(errors="replace")[:width].encode())
            self._push(fd, self._unfinished[2])

    def status(self, fd: int, data: bytes) -> None:
        """Whole lines that belong to no rank: those of the launcher or of mpirun."""
        self.release()
        self._put(fd, data)

    def flush(self, seconds: float | None) -> None:
        """Waits until all is written, at most `seconds`; what remains is dropped."""
        self.release()
        self._hide_unfinished(forget=True)
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        while self._waiting and (left := deadline - time.monotonic()) > 0:
            fd = self._waiting[0][0]
            if _is_ready(fd, left):
                self._write(fd)
        self._waiting.clear()

    def watch(self) -> None:
        """Continue writing when the first pending bytes can be written."""
        for fd in (1, 2):
            first = bool(self._waiting) and self._waiting[0][0] == fd
            self._loop.writing(fd, partial(self._write, fd) if first else None)

    def _put(self, fd: int, data: bytes) -> None:
        shown = self._unfinished
        if shown and fd in self.live:
            self._hide_unfinished(forget=False)
        self._push(fd, data)
        if shown and fd in self.live and self._unfinished:
            self._push(shown[1], shown[2])

    def _hide_unfinished(self, *, forget: bool) -> None:
        if self._unfinished:
            self._push(self._unfinished[1], _CLEAR_LINE)
        if forget:
            self._unfinished = None

    def _push(self, fd: int, data: bytes) -> None:
        if fd not in self._lost:
            self._waiting.append((fd, memoryview(data)))
            self.n_waiting += len(data)

    def _write(self, fd: int) -> None:
        """Writes the pending data of `fd` while it is ready: another poll costs more."""
        self._write_piece(fd)
        for _ in range(_MAX_PIECES - 1):
            if not self._waiting or self._waiting[0][0] != fd or not _is_ready(fd):
                return
            self._write_piece(fd)

    def _write_piece(self, fd: int) -> None:
        _, data = self._waiting[0]
        try:
            n_written = os.write(fd, data[:_AT_ONCE])
        except BlockingIOError:
            return
        except OSError as error:
            self._lost.add(fd)
            self._waiting = deque(item for item in self._waiting if item[0] != fd)
            self.n_waiting = sum(len(data) for _, data in self._waiting)
            if fd == 1:
                self._on_lost(error)
            return
        self.n_waiting -= n_written
        if n_written == len(data):
            self._waiting.popleft()
        else:
            self._waiting[0] = (fd, data[n_written:])

    def _log(self, rank: int, fd: int, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._logs[rank, fd], view) :]
        except OSError as error:
            self._logs = {}
            why = os.strerror(error.errno or 0)
            self.status(2, f"samestep: the files of --logs end here: {why}\n".encode())


def _with_prefix(prefix: bytes, lines: bytes) -> bytes:
    if b" / " in lines:
        return _WITHOUT_HEAD.sub(prefix, lines[:-1]) + b"\n"
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n"


def _is_ready(fd: int, seconds: float = 0.0) -> bool:
    """Whether `fd` can be written to, or is broken, within so many seconds."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(None if math.isinf(seconds) else math.ceil(1e3 * seconds)))


class Logs(dict[tuple[int, int], int]):
    """The files of `options.logs` by rank of the whole job and descriptor (1 or 2), open and empty.

    That of a rank that joins is made when it is asked for. In a run that is repeated files keep their contents.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        os.makedirs(options.logs or "", exist_ok=True)
        for rank in range(options.first_rank, options.first_rank + options.n_ranks):
            for fd in (1, 2):
                self.__missing__((rank, fd))

    def __missing__(self, key: tuple[int, int]) -> int:
        file = os.path.join(self._options.logs or "", self._options.log_file(*key))
        anew = os.O_APPEND if self._options.n_restarts else os.O_TRUNC
        self[key] = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | anew, 0o666)
        return self[key]


def _last_states(data: bytes) -> bytes:
    """Whole lines without what they overwrote; omits a line that was erased in the end, as by progress bars."""
    lines = ((line, _visible(line)) for line in data[:-1].split(b"\n"))
    return b"".join(text + b"\n" for line, text in lines if text.strip() or b"\r" not in line)


def _visible(line: bytes) -> bytes:
    """What a terminal shows of a line that returned the carriage: the last thing written over the others."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
