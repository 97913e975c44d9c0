"""Malformed bytes at every entry point: the store, the launcher's port, the port of a rank, the socket of a host.

    python tests/fuzz/protocols.py --packets 20000 --seed 1

Each entry point is served as in a job while strangers and clients, drawn from the seed, send broken packets. After each
round an honest peer is served; at the end memory, descriptors and threads are as before. Prints a table for
docs/security.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import socket
import struct
import sys
import threading
import time

from samestep._util import handshake
from samestep.launch.loop import Loop
from samestep.launch.ranks import Ranks
from samestep.rendezvous import TCPStore, local_links, mesh
from samestep.rendezvous.rendezvous import Rendezvous

_PATIENCE_S = 60.0
_ODD = [
    "Infinity",
    "-Infinity",
    "NaN",
    "1e999",
    "9" * 500,
    "-0.0",
    "true",
    "null",
    '"\\ud800"',
    '"\\u20ac"',
    "[" * 9999,
]
_WORDS = [
    "add",
    "set",
    "await",
    "values",
    "delete",
    "count",
    "compare_set",
    "missing",
    "host",
    "rank",
    "size",
    "",
]


class Drawer:
    """Broken packets, by a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def value(self, depth: int = 0) -> str:
        draw = self.random
        kind = draw.randrange(7 if depth < 4 else 4)
        if kind == 0:
            return draw.choice(_ODD)
        if kind == 1:
            return json.dumps(draw.choice(_WORDS))
        if kind == 2:
            return str(draw.choice([0, 1, -1, 1 << 31, 1 << 63, 10**400, draw.random()]))
        if kind == 3:
            return json.dumps(draw.randbytes(draw.randrange(9)).decode("latin-1"))
        items = [self.value(depth + 1) for _ in range(draw.randrange(4))]
        if kind == 4:
            return "{" + ",".join(f'"{i}":{item}' for i, item in enumerate(items)) + "}"
        return "[" + ",".join(items) + "]"

    def packet(self) -> bytes:
        """A frame, most often with a payload that is nearly right."""
        draw = self.random
        payload = (
            f'["{draw.choice(_WORDS)}",' + ",".join(self.value() for _ in range(draw.randrange(4))) + "]"
        ).encode()
        kind = draw.choice(b"QRHSIKLoe\0\xff")
        if draw.random() < 0.2:
            payload = draw.randbytes(draw.randrange(200))
        nbytes = len(payload) if draw.random() < 0.8 else draw.choice([0, 1, 1 << 20, 1 << 28, (1 << 32) - 1])
        packet = struct.pack("!BI", kind if draw.random() < 0.5 else ord("Q"), nbytes) + payload
        if draw.random() < 0.2:
            packet = bytearray(packet)
            packet[draw.randrange(len(packet))] ^= 1 << draw.randrange(8)
        return bytes(packet[: draw.randrange(len(packet) + 1)]) if draw.random() < 0.1 else bytes(packet)

    def hello(self, protocol: bytes) -> bytes:
        """The beginning of a handshake, right, broken or cut off."""
        draw = self.random
        begin = draw.choice([protocol, protocol, handshake.STORE, b"GET / HTTP/1.1\r\n", draw.randbytes(16)])
        return (begin + draw.randbytes(draw.choice([0, 1, 15, 16, 48, 52, 500])))[
            : draw.choice([0, 3, 16, 80, 600])
        ]


def _send(place: tuple[str, int], data: bytes) -> None:
    with contextlib.suppress(OSError), socket.create_connection(place, timeout=_PATIENCE_S) as link:
        link.sendall(data)
        link.shutdown(socket.SHUT_WR)
        while link.recv(1 << 16):
            continue


def fuzz_store(draw: Drawer, n: int, *, secret: bytes = b"") -> None:
    """Strangers, and where there is no secret clients, of a store."""
    store = TCPStore("0.0.0.0", 0, is_master=True, timeout=_PATIENCE_S, secret=secret)
    place = ("127.0.0.1", store.port)
    try:
        for i in range(n):
            if secret or i % 4 == 0:
                _send(place, draw.hello(handshake.STORE))
                continue
            with contextlib.suppress(OSError), socket.create_connection(place, timeout=_PATIENCE_S) as link:
                handshake.greet(link, handshake.Client(handshake.STORE, secret))
                link.sendall(b"".join(draw.packet() for _ in range(draw.random.randrange(1, 4))))
                link.shutdown(socket.SHUT_WR)
                while link.recv(1 << 16):
                    continue
            if i % 64 == 0:
                store.set("honest", str(i))
                assert store.get("honest") == str(i).encode()
        assert store.add("after", 1) == 1
    finally:
        store.close()


class _Screen:
    """Where the launcher tells of strangers."""

    def __init__(self) -> None:
        self.texts: list[bytes] = []

    def status(self, _: int, text: bytes) -> None:
        self.texts.append(text)


def fuzz_launcher(draw: Drawer, n: int) -> None:
    """Strangers of the launcher's port; then an agent comes."""
    loop, server, screen = Loop(), socket.create_server(("127.0.0.1", 0)), _Screen()
    place = server.getsockname()
    ranks = Ranks(loop, server, "token", 1, screen)

    def come() -> None:
        from samestep.launch import find_launcher, frames

        for _ in range(n):
            _send(place, draw.hello(handshake.AGENT) if draw.random.random() < 0.5 else draw.packet())
        with socket.create_connection(place, timeout=_PATIENCE_S) as link:
            channel = find_launcher._greet(link, "token")
            link.sendall(channel.seal(frames.HELLO, {"host": "h", "rank": 0, "size": 1}))
            link.recv(1)

    thread = threading.Thread(target=come)
    thread.start()
    while not ranks.complete:
        loop.after(0.05, lambda: None)
        loop.turn()
    assert len(screen.texts) <= 1, screen.texts
    ranks.close()
    for rank in ranks:
        ranks.mark_lost(rank)
    thread.join()
    loop._selector.close()


class _Room:
    """A rendezvous of threads; `between` acts while the first exchange is in progress."""

    def __init__(self, size: int, between) -> None:
        self.said = [b""] * size
        self._first, self._between = True, between
        self.barrier = threading.Barrier(size, action=self._act)

    def _act(self) -> None:
        if self._first and all(self.said):
            self._first = False
            self._between(list(self.said))

    def allgather_bytes(self, rank: int, mine: bytes) -> list[bytes]:
        self.said[rank] = mine
        self.barrier.wait(_PATIENCE_S)
        found = list(self.said)
        self.barrier.wait(_PATIENCE_S)
        return found


def _in_threads(act, size: int) -> list[object]:
    found: list[object] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = act(rank)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE_S)
        assert not thread.is_alive(), "a rank waits for ever"
    for error in found:
        if isinstance(error, BaseException):
            raise error
    return found


def fuzz_links(draw: Drawer, n: int) -> None:
    """Strangers at the port of rank 0 while two ranks connect."""

    def come(said: list[bytes]) -> None:
        place = tuple(json.loads(said[0])[:2])
        for _ in range(n):
            with contextlib.suppress(OSError), socket.create_connection(place, timeout=_PATIENCE_S) as link:
                link.sendall(draw.hello(handshake.LINK))

    room = _Room(2, come)

    class Threads(Rendezvous):
        def __init__(self, rank: int) -> None:
            self.rank, self.size, self.private = rank, 2, True

        def allgather_bytes(self, data: bytes) -> list[bytes]:
            return room.allgather_bytes(self.rank, data)

        def report_failure(self, text: str) -> None:
            pass

        def failure(self) -> str:
            return ""

    made = _in_threads(lambda rank: mesh.connect_all(Threads(rank), "127.0.0.1", ["a", "b"], _PATIENCE_S), 2)
    made[0][1].socket.sendall(b"x")
    assert made[1][0].socket.recv(9) == b"x"
    for row in made:
        for link in row:
            if link.socket is not None:
                link.socket.close()


def fuzz_host(draw: Drawer, n: int) -> None:
    """Strangers at the sockets of two ranks of a host; some bring descriptors, some say nothing and stay."""
    stay: list[socket.socket] = []

    def come(said: list[bytes]) -> None:
        for i in range(n):
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with contextlib.suppress(OSError):
                link.settimeout(1)
                link.connect("\0" + said[i % 2][:16].rstrip(b"\0").decode("latin-1"))
                words = draw.random.randbytes(draw.random.choice([1, 4, 19, 20, 21, 4096]))
                rights = [0] * draw.random.choice([0, 1, 2, 3, 20])
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(rights)}i", *rights))]
                if draw.random.random() < 0.7:
                    link.sendmsg([words], ancillary if rights else [])
            stay.append(link) if draw.random.random() < 0.3 and len(stay) < 100 else link.close()

    room = _Room(2, come)
    made = _in_threads(
        lambda rank: local_links.connect_all(
            rank, 2, lambda mine: room.allgather_bytes(rank, mine), _PATIENCE_S
        ),
        2,
    )
    for link in (*stay, made[0][1], made[1][0]):
        assert link is not None
        link.close()


ENTRY_POINTS = {
    "store, open to everybody": fuzz_store,
    "store with a secret": lambda draw, n: fuzz_store(draw, n, secret=b"known"),
    "launcher's port": fuzz_launcher,
    "port of a rank": fuzz_links,
    "socket of a host": fuzz_host,
}
_AT_A_TIME = 200  # packets for one start; those of ranks are open for a moment only


def fuzz(entry_point: str, n: int, seed: int) -> None:
    """Sends `n` packets or connections to one entry point.

    Raises:
      AssertionError, or whatever went wrong in the process that is attacked.
    """
    draw = Drawer(seed)
    n_fds = len(os.listdir("/proc/self/fd"))
    n_threads = threading.active_count()
    for done in range(0, n, _AT_A_TIME):
        ENTRY_POINTS[entry_point](draw, min(_AT_A_TIME, n - done))
    deadline = time.monotonic() + 5
    while len(os.listdir("/proc/self/fd")) > n_fds and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= n_fds, "descriptors are left"
    assert threading.active_count() == n_threads, "threads are left"


def main() -> int:
    """Fuzzes all entry points; prints a line for each."""
    import logging

    logging.disable()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--packets", type=int, default=20_000, help="for each entry point")
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    print(
        "| entry point | packets | result | growth of peak memory | seconds |\n|---|---|---|---|---|",
        flush=True,
    )
    for entry_point in ENTRY_POINTS:
        before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        fuzz(entry_point, flags.packets, flags.seed)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        seconds = time.monotonic() - begin
        print(
            f"| {entry_point} | {flags.packets:,} | honest peers served, nothing left | {grown:.0f} MB "
            f"| {seconds:.0f} |"
        )
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
