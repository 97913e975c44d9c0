"""Programs of this process that XLA's MPI collectives cannot run: those over some of the devices only."""

from __future__ import annotations

import math
import re

import jax

_COLLECTIVE = re.compile(r" (all-gather|all-reduce|all-to-all|collective-\w+|reduce-scatter)(-start)?\(")
_DEVICES = re.compile(r"(?:replica_count|num_partitions)=(\d+)")


def problem() -> str:
    """Why this process can make no group of devices; "" where nothing is in the way.

    A group is made by all devices of the job. A program over some of them would wait for the others.
    """
    client = jax.local_devices(backend="cpu")[0].client
    for program in client.live_executables():
        for module in program.hlo_modules():
            text = module.to_string()
            head = text[: text.index("\n")]
            n_devices = math.prod(map(int, _DEVICES.findall(head)))
            if 1 < n_devices < client.device_count() and _COLLECTIVE.search(text):
                return _refusal(head, n_devices, client.device_count())
    return ""


def _refusal(head: str, n_devices: int, n_all: int) -> str:
    name = head.split()[1].rstrip(",").removeprefix("jit_")
    return (
        f"the program '{name}' communicates between {n_devices} of the {n_all} devices of the job, and XLA's MPI "
        "collectives need all of them: make the mesh of jax.devices(), or use gloo, which samestep run --no-jax or "
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo selects"
    )
