"""What a torch optimizer was told, such as its learning rates: the same on all ranks, or parameters drift apart."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from samestep.group.group import Group
from samestep.step.same_data import require_same_order
from samestep.step.state_hash import same

_WHEN = "; ranks that set it by what they alone know drift apart: give a scheduler, for one, the mean loss of all ranks"
_KINDS = (bool, int, float, str, tuple, type(None))


class Settings:
    """Those of one optimizer, which are compared after the first pass, and when they have changed."""

    def __init__(self, backend: Group, optimizer: torch.optim.Optimizer, act: str) -> None:
        self._backend, self._optimizer, self._act = backend, weakref.ref(optimizer), act
        self._agreed: list[Any] | None = None
        backend._follow(self, Settings.forget)

    def forget(self, _: Any = None) -> None:
        """Compare in any case, as ranks do that come in."""
        self._agreed = None

    def have_changed(self) -> bool:
        """Whether they are not what all ranks have agreed on. No communication."""
        return self._backend.size > 1 and self._now() != self._agreed

    def compare(self) -> None:
        """Compare them with those of the other ranks. Collective.

        Raises:
          MismatchError: they differ, on all ranks.
        """
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        named = {
            f"param_groups[{i}][{key!r}]": repr(value)
            for i, group in enumerate(groups)
            for key, value in group.items()
            if type(value) in _KINDS
        }
        same(self._backend, named, act=f"{self._act}: settings", when=_WHEN)
        if self._agreed is None:
            require_same_order(self._backend)
        self._agreed = self._now()

    def _now(self) -> list[Any]:
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        return [value for group in groups for value in group.values() if type(value) in _KINDS]
