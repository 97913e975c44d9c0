"""Which of the GPUs JAX uses in a rank: left alone, it makes arrays on the first one in every process.

What JAX sees is settled when it creates its devices, and it takes memory of each that it sees. Just before, JAX calls
`initialize`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from samestep._util import jax_variables
from samestep.gpu import discovery

_chosen: list[tuple[str, int]] = []
_has_devices = False
_VARIABLES = {"cuda": "jax_cuda_visible_devices", "hip": "jax_rocm_visible_devices"}


def initialize() -> None:
    """Called by JAX before it creates its devices, through the entry point in the group `jax_plugins`.

    A program that asks for the CPU collectives "mpi" and names no library gets samestep's; XLA asks for the ranks
    when it makes its first devices. A rank with a GPU shows JAX that one alone.
    """
    global _has_devices  # noqa: PLW0603
    _has_devices = True
    if _chosen or "LOCAL_RANK" in os.environ:
        _show_own()
    jax_variables.name_library()


def _show_own() -> None:
    """Let JAX, which has no devices yet, see this rank's alone, unless the program says what it shall see.

    Before `initialize` that is the device which `initialize` will choose without arguments, under `samestep run`.
    """
    import jax

    known = _chosen[-1:] or _of_launcher(str(jax.config.jax_platforms or ""))
    if not known:
        return
    kind, device = known[0]
    if getattr(jax.config, "values", {}).get(_VARIABLES[kind], "all") == "all":
        jax.config.update(_VARIABLES[kind], str(device))


def use(kind: str, device: int) -> None:
    """Let JAX use this device of the rank: if it has its devices, as the default, unless another one is set."""
    _chosen.append((kind, device))
    jax: Any = sys.modules.get("jax")
    if jax is None or not _has_devices or jax.config.jax_default_device is not None:
        return
    for one in jax.local_devices():
        if one.platform in ("gpu", "cuda", "rocm") and int(one.local_hardware_id) == device:
            jax.config.update("jax_default_device", one)


def _of_launcher(platforms: str) -> list[tuple[str, int]]:
    """The device of a rank of `samestep run`, if JAX may use any; nothing elsewhere."""
    from samestep._util import launchers

    local_rank = os.environ.get("LOCAL_RANK", "")
    if launchers.launcher().name != "samestep" or not local_rank.isdecimal():
        return []
    if platforms and not any(name in platforms for name in ("cuda", "gpu", "rocm")):
        return []
    found = max(discovery.cuda_devices(), discovery.hip_devices(), key=lambda devices: devices.count)
    return [(found.kind, int(local_rank) % found.count)] if found.count else []
