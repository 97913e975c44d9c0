"""Runs scripts and libraries that name gloo on samestep, if the user asks for it."""

import functools
from typing import Any


def replace(dist: Any, name: str) -> None:
    """Makes `init_process_group("gloo")` start the backend `name`.

    Libraries such as Accelerate name gloo themselves and refuse all they do not know. Groups of several backends
    ("cpu:gloo,cuda:nccl") and `new_group("gloo")` stay what they are.
    """
    usual = dist.init_process_group

    @functools.wraps(usual)
    def init_process_group(backend: Any = None, *args: Any, **options: Any) -> Any:
        backend = name if str(backend).lower() == "gloo" else backend
        return usual(backend, *args, **options)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
