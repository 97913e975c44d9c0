"""The number of this node in its job, from the variables that cluster systems set in each container."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Nodes:
    """The part of the command line that a cluster system, `system`, provides; None = unknown.

    The ranks meet at `master_port`, and there are `n_ranks` on each node.
    """

    system: str
    n_nodes: int
    node_rank: int
    master_addr: str
    master_port: int | None = None
    n_ranks: int | None = None


def nodes(env: Mapping[str, str], hostname: str, n_nodes: int | None = None) -> Nodes | None:
    """The nodes of the job that this process is in, or None. Pure. A ValueError names the variable that cannot be used.

    `hostname` has its domain; `n_nodes` is from the command line, for an indexed Job of Kubernetes does not say it.

    Example:
      >>> nodes({"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2"}, "algo-2")
      Nodes(system='SageMaker', n_nodes=2, node_rank=1, master_addr='algo-1', master_port=None, n_ranks=None)
    """
    for variables, read in _SYSTEMS:
        if all(env.get(name) for name in variables):
            found = read(env, hostname, n_nodes)
            if found is not None and not 0 <= found.node_rank < found.n_nodes:
                raise ValueError(
                    f"{variables[0]}: node {found.node_rank} is outside the {found.n_nodes} nodes"
                )
            return found
    return None


def _torchrun(env: Mapping[str, str], hostname: str, n_nodes: int | None) -> Nodes | None:
    """torchrun's flags as `PET_*` variables, as Kubeflow Trainer sets them."""
    least, _, most = env["PET_NNODES"].partition(":")
    if most and least != most:
        raise ValueError(
            f"PET_NNODES={env['PET_NNODES']}: the number of nodes cannot change while a job runs"
        )
    n_ranks = env.get("PET_NPROC_PER_NODE", "")
    if n_ranks and not n_ranks.isdecimal():
        if n_ranks not in ("auto", "cpu", "gpu"):
            raise ValueError(f"PET_NPROC_PER_NODE={n_ranks} is not a number of ranks")
        n_ranks = ""
    total, port = _number("PET_NNODES", least), None
    if (
        env.get("PET_MASTER_PORT")
        and not 0 < (port := _number("PET_MASTER_PORT", env["PET_MASTER_PORT"])) < 65536
    ):
        raise ValueError(f"PET_MASTER_PORT={port} is not a port, 1 to 65535")
    if total == 1 and not n_ranks:
        return None
    return Nodes(
        "PET_NNODES",
        total,
        _number("PET_NODE_RANK", env.get("PET_NODE_RANK") or "0"),
        env.get("PET_MASTER_ADDR", ""),
        port,
        _number("PET_NPROC_PER_NODE", n_ranks) if n_ranks else None,
    )


def _jax(env: Mapping[str, str], hostname: str, n_nodes: int | None) -> Nodes:
    """The JAX policy of Kubeflow Trainer. The port is the one of JAX's own coordinator, so that it is not ours."""
    address = env["JAX_COORDINATOR_ADDRESS"].rpartition(":")
    return Nodes(
        "JAX_NUM_PROCESSES",
        _number("JAX_NUM_PROCESSES", env["JAX_NUM_PROCESSES"]),
        _number("JAX_PROCESS_ID", env["JAX_PROCESS_ID"]),
        (address[0] or address[2]).strip("[]"),
    )


def _sagemaker(env: Mapping[str, str], hostname: str, n_nodes: int | None) -> Nodes:
    """SageMaker's training toolkit: SM_HOSTS is a list in JSON, whose order is not guaranteed."""
    try:
        hosts = sorted(json.loads(env["SM_HOSTS"]))
        return Nodes("SageMaker", len(hosts), hosts.index(env["SM_CURRENT_HOST"]), hosts[0])
    except (ValueError, TypeError):
        raise ValueError(
            f"SM_HOSTS={env['SM_HOSTS']} is not a list in JSON that has SM_CURRENT_HOST={env['SM_CURRENT_HOST']}"
        ) from None


def _aws_batch(env: Mapping[str, str], hostname: str, n_nodes: int | None) -> Nodes:
    """A multi-node parallel job of AWS Batch: all nodes but the main one are given the main one's address."""
    main = _number("AWS_BATCH_JOB_MAIN_NODE_INDEX", env.get("AWS_BATCH_JOB_MAIN_NODE_INDEX") or "0")
    index = _number("AWS_BATCH_JOB_NODE_INDEX", env["AWS_BATCH_JOB_NODE_INDEX"])
    total = _number("AWS_BATCH_JOB_NUM_NODES", env["AWS_BATCH_JOB_NUM_NODES"])
    address = env.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS") or (hostname if index == main else "")
    return Nodes("AWS Batch", total, (index - main) % max(total, 1), address)


def _skypilot(env: Mapping[str, str], hostname: str, n_nodes: int | None) -> Nodes:
    """SkyPilot: one address a line, node 0 first."""
    addresses = env["SKYPILOT_NODE_IPS"].split()
    return Nodes(
        "SkyPilot", len(addresses), _number("SKYPILOT_NODE_RANK", env["SKYPILOT_NODE_RANK"]), addresses[0]
    )


def _kubernetes(env: Mapping[str, str], hostname: str, n_nodes: int | None) -> Nodes | None:
    """An indexed Job or a JobSet: pod <name>-<index>, which has a name in the domain of its headless service."""
    if n_nodes is None:
        return None
    index = env["JOB_COMPLETION_INDEX"]
    name, dot, domain = hostname.partition(".")
    if not name.endswith(f"-{index}"):
        raise ValueError(
            f"JOB_COMPLETION_INDEX={index}, but this host is {hostname}, not <job>-{index}: "
            "give --node-rank and --master-addr"
        )
    first = re.sub(r"\d+$", "0", name)
    return Nodes("Kubernetes", n_nodes, _number("JOB_COMPLETION_INDEX", index), f"{first}{dot}{domain}")


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{name}={text} is not a number")
    return int(text)


_Reader = Callable[[Mapping[str, str], str, "int | None"], "Nodes | None"]
# The innermost system comes first: Kubeflow's pods belong to Jobs of Kubernetes.
_SYSTEMS: tuple[tuple[tuple[str, ...], _Reader], ...] = (
    (("PET_NNODES",), _torchrun),
    (("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS"), _jax),
    (("SM_HOSTS", "SM_CURRENT_HOST"), _sagemaker),
    (("AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_NODE_INDEX"), _aws_batch),
    (("SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK"), _skypilot),
    (("JOB_COMPLETION_INDEX",), _kubernetes),
)
