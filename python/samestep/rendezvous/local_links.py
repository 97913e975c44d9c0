"""The connections between the ranks of a host: Unix sockets, which carry descriptors of shared memory too.

The names of the sockets are not secret: every process of the host may connect. So both ends check the other's user
(SO_PEERCRED), and the connecting rank sends a random token that only the ranks know. Other connections are closed, with
any descriptors that they have sent; they do not delay the ranks, even if they are many and send nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator

from samestep._util import descriptors, users
from samestep._util.at_failure import at_failure
from samestep.errors import Error, PeerLostError, TimeoutError, UnavailableError
from samestep.rendezvous.same_user import connect_in_turn, user_of

_INTRODUCTION = struct.Struct("16s16s")  # what the ranks gather: name of the socket, token
_HELLO = struct.Struct("=16si")  # the first packet on a connection: token, rank
_ACCEPTS_PER_CHECK = 64  # connections between two checks of the deadline
_MAX_UNIDENTIFIED = 256  # connections of this user that have sent nothing
_POLL_MS = 20


class Listener:
    """Where this rank lets the others of its host in, from before it knows them.

    Attributes:
      introduction: what the others need to connect, for `connect_all` to exchange.

    Raises:
      UnavailableError: the system refuses a socket.
    """

    def __init__(self) -> None:
        self.socket = _new_socket()
        with at_failure(self.socket.close):
            with _what_failed("cannot listen"):
                self.socket.bind("")  # the kernel picks a name in the abstract namespace, which needs no file
                self.socket.listen(socket.SOMAXCONN)
            self.socket.setblocking(False)
            name, self.token = self.socket.getsockname()[1:], os.urandom(16)
            if len(name) > len(self.token):
                raise Error("the kernel's name of a socket is too long")
            self.introduction = _INTRODUCTION.pack(name, self.token)
        self._unidentified: list[socket.socket] = []  # of this user, without a token yet, the oldest first

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def let_all_in(
        self, rank: int, links: list[socket.socket | None], deadline: float, timeout: float
    ) -> None:
        """Accepts the connections of the ranks above `rank`, into `links`."""
        try:
            while True:
                missing = next((i for i in range(rank + 1, len(links)) if links[i] is None), None)
                if missing is None:
                    return
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {missing} of this host has not connected after {timeout:g} s")
                poll = select.poll()
                for link in (self.socket, *self._unidentified):
                    poll.register(link, select.POLLIN)
                poll.poll(_POLL_MS)
                # Only while a rank is missing: strangers may have used up the descriptors.
                self._accept(len(links))
                self._unidentified = [
                    link for link in self._unidentified if not self._identify(link, rank, links)
                ]
        finally:
            _close([*self._unidentified])

    def _accept(self, n_ranks: int) -> None:
        no_descriptors = False
        # Bounded, because a stranger may connect as fast as this rank accepts.
        for _ in range(_ACCEPTS_PER_CHECK):
            try:
                link, _address = self.socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                break
            except OSError as error:
                no_descriptors = descriptors.are_used_up(error)
                if not no_descriptors:
                    text = f"cannot accept a process of this host: {error.strerror} (errno {error.errno})"
                    raise UnavailableError(text) from error
                break
            # Connections of other users are closed at once, and cannot push out those of ranks.
            if users.is_own(user_of(link)):
                link.setblocking(True)
                self._unidentified.append(link)
            else:
                link.close()
        # Ranks send their token at once, so the oldest are not ranks.
        room = n_ranks + _MAX_UNIDENTIFIED
        if no_descriptors:
            if not self._unidentified:
                raise Error("cannot accept a process of this host: no descriptor is left; raise `ulimit -n`")
            room = len(self._unidentified) // 2
        n_too_many = max(0, len(self._unidentified) - room)
        _close([*self._unidentified[:n_too_many]])
        del self._unidentified[:n_too_many]

    def _identify(self, link: socket.socket, mine: int, links: list[socket.socket | None]) -> bool:
        """Whether the connection is known to be that of a rank, or not; False while it has sent nothing."""
        import hmac

        try:
            # Without room for descriptors, which the kernel then closes.
            packet = link.recv(_HELLO.size + 1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            packet = b""
        # Any process of this user can connect and send anything, so nothing in the packet is trusted before the token
        # is right.
        token, rank = _HELLO.unpack(packet) if len(packet) == _HELLO.size else (b"", -1)
        is_new = mine < rank < len(links) and links[rank] is None
        if is_new and hmac.compare_digest(token, self.token):  # in constant time
            links[rank] = link
        else:
            link.close()
        return True


def connect_all(
    rank: int,
    size: int,
    exchange: Callable[[bytes], list[bytes]],
    timeout: float,
    listener: Listener | None = None,
) -> list[socket.socket | None]:
    """Connects all pairs of ranks of a host; returns for each rank a socket, None for this one. Collective.

    Args:
      exchange: an allgather of bytes over these ranks, by the means of their launcher; called once.
      listener: of this rank; None for a new one.

    Raises:
      TimeoutError: a rank has not connected in time.
      UnavailableError: a process of another user listens at a rank's name, the system refuses a socket, or this user's
        number may be another's, too.
    """
    if not users.is_own(own := os.geteuid()):
        raise UnavailableError(f"the ranks of this host cannot prove whose they are ({users.text(own)})")
    descriptors.allow_for_ranks(size)
    deadline = time.monotonic() + timeout
    links: list[socket.socket | None] = [None] * size
    with listener or Listener() as own_listener, at_failure(lambda: _close(links)):
        everybody = _introduce(own_listener.introduction, size, exchange)
        # Each rank connects to those below it and accepts those above. Rank 0 only accepts, so that full queues, in
        # which others wait for room, are emptied from there upwards.
        for peer, (name, token_of_peer) in enumerate(everybody[:rank]):
            links[peer] = link = _connect(name.rstrip(b"\0"), deadline, timeout)
            with _what_failed("cannot send to a process of this host"):
                link.send(_HELLO.pack(token_of_peer, rank))
        own_listener.let_all_in(rank, links, deadline, timeout)
    return links


def _introduce(mine: bytes, size: int, exchange: Callable[[bytes], list[bytes]]) -> list[tuple[bytes, bytes]]:
    everybody: list[tuple[bytes, bytes]] = []
    for words in exchange(mine):
        if len(words) != len(mine):
            raise Error(f"rank {len(everybody)} runs another version of samestep")
        name, token = _INTRODUCTION.unpack(words)
        everybody.append((name, token))
    if len(everybody) != size:
        raise Error("the ranks of this host do not agree on their number")
    return everybody


@contextlib.contextmanager
def _what_failed(action: str) -> Iterator[None]:
    try:
        yield
    except (BrokenPipeError, ConnectionResetError):
        raise PeerLostError("the process at the other end has ended") from None
    except OSError as error:
        raise UnavailableError(f"{action}: {descriptors.reason(error)} (errno {error.errno})") from error


def _new_socket() -> socket.socket:
    # Packets keep their borders, so that a descriptor arrives together with the bytes that describe it.
    with _what_failed("cannot make a socket"):
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _close(links: list[socket.socket | None]) -> None:
    for link in links:
        if link is not None:
            link.close()


def _connect(name: bytes, deadline: float, timeout: float) -> socket.socket:
    link = _new_socket()
    with at_failure(link.close):
        link.setblocking(False)
        try:
            with _what_failed("cannot connect to a process of this host"):
                connect_in_turn(link, b"\0" + name, deadline)
        except UnavailableError as error:
            if not isinstance(error.__cause__, BlockingIOError):
                raise
            raise TimeoutError(
                f"a process of this host has had no room for a connection for {timeout:g} s: other processes "
                "fill its queue"
            ) from None
        # The kernel recorded the user when the other process began to listen. Names of this namespace belong to nobody,
        # so another user may listen at one that a rank has left.
        if not users.is_own(user := user_of(link)):
            raise UnavailableError(
                f"where a rank of this host should listen is a process of another user ({users.text(user)}); all ranks "
                "have to run as one user"
            )
        link.setblocking(True)  # sending waits for room
    return link
