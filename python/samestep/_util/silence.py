"""Connections whose other host says nothing any more: it has no power, or no line."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping

from samestep import _settings
from samestep._util.deadline import seconds
from samestep.errors import InvalidArgumentError

_LEAST_S, _MOST_S = 2, 3600
_TCP_INFO = struct.Struct("=8B13I")


def patience(env: Mapping[str, str] = os.environ) -> float:
    """How long another host may be silent until its ranks are given up, in seconds.

    Raises:
      InvalidArgumentError: `SAMESTEP_HEARTBEAT` has an impossible value.

    Example:
      >>> patience({}), patience({"SAMESTEP_HEARTBEAT": "2.5"})
      (8.0, 2.5)
    """
    text = _settings.get(_settings.HEARTBEAT, env) or _settings.SETTINGS[_settings.HEARTBEAT].default
    found = seconds(text, _settings.HEARTBEAT)
    if not _LEAST_S <= found <= _MOST_S:
        raise InvalidArgumentError(
            f"{_settings.HEARTBEAT} must be {_LEAST_S} to {_MOST_S} seconds, got {text}"
        )
    return found


def of_launcher() -> float:
    """The patience of launchers, agents and stores, which have to know first: shorter than that between ranks."""
    return patience() * 7 / 8


def notice_silence(link: socket.socket) -> None:
    """Let the kernel end an idle connection whose other host is silent for the time `of_launcher`."""
    whole = max(2, int(of_launcher()))
    idle, interval = max(1, 3 * whole // 7), max(1, whole // 7)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (whole - idle) // interval)


def is_silent(link: socket.socket) -> bool:
    """Whether the other host has been silent so long about what was sent: for a while no keep-alive is sent then.

    Not TCP_USER_TIMEOUT: it also ends connections to a process that does not read, though its host answers.
    """
    if link.family == socket.AF_UNIX:
        return False
    info = _TCP_INFO.unpack(link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    n_retransmits, n_probes, n_unacknowledged, last_ack_ms = info[2], info[3], info[12], info[20]
    return bool(
        last_ack_ms >= 1e3 * of_launcher() and ((n_unacknowledged > 0 and n_retransmits > 1) or n_probes > 1)
    )
