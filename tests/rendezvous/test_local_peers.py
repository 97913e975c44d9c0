"""Ranks of one host connect among strangers, who know the names of their sockets."""

import contextlib
import itertools
import os
import resource
import socket
import threading
import time

import pytest
import samestep as ss
from ranks import on_ranks
from samestep import _core
from samestep.rendezvous import local_links
from strangers import Stranger, needs_root

# JAX warns of a fork where another test has imported it.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")

PATIENCE_S = 60.0
N_SILENT = 40


class Room:
    """An exchange for threads; the first one ends when `between` has acted on what was said."""

    def __init__(self, size, between=lambda said: None):
        self.said = [b""] * size
        self.n_exchanges = 0
        self._between = between
        self._barrier = threading.Barrier(size, action=self._act)

    def _act(self):
        self.n_exchanges += 1
        if self.n_exchanges == 1:
            self._between(self.said)

    def exchange_of(self, rank):
        def exchange(mine):
            self.said[rank] = mine
            self._barrier.wait(PATIENCE_S)
            found = list(self.said)
            self._barrier.wait(PATIENCE_S)
            return found

        return exchange


def connect(room, rank, size, timeout=PATIENCE_S):
    links = local_links.connect_all(rank, size, room.exchange_of(rank), timeout)
    probes = [_core.probe_address()] * size
    return _core.open_local_peers(
        rank, [-1 if link is None else link.detach() for link in links], probes, timeout, timeout
    )


def name_of(introduction):
    return "\0" + introduction[:16].rstrip(b"\0").decode("latin-1")


def crowd(receive, tell):
    """Connect many times to each name that it receives, and sends nothing, too little, or descriptors."""
    import array

    links = []
    while (names := receive()) is not None:
        for name in names:
            for i in range(N_SILENT):
                link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                link.connect("\0" + name)
                links.append(link)
                try:
                    if i % 4 == 1:
                        link.send(b"x" * 10)
                    elif i % 4:
                        numbers = array.array("i", [0] * (i % 4 + 1))
                        link.sendmsg([b"x" * 20], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)])
                except OSError:  # disconnected already
                    pass
        tell(len(links))


@pytest.mark.parametrize("user", ["another", "same"])
@pytest.mark.parametrize("size", [2, 3])
def test_strangers_hold_up_nobody(user, size):
    if user == "another" and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with Stranger(crowd, *([None] if user == "same" else [])) as stranger:

        def come(said):
            stranger.say([name_of(mine)[1:] for mine in said])
            assert stranger.receive() == N_SILENT * size

        room = Room(size, come)
        before = len(os.listdir("/proc/self/fd"))
        begin = time.monotonic()
        found = on_ranks(size, lambda rank: connect(room, rank, size))
        assert time.monotonic() - begin < 5  # one silent connection alone needed as long once
        assert [type(host).__name__ for host in found] == ["LocalPeers"] * size
        del found
        assert len(os.listdir("/proc/self/fd")) == before


def test_strangers_do_not_use_up_the_descriptors():
    def fill(receive, tell):
        name, links = receive(), []
        for _ in range(N_SILENT):
            links.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            links[-1].connect("\0" + name)
        tell(len(links))
        receive()

    with Stranger(fill, user=None) as stranger:

        def come(said):
            stranger.say(name_of(said[0])[1:])
            assert stranger.receive() == N_SILENT
            taken = set(map(int, os.listdir("/proc/self/fd")))
            free = (n for n in itertools.count() if n not in taken)
            resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, 10, None)), hard))

        room = Room(2, come)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            found = on_ranks(2, lambda rank: connect(room, rank, 2))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [type(host).__name__ for host in found] == ["LocalPeers"] * 2, found


def test_a_rank_that_misses_nobody_accepts_nobody():
    """Its process may have no descriptor left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with local_links.Listener() as listener, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(listener.socket.getsockname())
        resource.setrlimit(resource.RLIMIT_NOFILE, (stranger.fileno() + 1, hard))
        try:
            listener.let_all_in(1, [None, None], time.monotonic() + PATIENCE_S, PATIENCE_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_deadline_is_looked_at_while_strangers_come():
    def flood(receive, tell):
        name = receive()
        tell(True)
        while True:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                link.connect("\0" + name)
            except OSError:
                return

    with Stranger(flood, user=None) as stranger:

        def come(said):
            stranger.say(name_of(said[0])[1:])
            assert stranger.receive()

        room = Room(2, come)

        def act(rank):
            if rank == 0:
                return connect(room, 0, 2, timeout=0.5)
            return room.exchange_of(1)(room.said[0] or bytes(32))  # and stops there

        begin = time.monotonic()
        found, _ = on_ranks(2, act)
        assert isinstance(found, ss.TimeoutError)
        assert "rank 1 of this host has not connected after 0.5 s" in str(found)
        assert time.monotonic() - begin < 10


@needs_root
def test_a_socket_of_another_user_in_a_ranks_place_is_refused():
    def listen(receive, tell):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("")
            listener.listen()
            tell(listener.getsockname()[1:].decode())
            receive()

    with Stranger(listen) as stranger:
        name = stranger.receive().encode()

        def lie(said):
            said[0] = name.ljust(16, b"\0") + said[0][16:]

        room = Room(2, lie)
        found = on_ranks(2, lambda rank: connect(room, rank, 2, timeout=1 if rank == 0 else PATIENCE_S))
        assert isinstance(found[1], ss.UnavailableError)
        assert "is a process of another user (uid 65534); all ranks have to run as one user" in str(found[1])
        assert isinstance(found[0], ss.TimeoutError)


def test_a_rank_that_finds_the_queue_full_waits_until_the_deadline():
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, contextlib.ExitStack() as before:
        listener.bind("")
        listener.listen(0)
        name = listener.getsockname()
        with contextlib.suppress(BlockingIOError):
            while True:
                link = before.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                link.setblocking(False)
                link.connect(name)

        def lie(said):
            said[0] = name[1:].ljust(16, b"\0") + said[0][16:]

        room = Room(2, lie)
        for error in on_ranks(2, lambda rank: connect(room, rank, 2, timeout=0.2)):
            assert isinstance(error, ss.TimeoutError)
        assert "no room for a connection for 0.2 s: other processes fill its queue" in str(error)


@pytest.mark.parametrize("words", [b"", b"x" * 31, b"x" * 33])
def test_an_introduction_of_another_length_is_reported(words):
    def lie(said):
        said[1] = words

    room = Room(2, lie)
    for error in on_ranks(2, lambda rank: connect(room, rank, 2, timeout=1)):
        assert "rank 1 runs another version of samestep" in str(error)
