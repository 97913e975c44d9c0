"""Which network a process is in, and its addresses there."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import socket
import struct

_SIOCGIFADDR = 0x8915


def network_identity() -> str:
    """A text that is the same in all processes that share the addresses of this one.

    It is the boot id (else the host's name) and the network. Containers of one machine with networks of their own
    have others.
    """
    try:
        network = os.readlink("/proc/self/ns/net")
    except (FileNotFoundError, PermissionError):
        network = ""
    return f"{_boot_id() or os.uname().nodename}/{network}"


@functools.cache  # of the kernel that runs; groups are opened by the hundred
def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except (FileNotFoundError, PermissionError):
        return ""


def ipv4_addresses(interface: str) -> list[str]:
    """The IPv4 address of a network interface of this host, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return [socket.inet_ntoa(answer[20:24])]
    return []
