"""What a torch optimizer was told, such as its learning rates: the same on all ranks, or parameters drift apart."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from samestep.group.group import Group
from samestep.optimizer.torch_state import named_parameters
from samestep.step.same_data import require_same_order
from samestep.step.state_hash import same

_WHEN = "; ranks that set it by what they alone know drift apart: give a scheduler, for one, the mean loss of all ranks"
_BEGIN = (
    "; all ranks must begin with equal ones: pass the model and the optimizer through synchronize, also after a "
    "checkpoint that one rank has loaded"
)
_KINDS = (bool, int, float, str, tuple, type(None))


class Settings:
    """Those of one optimizer, which are compared after the first pass, and when they have changed.

    After the first pass, and after `load_state_dict`, values are compared as well: parameters that begin with other
    ones, or are updated by another state, stay different.

    Args:
      backend: the group.
      optimizer: a distributed one; not kept alive.
      act: the call, for texts of errors.
      divides_state: each rank has its own part of the state.
    """

    def __init__(
        self, backend: Group, optimizer: torch.optim.Optimizer, act: str, *, divides_state: bool = False
    ) -> None:
        self._backend, self._optimizer, self._act = backend, weakref.ref(optimizer), act
        self._divides_state = divides_state
        self._agreed: list[Any] | None = None
        self._n_loads = self._n_compared = 0
        optimizer.register_load_state_dict_post_hook(self._note_load)
        optimizer._samestep_settings = self  # `synchronize` makes them equal, and calls `forget`
        backend._follow(self, Settings.forget)

    def _note_load(self, _: torch.optim.Optimizer) -> None:
        self._n_loads += 1

    def forget(self, _: Any = None) -> None:
        """Compare in any case, as ranks do that come in."""
        self._agreed = None
        self._n_loads = self._n_compared = 0

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
            for key, value in _plain(group).items()
        }
        same(self._backend, named, act=f"{self._act}: settings", when=_WHEN)
        if self._agreed is None:
            require_same_order(self._backend)
        if self._agreed is None or self._n_loads != self._n_compared:
            same(self._backend, self._values(), act=f"{self._act}: parameters and state", when=_BEGIN)
            self._n_compared = self._n_loads
        self._agreed = self._now()

    def _values(self) -> dict[str, Any]:
        optimizer = self._optimizer()
        named = {} if optimizer is None else named_parameters(optimizer)
        trained = {n: p for n, p in named.items() if p.requires_grad and p.layout is torch.strided}
        states = {} if optimizer is None or self._divides_state else optimizer.state
        return {
            "parameters": trained,
            "state": {n: _comparable(states[p]) for n, p in trained.items() if p in states},
        }

    def _now(self) -> list[Any]:
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        return [self._n_loads, *(value for group in groups for value in _plain(group).values())]


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """The settings that can be compared in every pass: no tensors of devices, for which it would wait."""
    found = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_cpu:
            found[key] = value.item()
        elif type(value) in _KINDS:
            found[key] = value
    return found


def _comparable(state: Any) -> dict[str, Any]:
    return {
        str(key): value
        for key, value in state.items()
        if type(value) in (int, float) or (isinstance(value, torch.Tensor) and value.layout is torch.strided)
    }
