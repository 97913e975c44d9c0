"""A Unix socket to a store for processes of the same user on this host; the kernel reports the user.

A port of the loopback interface can be reached by every user of the host. Beside such a port the store listens at a
Unix socket in the abstract namespace, named after the port: the kernel tells both ends which user the other is
(SO_PEERCRED), and the namespace is that of the network, so exactly the processes that reach the port reach the socket
else.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
import time

from samestep._util import users
from samestep._util.at_failure import at_failure
from samestep.errors import UnavailableError

_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group
_BACKLOG = 1024
_PAUSE_S = 0.002


def is_loopback(host: str) -> bool:
    """Whether `host` means this host alone, by its own name or address, without asking a name server.

    Example:
      >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "10.0.0.1", "node1")]
      [True, True, True, False, False]
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def user_of(link: socket.socket) -> int:
    """Number of the user at the other end of a Unix socket, as Linux reports it."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def listen(port: int) -> socket.socket:
    """Listens beside a port of this host. Raises UnavailableError if another process has the name."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_name(port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        why = "another process has taken the name" if taken else os.strerror(error.errno or 0)
        raise UnavailableError(
            f"cannot listen for processes of this user at port {port}: {why}; choose another port (MASTER_PORT, or in "
            "the URL), or give all ranks one SAMESTEP_SECRET"
        ) from error
    return listener


def connect(port: int, timeout: float) -> socket.socket:
    """Connects to the store of the same user beside a port.

    Raises ConnectionRefusedError if nobody listens there, UnavailableError if another user does, else an OSError.
    """
    deadline = time.monotonic() + timeout
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with at_failure(link.close):
        link.settimeout(timeout)
        connect_in_turn(link, _name(port), deadline)
        if not users.is_own(user := user_of(link)):
            raise UnavailableError(
                f"the store at port {port} of this host is another user's ({users.text(user)}); choose another port "
                "(MASTER_PORT, or in the URL)"
            )
    return link


def connect_in_turn(link: socket.socket, name: str | bytes, deadline: float) -> None:
    """Connects a Unix socket. While the listener's queue is full the kernel, unlike with TCP, does not wait for it."""
    while True:
        try:
            return link.connect(name)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)


def _name(port: int) -> str:
    return f"\0samestep-store-{port}"
