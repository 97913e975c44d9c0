"""The backends that serve the tensors of devices in a group of samestep."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from samestep.gpu import nccl_settings


def _of_torch() -> dict[str, str]:
    """What serves devices in a group for which the program has named samestep alone, by kinds of device."""
    return {"cuda": "nccl"} if dist.is_nccl_available() and torch.cuda.is_available() else {}


class DeviceHalves:
    """For each other kind of device, a group of the backend that the program has named for it, or of torch's NCCL.

    torch lets a group that is written in Python serve all devices. So operations on tensors that are not on the host
    go on to a group of their own, over the same ranks. The first of them makes it, which is collective.

    Args:
      group: of samestep.
      members: the global ranks; empty for all.
    """

    def __init__(self, group: Any, members: list[int]) -> None:
        self._group = group
        self._members = members
        self.made: dict[str, Any] = {}  # by kinds of device

    def close(self) -> None:
        """Ends these groups, too. Those of the world torch ends itself."""
        if self._group is dist.group.WORLD:
            return
        while self.made:
            _, half = self.made.popitem()
            with contextlib.suppress(ValueError):  # torch has ended it already
                dist.destroy_process_group(half)

    def backends(self) -> dict[str, str] | None:
        """The names of the other backends, by kinds of device; None if torch does not know the group (any more).

        They are those that the program has named; in "samestep" alone that is torch's NCCL, where torch sees a GPU.
        """
        try:
            config = dist.get_backend_config(self._group)
        except Exception:  # of a class that depends on the version
            return None
        pairs = (part.split(":") for part in config.split(",") if ":" in part)
        named = {device: name for device, name in pairs if device != "cpu" and name != "samestep"}
        return named or _of_torch()

    def half_of(self, arguments: Iterable[Any]) -> Any:
        """The group for the first tensor among arguments and lists of them; None if samestep's own serves that."""
        for argument in arguments:
            first = argument
            while isinstance(first, (list, tuple)) and first:
                first = first[0]
            if isinstance(first, torch.Tensor):
                return None if first.is_cpu else self.half_for(first.device)
        return None

    def half_for(self, device: Any) -> Any:
        """The group for a device; None if no backend is named for it."""
        kind = torch.device(device).type
        if kind == "cpu":
            return None
        if kind not in self.made:
            name = (self.backends() or {}).get(kind)
            if name is None:
                return None
            os.environ.update(nccl_settings.interfaces(os.environ, nccl_settings.of_files(os.environ)))
            self.made[kind] = dist.new_group(
                self._members or None,
                timeout=timedelta(seconds=self._group._timeout),
                backend=f"{kind}:{name}",
                use_local_synchronization=True,
            )
        return self.made[kind]
