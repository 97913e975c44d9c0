"""How an agent learns its rank and finds its launcher."""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from samestep import _settings
from samestep._util import handshake, silence
from samestep._util.frames import Channel
from samestep._util.network_identity import network_identity
from samestep.launch import frames, network

BOOTSTRAP = _settings.LAUNCH
"""Variable that tells agents where their launcher listens: JSON with `host`, `network`, `addresses`, `port`, `token`.

Where no `mpirun` starts the agents, also with `ranks`, for each of which there is to be one, and `size`; -1 and `own`
for ranks that join a job, see `join`.
"""

FROM_STDIN = "-"
"""Its value where the JSON is the first line to read."""

_CONNECT_TIMEOUT_S = 10.0
_GREETING_TIMEOUT_S = 600.0  # a launcher that was stopped (Ctrl-Z) answers when it goes on
_LARGEST_FRAME = 1 << 24
_CURE = (
    "its launcher says at its start by which address others join; both need the same SAMESTEP_SECRET, --secret-file or "
    "~/.config/samestep/secret"
)
_RANK_VARIABLES = (  # of Open MPI, of MPICH and its family, of PALS
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PALS_RANKID", "PALS_SIZE"),
)


def connect(bootstrap: dict[str, Any]) -> tuple[socket.socket, Channel]:
    """A connection to the launcher, by the first of its addresses that answers, and the frames on it.

    An address that this host has itself, such as that of a bridge for containers, leads to no other host.

    Raises:
      SystemExit: none does; the text names all that were tried.
    """
    host = socket.gethostname()
    is_here = bootstrap["network"] == network_identity()
    joins = "own" in bootstrap
    own = [] if is_here or joins else network.addresses()
    tried = []
    for address in ["127.0.0.1"] if is_here else bootstrap["addresses"]:
        place = f"{address}:{bootstrap['port']}"
        if address in own:
            tried.append(f"{place} (an address of this host itself)")
            continue
        try:
            link = socket.create_connection((address, bootstrap["port"]), timeout=_CONNECT_TIMEOUT_S)
            silence.notice_silence(link)
            return link, _greet(
                link, bootstrap["token"], _CONNECT_TIMEOUT_S if joins else _GREETING_TIMEOUT_S
            )
        except (OSError, ValueError) as error:
            if joins:
                raise SystemExit(f"samestep: cannot join the job at {place}: {error}; {_CURE}") from None
            tried.append(f"{place} ({error})")
    raise SystemExit(
        f"samestep: a rank on {host} cannot reach its launcher on {bootstrap['host']} at "
        f"{', '.join(tried) or 'any address'}. Let the hosts connect to each other, or start the ranks with "
        "mpirun itself."
    )


def _greet(link: socket.socket, token: str, seconds: float = _GREETING_TIMEOUT_S) -> Channel:
    """Proves to the launcher that this is one of its agents, after it has proved to be the launcher."""
    link.settimeout(seconds)
    try:
        ours = handshake.Client(
            handshake.AGENT, token.encode(), handshake.place(link.getpeername(), link.getsockname())
        )
        handshake.greet(link, ours)
        return ours.channel(most=_LARGEST_FRAME, readable=frames.READABLE)
    except BaseException as error:
        link.close()
        if isinstance(error, TimeoutError):
            raise SystemExit(
                f"samestep: the launcher has not answered for {seconds:g} s; was it stopped?"
            ) from None
        raise


def read_bootstrap() -> dict[str, Any]:
    """What the launcher says."""
    text = os.environ[BOOTSTRAP]
    if text == FROM_STDIN:
        text = os.environ[BOOTSTRAP] = sys.stdin.readline()
    found: dict[str, Any] = json.loads(text)
    return found


def rank_and_size(bootstrap: dict[str, Any]) -> dict[str, int]:
    """`rank` and `size` of this process, from the launcher, or from `mpirun`. Raises SystemExit if neither says."""
    if "rank" in bootstrap:
        return {"rank": bootstrap["rank"], "size": bootstrap["size"]}
    for rank, size in _RANK_VARIABLES:
        if rank in os.environ:
            return {"rank": int(os.environ[rank]), "size": int(os.environ.get(size, "1"))}
    wanted = ", ".join(rank for rank, _ in _RANK_VARIABLES)
    raise SystemExit(
        f"samestep: the mpirun that started this sets none of {wanted}. Start the ranks with it directly."
    )
