"""The addresses at which agents reach their launcher."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterable

from samestep._util.network_identity import ipv4_addresses

_PORTS_TO_TRY = 64
_BATCH_VARIABLES = (
    "SLURM_JOB_ID",
    "PBS_NODEFILE",
    "LSB_JOBID",
    "PE_HOSTFILE",
    "COBALT_NODEFILE",
    "PRTE_DEFAULT_HOSTFILE",
)


def is_name_of_this_host(name: str) -> bool:
    """Whether `name` means this host without asking a name server, and may not mean it on others."""
    own = socket.gethostname()
    return name in ("localhost", "127.0.0.1", own, own.partition(".")[0])


def is_this_host(name: str) -> bool:
    """Whether `name` means this host without asking a name server: a name or an address of it."""
    return is_name_of_this_host(name) or name in addresses()


def may_leave_host(hosts: Iterable[str]) -> bool:
    """Whether ranks may start on other hosts: `hosts` names one, or a batch system may have allotted some."""
    names = list(hosts)
    if names:
        return not all(map(is_this_host, names))
    return any(name in os.environ for name in _BATCH_VARIABLES)


def listen(*, everywhere: bool, port: int = 0) -> tuple[socket.socket, list[str]]:
    """A listening socket on a port (0: a free one), of this host alone or of all interfaces, and its addresses."""
    server = socket.create_server(("" if everywhere else "127.0.0.1", port), backlog=1024)
    outside = [address for address in addresses() if not address.startswith("127.")]
    return server, outside if everywhere else []


def reserve_port() -> socket.socket:
    """A socket bound to a free TCP port, which reserves it, except from servers that reuse addresses, as most do.

    Outside the range that the kernel chooses from, if possible. Otherwise an outgoing connection may take the port
    before the rank that needs it has started.
    """
    for port in [*random.sample(_ports_of_servers(), k=_PORTS_TO_TRY), 0]:
        holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            holder.bind(("", port))
            # After bind: not beside another holder.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return holder
        except OSError:
            holder.close()
            if port == 0:
                raise
    raise AssertionError("port 0 was tried last")


def _ports_of_servers() -> range:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            first = int(file.read().split()[0])
    except (OSError, ValueError):
        first = 32768
    return range(20000, first) if first >= 20000 + _PORTS_TO_TRY else range(1024, 65536)


def loopback_is_up() -> bool:
    """Whether processes of this host reach each other at 127.0.0.1: in a new network namespace they do not."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("127.0.0.1", 9))  # sends nothing
        except OSError:
            return False
    return True


def addresses() -> list[str]:
    """The IPv4 addresses of this host's interfaces."""
    return [address for _, name in socket.if_nameindex() for address in ipv4_addresses(name)]
