"""Runs scripts and libraries that name gloo on samestep, if the user asks for it."""

import functools
import inspect
from typing import Any


def replace(dist: Any, name: str) -> None:
    """Makes `init_process_group` and `new_group` start the backend `name` for gloo, alone or for the CPU of several.

    Libraries such as Accelerate name gloo themselves and refuse all they do not know, and those that train on GPUs open
    groups of gloo for what they exchange on the host. Before torch 2.14 `batch_isend_irecv` does not
    coalesce the operations of a group in Python, which NCCL may need, so that "cpu:gloo,cuda:nccl" stays what it is.
    """
    per_device = "rank" in (dist.Backend.__init__.__doc__ or "")
    for function in ("init_process_group", "new_group"):
        replacing = _replacing(getattr(dist, function), name, per_device)
        setattr(dist, function, replacing)
        setattr(dist.distributed_c10d, function, replacing)


def _replacing(usual: Any, name: str, per_device: bool) -> Any:
    signature = inspect.signature(usual)

    @functools.wraps(usual)
    def start(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options)
        if "backend" in given.arguments:
            given.arguments["backend"] = _name(given.arguments["backend"], name, per_device)
        return usual(*given.args, **given.kwargs)

    return start


def _name(backend: Any, name: str, per_device: bool) -> Any:
    parts = str(backend).lower().split(",")
    if parts == ["gloo"]:
        return name
    if per_device and "cpu:gloo" in parts:
        return ",".join(f"cpu:{name}" if part == "cpu:gloo" else part for part in parts)
    return backend
