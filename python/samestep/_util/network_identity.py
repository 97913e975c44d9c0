"""Which network a process is in."""

from __future__ import annotations

import os


def network_identity() -> str:
    """A text that is the same in all processes that share the addresses of this one.

    It is the boot id (else the host's name) and the network. Containers of one machine with networks of their own
    have others.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except (FileNotFoundError, PermissionError):
        boot = os.uname().nodename
    try:
        network = os.readlink("/proc/self/ns/net")
    except (FileNotFoundError, PermissionError):
        network = ""
    return f"{boot}/{network}"
