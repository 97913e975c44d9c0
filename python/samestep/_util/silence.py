"""Connections whose other host says nothing any more: it has no power, or no line."""

from __future__ import annotations

import socket
import struct

_PATIENCE_MS = 7000
_TCP_INFO = struct.Struct("=8B13I")


def notice_silence(link: socket.socket) -> None:
    """Let the kernel end an idle connection whose other host is silent for 7 s, before those of ranks time out."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, number in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), number)


def is_silent(link: socket.socket) -> bool:
    """Whether the other host has been silent for 7 s about what was sent: for a while no keep-alive is sent then.

    Not TCP_USER_TIMEOUT: it also ends connections to a process that does not read, though its host answers.
    """
    if link.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
        return False
    info = _TCP_INFO.unpack(link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    n_retransmits, n_probes, n_unacknowledged, last_ack_ms = info[2], info[3], info[12], info[20]
    return bool(
        last_ack_ms >= _PATIENCE_MS and ((n_unacknowledged > 0 and n_retransmits > 1) or n_probes > 1)
    )
