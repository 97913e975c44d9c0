"""Which ranks share a host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from samestep import _settings
from samestep._util.network_identity import network_identity


def host_identity() -> str:
    """A text that is the same in all processes of one host, and in no others.

    The host's name, boot id and network; containers of one machine with names or networks of their own
    count as hosts.
    """
    return f"{os.uname().nodename}/{network_identity()}/{_settings.get(_settings.HOST_ID) or ''}"


@dataclass(frozen=True)
class RankLocation:
    """Where one rank of a group runs. Hosts are numbered in the order of their first rank."""

    local_rank: int
    local_size: int
    node_rank: int
    node_count: int


def locate(hosts: list[str], rank: int) -> RankLocation:
    """Where `rank` runs, given every rank's host.

    Example:
      >>> locate(["a", "b", "a"], 2)
      RankLocation(local_rank=1, local_size=2, node_rank=0, node_count=2)
    """
    mine = [r for r, host in enumerate(hosts) if host == hosts[rank]]
    order = list(dict.fromkeys(hosts))
    return RankLocation(mine.index(rank), len(mine), order.index(hosts[rank]), len(order))


def oversubscribed(affinities: Sequence[Sequence[int]], usable_cpus: int) -> bool:
    """Whether a host has more ranks than CPUs that they may use.

    Args:
      affinities: of each rank of the host, the CPUs it may run on.
      usable_cpus: what this process may use, affinity and control group taken together.

    Example:
      >>> oversubscribed([[0, 1], [0, 1]], usable_cpus=2), oversubscribed([[0], [0]], usable_cpus=1)
      (False, True)
    """
    return len(affinities) > min(len(set().union(*affinities)), max(usable_cpus, len(affinities[0])))
