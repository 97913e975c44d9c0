"""The placement of ranks on hosts, and their environments. Pure: no host is contacted, nothing is started."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from samestep import _settings

_FOR_OTHER_HOSTS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
# They choose code: other bits.
_OF_MATHS = ("OPENBLAS_", "MKL_", "BLIS_", "NPY_", "ATEN_", "DNNL_", "ONEDNN_", "CUBLAS_", "XLA_")
_PREFIXES_FOR_OTHER_HOSTS = ("SAMESTEP_", "NCCL_", "OMP_", *_OF_MATHS)


@dataclass(frozen=True)
class HostSlots:
    """A host and the number of ranks on it."""

    name: str
    n_ranks: int


@dataclass(frozen=True)
class Place:
    """Where a rank is: its number among the ranks of its host, their number, and the host's number."""

    rank: int
    n_ranks: int
    local_rank: int
    local_size: int
    node_rank: int
    host: str


def parse_hosts(text: str) -> tuple[HostSlots, ...]:
    """Reads "a:2,b:1"; a host without a number gets one rank.

    Raises:
      ValueError: a name is empty or occurs twice, or a number is not a whole number above 0.

    Example:
      >>> parse_hosts("a:2,b")
      (HostSlots(name='a', n_ranks=2), HostSlots(name='b', n_ranks=1))
    """
    hosts: list[HostSlots] = []
    for part in text.split(","):
        name, colon, count = part.strip().partition(":")
        if not name:
            raise ValueError(f"an empty host name in {text!r}; write it as a:2,b:2")
        if colon and not (count.isascii() and count.isdigit() and int(count) > 0):
            raise ValueError(
                f"{part.strip()!r} asks for {count!r} ranks, which is not a whole number above 0"
            )
        if name in (host.name for host in hosts):
            raise ValueError(f"host {name} occurs twice in {text!r}")
        hosts.append(HostSlots(name, int(count) if colon else 1))
    return tuple(hosts)


def parse_hostfile(text: str) -> tuple[HostSlots, ...]:
    """Reads a file of hosts: `name`, `name slots=2` or `name:2` on a line; a name on two lines has two ranks.

    That is the format of MPI's hostfiles, and of the lists that PBS (`PBS_NODEFILE`) and LSF (`LSB_DJOB_HOSTFILE`)
    write. What follows a `#` is a comment.

    Raises:
      ValueError: a number is not a whole number above 0, or there is no host.

    Example:
      >>> parse_hostfile("a\\na\\nb slots=3  # the other one")
      (HostSlots(name='a', n_ranks=2), HostSlots(name='b', n_ranks=3))
    """
    n_ranks: Counter[str] = Counter()
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = [word.partition("=")[2] for word in words[1:] if word.startswith("slots=")]
        (host,) = parse_hosts(":".join([words[0], *slots[:1]]))
        n_ranks[host.name] += host.n_ranks
    if not n_ranks:
        raise ValueError("it names no host")
    return tuple(HostSlots(name, n) for name, n in n_ranks.items())


def places(host_of_rank: Sequence[str]) -> list[Place]:
    """The places of ranks whose hosts are known, in rank order; hosts are numbered by their lowest rank.

    Example:
      >>> [(p.node_rank, p.local_rank, p.local_size) for p in places(["a", "a", "b"])]
      [(0, 0, 2), (0, 1, 2), (1, 0, 1)]
    """
    n_ranks = len(host_of_rank)
    local_size = Counter(host_of_rank)
    node_rank = {host: node for node, host in enumerate(local_size)}
    seen: Counter[str] = Counter()
    found = []
    for rank, host in enumerate(host_of_rank):
        found.append(Place(rank, n_ranks, seen[host], local_size[host], node_rank[host], host))
        seen[host] += 1
    return found


def on_node(here: Sequence[Place], node_rank: int, n_nodes: int) -> list[Place]:
    """The same places as part of a job of `n_nodes` runs with as many ranks each, of which this is one.

    Example:
      >>> [(p.rank, p.n_ranks, p.local_rank, p.node_rank) for p in on_node(places(["a", "a"]), 1, 3)]
      [(2, 6, 0, 1), (3, 6, 1, 1)]
    """
    n = len(here)
    return [
        replace(place, rank=node_rank * n + place.rank, n_ranks=n_nodes * n, node_rank=node_rank)
        for place in here
    ]


def environment(
    place: Place, *, launcher: str, master_addr: str, master_port: int, secret: str
) -> dict[str, str]:
    """The variables that a rank gets on top of those it inherits, by the names that torchrun made common.

    `launcher` names the program that sets them; "" if MPI's launcher starts the ranks. The secret admits only ranks of
    this job to the rendezvous; "" for no secret. How many threads a rank gets is decided on its host: see `_util.cpus`.
    """
    variables = {
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "WORLD_SIZE": str(place.n_ranks),
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "GROUP_RANK": str(place.node_rank),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # of a torchrun around: it does not listen at this port
    }
    if launcher:
        variables[_settings.LAUNCHER] = launcher
    if secret:
        variables[_settings.SECRET] = secret
    return variables


def of_new_job(
    host_of_rank: Sequence[str], *, launcher: str, master_addr: str, master_port: int
) -> list[dict[str, str]]:
    """The `environment` of each rank of a job on these hosts, which has a secret of its own."""
    secret = secrets.token_hex(16)
    return [
        environment(place, launcher=launcher, master_addr=master_addr, master_port=master_port, secret=secret)
        for place in places(host_of_rank)
    ]


def for_other_hosts(env: Mapping[str, str], *, paths: bool = True) -> dict[str, str]:
    """The variables of `env` that ranks on other hosts need to find the same settings and, by `paths`, programs."""
    return {
        name: value
        for name, value in env.items()
        if (paths and name in _FOR_OTHER_HOSTS) or name.startswith(_PREFIXES_FOR_OTHER_HOSTS)
    }
