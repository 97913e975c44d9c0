"""The address by which the other ranks reach this one."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping
from pathlib import Path

from samestep import _settings
from samestep._util.network_identity import ipv4_addresses
from samestep.errors import InvalidArgumentError, UnavailableError

_OF_GLOO = "GLOO_SOCKET_IFNAME"
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # of documentation: nothing is sent there, only the route is asked


def check_names(env: Mapping[str, str]) -> tuple[str, list[str]]:
    """The variable by which the user names network interfaces, and the names; empty where there are none.

    Raises:
      InvalidArgumentError: names the one that does not exist, and those that do.
    """
    variable, text = _settings.SOCKET_IFNAME, _settings.get(_settings.SOCKET_IFNAME, env)
    if not text:
        variable, text = _OF_GLOO, env.get(_OF_GLOO)
    if not text:
        return "", []
    existing = [name for _, name in socket.if_nameindex()]
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in existing:
            raise InvalidArgumentError(
                f"{variable} names the interface {name!r}, but there are {', '.join(existing)}"
            )
    return variable, names


def own_address(master: str, env: Mapping[str, str], *, several_hosts: bool) -> str:
    """The address at which this rank listens.

    Args:
      master: name or address of rank 0's host; empty if not known.
      env: the interfaces that `SAMESTEP_SOCKET_IFNAME`, else `GLOO_SOCKET_IFNAME`, names are taken before the
        one that leads to the master.
      several_hosts: ranks of other hosts have to reach it.

    Raises:
      InvalidArgumentError: an interface that does not exist, or all that are named have no address.
      UnavailableError: there is no route to the master.

    Example:
      >>> own_address("127.0.0.1", {}, several_hosts=False)
      '127.0.0.1'
    """
    variable, names = check_names(env)
    found = [address for name in names for address in addresses(name)]
    if names and not found:
        raise InvalidArgumentError(f"{variable} names {', '.join(names)}: no address there")
    if found:
        version = 6 if ":" in master else 4
        return min(found, key=lambda address: ipaddress.ip_address(address).version != version)
    address = _source_toward(master) if master else ("" if several_hosts else "127.0.0.1")
    if several_hosts and (not address or ipaddress.ip_address(address).is_loopback):
        # The name of a host often means an address that only the host itself can reach.
        return _outward() or address
    if not address:
        raise UnavailableError(
            f"there is no route to {master}, the host of rank 0; MASTER_ADDR, or the URL, must name it, or "
            "SAMESTEP_SOCKET_IFNAME the interface to use"
        )
    return address


def addresses(interface: str) -> list[str]:
    """IPv4 and IPv6 addresses of an interface, without those that are good for one cable only."""
    found = ipv4_addresses(interface)
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if name == interface and scope != "20":
                found.append(str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return found


def of_address(address: str) -> str:
    """The interface that has an address; empty where none has.

    Example:
      >>> of_address("127.0.0.1")
      'lo'
    """
    return next((name for _, name in socket.if_nameindex() if address in addresses(name)), "")


def _source_toward(host: str) -> str:
    """This host's address on the route to another host; empty without a route."""
    with contextlib.suppress(OSError):
        for family, kind, number, _, where in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, number) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
    return ""


def _outward() -> str:
    """An address of this host that others can reach, if there is one."""
    sources = [_source_toward(elsewhere) for elsewhere in _ELSEWHERE]
    everything = [address for _, name in socket.if_nameindex() for address in addresses(name)]
    for address in [*sources, *everything]:
        if address and not ipaddress.ip_address(address).is_loopback:
            return address
    return ""
