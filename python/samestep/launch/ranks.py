"""The connected agents, and the state of each rank, in the launcher."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from samestep._util import handshake, silence
from samestep._util.frames import Channel
from samestep._util.json_layout import loads
from samestep._util.strangers import Strangers
from samestep.launch import frames
from samestep.launch.causes import ProcessExit
from samestep.launch.lines import LONGEST_LINE
from samestep.launch.loop import Loop
from samestep.launch.output import Output

_MAX_ON_THE_WAY = 1 << 18  # bytes that the rank has not read yet
_AT_ONCE = 1 << 16


class StandardInput:
    """Forwards descriptor 0 to rank 0, where that is not a child of this process, or a terminal is read.

    It is read no faster than the rank does, and only while this process is in the foreground. Elsewhere rank 0 has the
    descriptor itself: what it does not read stays there, for example for the loop of a shell that starts one run per
    line. A terminal is for the processes of its session, which ranks are not.

    Not through `mpirun`: that of Open MPI 5 loses the end of the input (seen with 5.0.11), and repeats parts of inputs
    above 64 KiB (https://github.com/openpmix/prrte/issues/2579).

    Args:
      loop: watches descriptor 0 while there is room.
      send: called with the data; b"" is the end.
    """

    def __init__(self, loop: Loop, send: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._send = send
        self._on_the_way = 0
        self._ended = False
        self._is_terminal = os.isatty(0)

    def taken(self, nbytes: int) -> None:
        """The rank has read `nbytes` more."""
        self._on_the_way -= nbytes

    def watch(self) -> None:
        """Start or stop reading: reads if there is room and this is the foreground process."""
        room = self._on_the_way + _AT_ONCE <= _MAX_ON_THE_WAY
        wanted = room and not self._ended and self._may_read()
        self._loop.reading(0, self._read if wanted else None)

    def _may_read(self) -> bool:
        """The kernel stops a background process that reads its terminal."""
        try:
            return not self._is_terminal or os.tcgetpgrp(0) == os.getpgrp()
        except OSError:  # the terminal is gone
            return False

    def _read(self) -> None:
        if not self._may_read():
            return
        try:
            data = os.read(0, _AT_ONCE)
        except OSError:
            data = b""
        self._ended = not data
        self._on_the_way += len(data)
        self._send(data)


_LOOK_S = 1.0  # between checks of connections that have not identified themselves
_SEND_TIMEOUT_S = 5.0  # commands are small and agents always read


@dataclass
class Rank:
    """The state of one rank in the launcher.

    Attributes:
      number: among the ranks of this run.
      in_job: its number in the whole job, as shown to users.
      host: "" if it is the launcher's.
      link, channel: connection to its agent, None once that is closed, and the frames on it.
      pid: 0 until it has started.
      cut_off: `mpirun` ended its agent's stub.
      ending: how its process ended; None while it runs.
      all_gone: it and all its descendants have ended, or can no longer be reached.
      joined: it is one of `samestep run --join`; `all_gone` until it is started.
    """

    number: int
    in_job: int
    host: str
    link: socket.socket | None
    channel: Channel
    pid: int = 0
    cut_off: bool = False
    ending: ProcessExit | None = None
    all_gone: bool = False
    joined: bool = False

    @property
    def runs(self) -> bool:
        """Its process has not ended, as far as is known; that of a rank that has joined has been started."""
        return self.ending is None and not self.all_gone

    @property
    def name(self) -> str:
        """The name in messages."""
        return f"rank {self.in_job}"

    def send(self, kind: bytes, content: object = b"") -> None:
        """Send a frame to the agent. If that fails, the next read reports that the connection is lost."""
        if self.link is not None:
            try:
                self.link.sendall(self.channel.seal(kind, content))
            except OSError:
                with contextlib.suppress(OSError):
                    self.link.shutdown(socket.SHUT_RDWR)


class _Newcomer:
    """A connection that has not authenticated yet; afterwards it names its rank."""

    def __init__(self, link: socket.socket, peer: Any, token: str) -> None:
        self.link, self.address = link, f"{peer[0]}:{peer[1]}"
        where = handshake.place(link.getsockname(), peer)
        self._greeting = handshake.Greeting(handshake.AGENT, token.encode(), where)
        self.channel: Channel | None = None

    def receive(self) -> dict[str, Any] | None:
        """The HELLO of the agent, once it is complete. Raises OSError or ValueError for any other client."""
        data = self.link.recv(1 << 12)
        if not data:
            saw_proof = self._greeting.answered and not self._greeting.done
            raise ConnectionResetError(_OTHER_SECRET if saw_proof else "it has closed the connection")
        if not self._greeting.done:
            if answer := self._greeting.feed(data):
                self.link.sendall(answer)
            data = self._greeting.remainder
        if not self._greeting.done:
            return None
        if self.channel is None:
            self.channel = self._greeting.channel(most=2 * LONGEST_LINE, readable=frames.READABLE)
        for kind, payload in self.channel.feed(data):
            if kind != frames.HELLO:
                raise ValueError("it did not say hello")
            hello: dict[str, Any] = loads(payload, {"host": str, "rank": int, "size": int})
            return hello
        return None


class Ranks:
    """All ranks that have reported, by number; accepts agents and reads what they send.

    Args:
      token: the secret of agents, see `handshake`. Other clients are disconnected and reported once.
      n_ranks: how many are expected.
      first_rank: number of the first in the whole job.
      may_join: agents of more ranks than were asked for may come.
    """

    def __init__(
        self,
        loop: Loop,
        server: socket.socket,
        token: str,
        n_ranks: int,
        output: Output,
        *,
        first_rank: int = 0,
        may_join: bool = False,
    ) -> None:
        self.by_number: dict[int, Rank] = {}
        self.problem = ""
        self._strangers = Strangers("the launcher's port", self._tell, n_ranks)
        self.input = StandardInput(loop, lambda data: self.by_number[0].send(frames.INPUT, data))
        self._loop = loop
        self._server = server
        self._token = token
        self._n_ranks = n_ranks
        self._output = output
        self._first_rank, self._may_join = first_rank, may_join
        server.setblocking(False)
        loop.reading(server.fileno(), self._accept)

    def __iter__(self) -> Iterator[Rank]:
        return iter(sorted(self.by_number.values(), key=lambda rank: rank.number))

    @property
    def complete(self) -> bool:
        """Every rank has an agent that reported."""
        return all(number in self.by_number for number in range(self._n_ranks))

    def pause(self, paused: bool) -> None:
        """Stop or resume reading from the agents, so that the output of ranks does not pile up here."""
        for rank in self.by_number.values():
            if rank.link is not None:
                self._loop.reading(rank.link.fileno(), None if paused else partial(self._on_agent, rank))

    def mark_silent_lost(self) -> None:
        """Mark those lost whose host does not answer what was sent to it."""
        for rank in self.by_number.values():
            if rank.link is not None and silence.is_silent(rank.link):
                self.mark_lost(rank)

    def mark_lost(self, rank: Rank) -> None:
        """Mark `rank` as lost: its connection broke, or its agent does not answer."""
        if rank.link is not None:
            self._loop.reading(rank.link.fileno(), None)
            rank.link.close()
            rank.link = None
        if not rank.all_gone and rank.ending is None:
            rank.ending = ProcessExit(
                rank.name, rank.pid, None, time.time(), host=rank.host, rank=rank.in_job
            )
        rank.all_gone = True

    def close(self) -> None:
        """Accept no more connections."""
        for link in self._strangers.all():
            self._drop(link)
        self._loop.reading(self._server.fileno(), None)
        self._server.close()

    def _accept(self) -> None:
        try:
            link, address = self._server.accept()
        except OSError:
            return
        link.settimeout(_SEND_TIMEOUT_S)
        silence.notice_silence(link)
        if not self._strangers:
            self._loop.after(_LOOK_S, self._drop_late)
        if (oldest := self._strangers.add(link)) is not None:
            self._drop(oldest)
        newcomer = _Newcomer(link, address, self._token)
        self._loop.reading(link.fileno(), partial(self._on_stranger, newcomer))

    def _on_stranger(self, newcomer: _Newcomer) -> None:
        link = newcomer.link
        try:
            hello = newcomer.receive()
        except (OSError, ValueError) as error:
            self._strangers.report(newcomer.address, str(error))
            self._drop(link)
            return
        if hello is not None:
            self._loop.reading(link.fileno(), None)
            self._strangers.remove(link)
            assert newcomer.channel is not None
            self._welcome(link, newcomer.channel, **hello)

    def _drop(self, link: socket.socket) -> None:
        self._strangers.remove(link)
        self._loop.reading(link.fileno(), None)
        link.close()

    def _drop_late(self) -> None:
        for link in self._strangers.late():
            self._drop(link)
        if self._strangers:
            self._loop.after(_LOOK_S, self._drop_late)

    def _tell(self, text: str) -> None:
        self._output.status(2, f"samestep: {text}\n".encode())

    def _welcome(self, link: socket.socket, channel: Channel, host: str, rank: int, size: int) -> None:
        joined = rank < 0 and self._may_join
        if joined:
            size, rank = self._n_ranks, self._n_ranks + sum(one.joined for one in self)
        elif size != self._n_ranks or rank in self.by_number or not 0 <= rank < size:
            self.problem = f"mpirun started rank {rank} of {size} on {host}; {self._n_ranks} were asked for"
            link.close()
            return
        host = "" if host == socket.gethostname() else host
        self.by_number[rank] = Rank(
            rank, self._first_rank + rank, host, link, channel, all_gone=joined, joined=joined
        )

    def _on_agent(self, rank: Rank) -> None:
        assert rank.link is not None
        try:
            data = rank.link.recv(1 << 18)
            if not data:
                raise ConnectionResetError
            for kind, payload in rank.channel.feed(data):
                self._on_frame(rank, kind, payload)
        except (OSError, ValueError, LookupError, TypeError):
            self.mark_lost(rank)

    def _on_frame(self, rank: Rank, kind: bytes, payload: bytes) -> None:
        if kind in _DESCRIPTOR_OF_LINES:
            self._output.lines(rank.in_job, _DESCRIPTOR_OF_LINES[kind], payload)
        elif kind in _DESCRIPTOR_OF_PARTIAL:
            self._output.unfinished(rank.in_job, _DESCRIPTOR_OF_PARTIAL[kind], payload)
        elif kind == frames.STARTED:
            rank.pid = json.loads(payload)["pid"]
        elif kind == frames.TAKEN:
            self.input.taken(json.loads(payload))
        elif kind == frames.CUT_OFF:
            rank.cut_off = True
        elif kind == frames.EXITED:
            how = json.loads(payload)
            how["signals"] = tuple(how["signals"])
            above = "its own launcher" if rank.joined else "mpirun"
            how["ended_by"] = above if rank.cut_off else "the launcher"
            rank.ending = ProcessExit(rank.name, rank.pid, host=rank.host, rank=rank.in_job, **how)
        elif kind == frames.DONE:
            rank.all_gone = True
            if rank.joined and rank.cut_off:  # its own launcher ends
                rank.send(frames.LEAVE)


_OTHER_SECRET = (
    "it left when it saw another secret than its own; if it is a rank that joins this job, give both launchers the "
    "same SAMESTEP_SECRET, --secret-file or ~/.config/samestep/secret"
)
_DESCRIPTOR_OF_LINES = {kind: fd for fd, kind in frames.LINES.items()}
_DESCRIPTOR_OF_PARTIAL = {kind: fd for fd, kind in frames.PARTIAL.items()}
