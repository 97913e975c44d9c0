"""Programs of test_damaged_bytes.py: a proxy between two ranks flips a bit of what one of them sends."""

import json
import os
import socket
import sys
import threading

import numpy as np
import samestep as ss
from native_rank import rank, report, start
from samestep import _core

FEW, MANY = 8, 300_000  # elements


class Proxy:
    """Takes the place of a connected socket; `flip(at)` changes a bit of byte `at` of those that this rank sends from
    then on."""

    def __init__(self, fd):
        outer = socket.socket(fileno=fd)
        outer.setblocking(True)
        with socket.create_server(("127.0.0.1", 0)) as listener:  # the core wants a TCP socket
            self.end = socket.create_connection(listener.getsockname())
            inner, _ = listener.accept()
        self._left = None
        self.sent = bytearray()
        for pair in ((inner, outer, True), (outer, inner, False)):
            threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def flip(self, at):
        self._left = at

    def _pump(self, source, sink, sends):
        try:
            while data := source.recv(1 << 16):
                if sends:
                    self.sent += data
                sink.sendall(self._changed(bytearray(data)) if sends else data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # the other side has ended
            source.close()

    def _changed(self, data):
        if self._left is not None:
            if self._left < len(data):
                data[self._left] ^= 1 << 3
                self._left = None
            else:
                self._left -= len(data)
        return data


def put_between(ranks):
    """The proxy of this rank to another one, made when the world is; None in all ranks but the second of `ranks`."""
    found = []
    opened = _core.open_tcp_world

    def open_tcp_world(name, me, peers, *rest):
        peers = list(peers)
        if me == ranks[1]:
            fd, where = peers[ranks[0]]
            found.append(Proxy(fd))
            peers[ranks[0]] = (found[0].end.detach(), where)
        return opened(name, me, peers, *rest)

    _core.open_tcp_world = open_tcp_world
    return found


def allreduce(world, n):
    return world.allreduce(np.full(n, float(world.rank))), sum(range(world.size))


def bcast(world, n):
    return world.bcast(np.full(n, float(world.rank)), root=world.size - 1), world.size - 1


def gather(world, n):
    gathered = world.gather(np.full(n, 5.0), root=0)
    return (5.0 if gathered is None else gathered), 5.0


def objects(world, n):
    return np.ravel(world.allgather_object([7.0] * n)), 7.0


def from_anybody(world, n):
    if world.rank > 0:
        world.send(np.full(n, 3.0), 0, tag=1)
        return 3.0, 3.0
    got = [np.empty(n) for _ in range(world.size - 1)]
    for array in got:
        world.recv(array, source=ss.ANY, tag=1)
    return np.concatenate(got), 3.0


CALLS = {each.__name__: each for each in (allreduce, bcast, gather, objects, from_anybody)}


def repeat_until_a_bit_flips(call, n, at, ranks):
    """`ranks`: between which it flips. Reports the error, and whether a result was wrong before."""
    proxies = put_between(ranks)
    world = start()
    wrong = 0
    try:
        world.barrier()
        for proxy in proxies:
            proxy.flip(at)
        for _ in range(1000):
            found, right = CALLS[call](world, n)
            wrong += int(np.count_nonzero(found != right))
            world.barrier()
        report(rank=rank, wrong=wrong, text="no error")
    except ss.Error as error:
        report(rank=rank, wrong=wrong, text=f"{type(error).__name__}: {error}")
    os._exit(0)


def send_a_text():
    text = b"what nobody else may read " * 3
    proxies = put_between([0, 1])
    world = start()
    if rank == 1:
        world.send(np.frombuffer(text, "u1"), 0)
    else:
        got = np.empty(len(text), "u1")
        world.recv(got, 1)
        assert got.tobytes() == text
    world.barrier()
    for proxy in proxies:
        report(seen=text in proxy.sent)
    ss.finalize()


def use_each_call():
    """Of awkward lengths; the longest needs several data frames."""
    world = start()
    wrong = 0
    for call in CALLS.values():
        for n in (1, 3, 4091, 70_001, 300_000):
            found, right = call(world, n)
            wrong += int(np.count_nonzero(found != right))
            world.barrier()
    report(wrong=wrong)
    ss.finalize()


def start_without_libcrypto_on_rank_1():
    def encryption_library():
        raise ss.UnavailableError("no library")

    if rank == 1:
        _core.encryption_library = encryption_library
    try:
        start()
    except ss.Error as error:
        report(text=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))
