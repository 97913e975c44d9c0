"""Malformed answers of a store: a process that was at its port first, and lets ranks join.

    python tests/fuzz/answers.py --joins 5000 --seed 1

A rank joins at a store whose answers are right, until one that the seed draws is not. It either goes on or raises an
error of samestep, in time, and leaves no descriptor. Prints a line for docs/security.md.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import socket
import struct
import sys
import threading

from protocols import Drawer
from samestep._util import handshake
from samestep._util.frames import Channel
from samestep.errors import Error
from samestep.rendezvous import TCPStore
from samestep.rendezvous.rendezvous import join
from samestep.rendezvous.store import RESERVED, WRITES, Table
from samestep.rendezvous.tcp_address import LEAVE

_PATIENCE_S = 0.2
_SECRET = b"known"
_FACTS = [str, int]


class Impostor:
    """Listens at a port of its own, and serves one connection after the other."""

    def __init__(self, draw: Drawer) -> None:
        self.draw = draw
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def close(self) -> None:
        """Ends once its last client has gone."""
        self.listener.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.listener.close()

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self.listener.accept()
            except OSError:
                return
            with link:
                try:
                    self._answer_all(link)
                except OSError:
                    continue

    def _answer_all(self, link: socket.socket) -> None:
        greeting = handshake.Greeting(handshake.STORE, _SECRET)
        while not greeting.done:
            link.sendall(greeting.feed(link.recv(200) or _gone()))
        table, channel = _as_rank_0(), greeting.channel(most=1 << 20)
        left = self.draw.random.randrange(20)
        data = greeting.remainder
        while data := data or link.recv(1 << 16):
            requests, data = list(channel.feed(data)), b""
            for kind, payload in requests:
                if kind == LEAVE:
                    return
                operation, *arguments = json.loads(payload)
                if operation == "await":
                    operation, arguments = "missing", [[]]
                right = [table.apply(operation, *arguments)]
                if operation in WRITES:
                    table.apply("set", [RESERVED, "0 of 0"], '["host", 1]')
                if left == 0:
                    link.sendall(self._wrong(channel, right))
                    return  # the end, or a client would wait for the rest of a frame
                link.sendall(channel.seal(b"R", right))
                left -= 1

    def _wrong(self, channel: Channel, right: list[object]) -> bytes:
        """An answer in the place of the right one; most are from one that knows the secret."""
        draw = self.draw.random
        kind = draw.randrange(5)
        if kind == 0:
            return channel.seal(draw.choice([b"R", b"E", b"Q"]), f"[{self.draw.value()}]".encode())
        if kind == 1:
            return self.draw.packet() + bytes(draw.choice([0, 9, 9000]))
        if kind == 2:
            return struct.pack("!BI", ord("R"), draw.choice([1 << 28, (1 << 32) - 1])) + b"[" * 999
        if kind == 3:
            texts = [
                draw.choice([None, "", "\u4e00", "{}", "[]", '["x", 1]', "[1]"])
                for _ in range(draw.randrange(4))
            ]
            return channel.seal(
                b"R", [draw.choice([texts, texts[:1], draw.choice(["x", "", 7, None, True])])]
            )
        broken = bytearray(channel.seal(b"R", right))
        broken[draw.randrange(len(broken))] ^= 1 << draw.randrange(8)
        return bytes(broken)


def _gone() -> bytes:
    raise ConnectionResetError


def _as_rank_0() -> Table:
    """What rank 0 of two leaves in a store when it has joined and has sent its facts."""
    table = Table()
    for key, value in {"rank 0": "token", "world_size": "[2, 0]", "joined": "1", "0 arrived": "1"}.items():
        table.apply("set", [RESERVED, key], value)
    table.apply("set", [RESERVED, "0 of 0"], '["host", 1]')
    return table


def _join(port: int) -> str:
    """Joins as rank 1 and exchanges facts, as `initialize` does; the name of the error, or "joined"."""
    try:
        store = TCPStore("127.0.0.1", port, timeout=_PATIENCE_S, secret=_SECRET)
        try:
            rendezvous = join(store, 1, 2, timeout=_PATIENCE_S)
            everyone = rendezvous.allgather_json(["host", 1], _FACTS)
            assert [[type(x) for x in facts] for facts in everyone] == [_FACTS, _FACTS]
        finally:
            store.close()
    except Error as error:
        assert str(error)
        return type(error).__name__
    return "joined"


def run(seed: int, n: int) -> collections.Counter[str]:
    """How often each outcome occurred among `n` joins."""
    n_fds = len(os.listdir("/proc/self/fd"))
    impostor = Impostor(Drawer(seed))
    outcomes: collections.Counter[str] = collections.Counter()
    try:
        for number in range(n):
            try:
                outcomes[_join(impostor.port)] += 1
            except Exception as error:
                raise AssertionError(
                    f"seed {seed}, join {number}: {type(error).__name__}: {error}"
                ) from error
    finally:
        impostor.close()
    assert len(os.listdir("/proc/self/fd")) == n_fds, "descriptors are left"
    return outcomes


def main() -> int:
    """Joins as often as the command line says; prints a line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--joins", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    outcomes = run(flags.seed, flags.joins)
    print(f"{flags.joins:,} joins: " + ", ".join(f"{name} {n:,}" for name, n in outcomes.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
