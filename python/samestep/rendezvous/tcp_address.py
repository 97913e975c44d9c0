"""Hosts and ports as users write them, and the socket on which rank 0 listens."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

from samestep.errors import InvalidArgumentError, UnavailableError

_BACKLOG = 1024
_ALL_INTERFACES = ""


def address_text(host: str, port: int) -> str:
    """Example: address_text("::1", 80) is "[::1]:80", and an empty host reads "*"."""
    return f"[{host}]:{port}" if ":" in host else f"{host or '*'}:{port}"


def check_address(host: str, port: int) -> None:
    """Raises InvalidArgumentError where no store can ever be: a multicast address, a port outside 0 to 65535."""
    if not 0 <= port <= 65535:
        raise InvalidArgumentError(f"port {port} is outside 0 to 65535")
    address = _literal(host)
    if address is not None and address.is_multicast:
        raise InvalidArgumentError(f"{host} is a multicast address; give the address of rank 0's host")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket for a store.

    An address is taken as it is, and "localhost" too; a name stands for all interfaces, because the name of a host
    often means an internal address on the host itself. So does an empty `host`.

    Raises:
      InvalidArgumentError: as `check_address`.
      UnavailableError: the port is taken, or not to be had here; says host, port and the cure.
    """
    check_address(host, port)
    address = _literal("127.0.0.1" if host == "localhost" else host)
    try:
        if address is not None:
            family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
            return socket.create_server((str(address), port), family=family, backlog=_BACKLOG)
        if socket.has_dualstack_ipv6():
            everywhere = (_ALL_INTERFACES, port)
            return socket.create_server(
                everywhere, family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
            )
        return socket.create_server((_ALL_INTERFACES, port), backlog=_BACKLOG)
    except OSError as error:
        raise UnavailableError(f"cannot listen at {address_text(host, port)}: {_cure(error)}") from error


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _cure(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is taken by another program or job; choose another one (MASTER_PORT, or in the URL)"
    if error.errno == errno.EADDRNOTAVAIL:
        return "that is not an address of this host; MASTER_ADDR, or the URL, must name the host of rank 0"
    return f"{os.strerror(error.errno or 0)}; choose another address or port (MASTER_ADDR, MASTER_PORT, or the URL)"
