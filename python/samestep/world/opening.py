"""What ranks tell each other before they open a group, and what they open it by."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import NamedTuple

from samestep import _core
from samestep._util.cpus import usable_cpus
from samestep._util.json_layout import Many, Map
from samestep._util.text import warn
from samestep.backend import Backend
from samestep.group import hosts, trust
from samestep.world import transports


class RankFacts(NamedTuple):
    """What one rank says of itself, for all to know."""

    host: str
    cpus: list[int]
    asked: dict[str, str]
    trusts: bool


FACTS = [str, Many(int), Map(str), bool]
"""The layout of `RankFacts`."""


class Opened(NamedTuple):
    """A communicator of ranks that have met, whatever the world of this process is."""

    comm: _core.Communicator
    bootstrap_comm: _core.Communicator | None
    """What it was made from; it has to live as long."""
    hosts: list[str]
    """Of each rank."""
    trusted: bool
    """Whether the ranks take objects from each other."""

    def as_backend(self, made: type[Backend], timeout: float, device: int | None = None) -> Backend:
        """The group, as users have it."""
        return made(
            self.comm,
            timeout=timeout,
            device=device,
            world_hosts=self.hosts,
            bootstrap_comm=self.bootstrap_comm,
            trusted=self.trusted,
        )


def own_facts(proved: bool) -> RankFacts:
    """Those of this rank; `proved` as in `trust.trusts`."""
    cpus = sorted(os.sched_getaffinity(0))
    return RankFacts(hosts.host_identity(), cpus, transports.local_settings(), trust.trusts(proved))


def open_over(
    comm: _core.Communicator,
    backend: str,
    table: Sequence[RankFacts],
    timeout: float,
    *,
    proved: bool = False,
    of_devices: str = "native",
) -> Opened:
    """Select the transport between the ranks of `comm`, configure it, and decide whether they trust each other.

    Collective; rank 0 warns, once a process, of ranks that do not trust each other. Raises as `select_transport`.

    Args:
      table: the facts of each rank.
      proved: the ranks have proved to each other that they belong to one job, the same on all.
      of_devices: the backend of device arrays.
    """
    everywhere, rank = [facts.host for facts in table], comm.rank
    asked = [facts.asked for facts in table]
    transports.refuse_unencrypted([of_devices, backend], asked, everywhere)
    made, bootstrap_comm = transports.select_transport(comm, backend, asked, everywhere, timeout)
    same_host = [facts.cpus for facts in table if facts.host == everywhere[rank]]
    made.configure(oversubscribed=hosts.oversubscribed(same_host, usable_cpus()))
    trusted = proved or all(facts.trusts for facts in table)
    if not trusted and rank == 0:
        _warn_once()
    return Opened(made, bootstrap_comm, everywhere, trusted)


@functools.cache
def _warn_once() -> None:
    warn(trust.warning())
