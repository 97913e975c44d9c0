#!/usr/bin/env python3
"""Whether several TCP connections between two hosts carry more than one: bytes in both directions at the same time.

    sudo python benchmarks/connections.py     # ten seconds; prints a table

The hosts are network namespaces of this machine. A buffer is cut into chunks, and each connection that has room takes
the next one. Numbers of connections take turns in every round; reported are the least and the median of the rounds, for
what else runs on the machine only adds.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
CHUNK = 128 << 10  # bytes that a connection takes at a time
PORT = 29700  # nobody else is in these networks
NUMBERS = (1, 2, 4)
LINES = {
    "no limit": ("", 0, 64 * MIB),
    "10 Gbit/s": ("10gbit", 0, 64 * MIB),
    "1 Gbit/s": ("1gbit", 0, 16 * MIB),
    "1 Gbit/s, 1 packet of 100 lost in each direction": ("1gbit", 1, 16 * MIB),
}
WATCHES_BOTH = select.POLLIN | select.POLLOUT


def transfer(links: Sequence[socket.socket], out: memoryview, into: memoryview) -> None:
    """Sends and receives as many bytes over all links together."""
    poller, by_fd = select.poll(), {link.fileno(): link for link in links}
    for fd in by_fd:
        poller.register(fd, WATCHES_BOTH)
    rest: dict[int, memoryview] = {}
    taken, came, open_links = 0, 0, len(links)
    while came < len(into) or open_links:
        for fd, events in poller.poll():
            if events & select.POLLIN:
                came += by_fd[fd].recv_into(into[: 2 * CHUNK])
            if not events & select.POLLOUT:
                continue
            if not rest.get(fd):
                rest[fd] = out[taken : taken + CHUNK]
                taken += len(rest[fd])
            if rest[fd]:
                rest[fd] = rest[fd][by_fd[fd].send(rest[fd]) :]
            else:
                poller.modify(fd, select.POLLIN)
                open_links -= 1


def play(host: str, nbytes: int, rounds: int, *, listens: bool) -> None:
    """One of the two hosts: seconds of each round, by the number of connections."""
    if listens:
        with socket.create_server((host, PORT)) as server:
            print("listens", flush=True)
            links = [server.accept()[0] for _ in range(1 + max(NUMBERS))]
    else:
        links = [socket.create_connection((host, PORT)) for _ in range(1 + max(NUMBERS))]
    control, *links = links
    for link in links:
        link.setblocking(False)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    out, into = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
    found: dict[int, list[float]] = {n: [] for n in NUMBERS}
    for number in range(rounds + 1):
        for n in NUMBERS:
            control.sendall(b"+")
            control.recv(1)
            begin = time.perf_counter()
            transfer(links[:n], out, into)
            if number:
                found[n].append(time.perf_counter() - begin)
    print(json.dumps(found), flush=True)


def measure(rounds: int) -> None:
    sys.path.insert(0, str(ROOT / "tests/hosts"))
    import lab as labs

    if reason := labs.missing():
        raise SystemExit(f"connections.py: {reason}")
    print("| line, bytes in each direction | " + " | ".join(f"{n}, ms" for n in NUMBERS) + " |")
    print("|---" * (1 + len(NUMBERS)) + "|")
    for name, (rate, percent, nbytes) in LINES.items():
        lab = labs.Lab(2)
        try:
            for host in (0, 1) if rate else ():
                lab.limit(host, rate)
            if percent:
                lab.lose(1, percent)
            words = [sys.executable, __file__, "--nbytes", str(nbytes), "--rounds", str(rounds), "--host"]
            first = lab.start("node0", [*words, "10.78.0.1", "--listens"])
            assert first.stdout.readline() == "listens\n"
            second = lab.start("node1", [*words, "10.78.0.1"])
            found = json.loads(first.communicate()[0])
            second.communicate()
        finally:
            lab.close()
        cells = [f"{min(times) * 1e3:.1f}, {statistics.median(times) * 1e3:.1f}" for times in found.values()]
        print(f"| {name}, {nbytes // MIB} MiB | {' | '.join(cells)} |", flush=True)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--host", help=argparse.SUPPRESS)
    parser.add_argument("--nbytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--listens", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    if flags.host:
        play(flags.host, flags.nbytes, flags.rounds, listens=flags.listens)
    else:
        measure(flags.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
