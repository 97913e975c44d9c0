"""Ranks on Ray: `SamestepConfig` for Ray Train, and a backend of `ray.util.collective`.

Torch users need nothing of this: `TorchTrainer(..., torch_config=TorchConfig(backend="samestep"))`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samestep.ray.collective import register_collective_backend
    from samestep.ray.train import SamestepConfig

__all__ = ["SamestepConfig", "register_collective_backend"]

_MODULES = {"SamestepConfig": "train", "register_collective_backend": "collective"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(f"samestep.ray.{_MODULES[name]}"), name)
    except ImportError as error:
        extra = "ray[train]" if name == "SamestepConfig" else "ray"
        raise ImportError(f"samestep.ray.{name} needs Ray: pip install '{extra}' ({error})") from error
