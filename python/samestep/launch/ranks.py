"""The launcher's side of the agents: who has come, and what became of each rank."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from samestep.launch import frames, network
from samestep.launch.ending import Ending
from samestep.launch.lines import LONGEST_LINE
from samestep.launch.loop import Loop
from samestep.launch.output import Output
from samestep.launch.standard_input import StandardInput

_SEND_TIMEOUT_S = 5.0  # commands are small and agents always read


@dataclass
class Rank:
    """One rank as the launcher knows it.

    Attributes:
      name: with its number in the whole job.
      host: "" if it is the launcher's.
      link: connection to its agent; None once that is gone.
      pid: 0 until it has started.
      cut_off: `mpirun` ended its agent's stub.
      ending: how its process ended; None while it runs.
      all_gone: it and everything it started has ended, or is out of sight.
    """

    number: int
    name: str
    host: str
    link: socket.socket | None
    decoder: frames.Decoder = field(default_factory=lambda: frames.Decoder(most=2 * LONGEST_LINE))
    pid: int = 0
    cut_off: bool = False
    ending: Ending | None = None
    all_gone: bool = False

    def send(self, kind: bytes, content: object = b"") -> None:
        """Tells the agent something. One that cannot be told is lost: reading from it gives the end now."""
        if self.link is not None:
            try:
                self.link.sendall(frames.encode(kind, content))
            except OSError:
                with contextlib.suppress(OSError):
                    self.link.shutdown(socket.SHUT_RDWR)


class Ranks:
    """All ranks that have reported, by number; accepts agents and reads what they send.

    Args:
      loop: watches the listening socket and the agents' connections.
      server: where agents connect.
      token: what an agent has to know. Who does not is disconnected without an answer.
      n_ranks: how many are expected.
      output: gets what ranks print.
      first_rank: number of the first in the whole job.
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
    ) -> None:
        self.by_number: dict[int, Rank] = {}
        self.problem = ""
        self._strangers: set[socket.socket] = set()
        self.input = StandardInput(loop, lambda data: self.by_number[0].send(frames.INPUT, data))
        self._loop = loop
        self._server = server
        self._token = token
        self._n_ranks = n_ranks
        self._output = output
        self._first_rank = first_rank
        server.setblocking(False)
        loop.reading(server.fileno(), self._accept)

    def __iter__(self) -> Iterator[Rank]:
        return iter(sorted(self.by_number.values(), key=lambda rank: rank.number))

    @property
    def complete(self) -> bool:
        """Every rank has an agent that reported."""
        return len(self.by_number) == self._n_ranks

    def pause(self, paused: bool) -> None:
        """Stops listening to the agents, or goes on, so that what ranks print does not pile up here."""
        for rank in self.by_number.values():
            if rank.link is not None:
                self._loop.reading(rank.link.fileno(), None if paused else partial(self._on_agent, rank))

    def give_up(self, rank: Rank) -> None:
        """Takes `rank` as gone: its connection broke, or its agent does not answer."""
        if rank.link is not None:
            self._loop.reading(rank.link.fileno(), None)
            rank.link.close()
            rank.link = None
        if not rank.all_gone and rank.ending is None:
            rank.ending = Ending(rank.name, rank.pid, None, time.time(), host=rank.host)
        rank.all_gone = True

    def close(self) -> None:
        """Lets nobody in any more."""
        for link in (self._server, *self._strangers):
            self._loop.reading(link.fileno(), None)
            link.close()
        self._strangers.clear()

    def _accept(self) -> None:
        try:
            link, _ = self._server.accept()
        except OSError:
            return
        link.settimeout(_SEND_TIMEOUT_S)
        network.notice_silence(link)
        self._strangers.add(link)
        self._loop.reading(link.fileno(), partial(self._on_stranger, link, frames.Decoder(most=1 << 16)))

    def _on_stranger(self, link: socket.socket, decoder: frames.Decoder) -> None:
        try:
            data = link.recv(1 << 16)
            arrived = list(decoder.feed(data))
            if data and not arrived:
                return
            kind, payload = arrived[0]
            hello = json.loads(payload)
            known = kind == frames.HELLO and hmac.compare_digest(str(hello.pop("token")), self._token)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            known = False
        self._loop.reading(link.fileno(), None)
        self._strangers.remove(link)
        if known:
            self._welcome(link, **hello)
        else:
            link.close()

    def _welcome(self, link: socket.socket, host: str, rank: int, size: int) -> None:
        if size != self._n_ranks or rank in self.by_number:
            self.problem = f"mpirun started rank {rank} of {size} on {host}; {self._n_ranks} were asked for"
            link.close()
            return
        self.by_number[rank] = Rank(
            rank, f"rank {self._first_rank + rank}", "" if host == socket.gethostname() else host, link
        )

    def _on_agent(self, rank: Rank) -> None:
        assert rank.link is not None
        try:
            data = rank.link.recv(1 << 18)
            if not data:
                raise ConnectionResetError
            for kind, payload in rank.decoder.feed(data):
                self._on_frame(rank, kind, payload)
        except (OSError, ValueError):
            self.give_up(rank)

    def _on_frame(self, rank: Rank, kind: bytes, payload: bytes) -> None:
        if kind in _DESCRIPTOR_OF_LINES:
            self._output.lines(rank.number, _DESCRIPTOR_OF_LINES[kind], payload)
        elif kind in _DESCRIPTOR_OF_PARTIAL:
            self._output.unfinished(rank.number, _DESCRIPTOR_OF_PARTIAL[kind], payload)
        elif kind == frames.STARTED:
            rank.pid = json.loads(payload)["pid"]
        elif kind == frames.TAKEN:
            self.input.taken(json.loads(payload))
        elif kind == frames.CUT_OFF:
            rank.cut_off = True
        elif kind == frames.EXITED:
            how = json.loads(payload)
            how["signals"] = tuple(how["signals"])
            how["ended_by"] = "mpirun" if rank.cut_off else "the launcher"
            rank.ending = Ending(rank.name, rank.pid, host=rank.host, **how)
        elif kind == frames.DONE:
            rank.all_gone = True


_DESCRIPTOR_OF_LINES = {kind: fd for fd, kind in frames.LINES.items()}
_DESCRIPTOR_OF_PARTIAL = {kind: fd for fd, kind in frames.PARTIAL.items()}
