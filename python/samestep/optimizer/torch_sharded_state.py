"""The state of a sharded torch optimizer, and the trial of `probe` for torch optimizers.

The state has parts of tensors like a parameter, and values that all parts share.
"""

from __future__ import annotations

import collections
import copy
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from samestep import _core
from samestep._util.json_layout import Many
from samestep.errors import InvalidArgumentError
from samestep.group.group import Group
from samestep.optimizer import probe
from samestep.optimizer.flat_exchange import FlatExchange
from samestep.optimizer.probe import part_shape
from samestep.optimizer.torch_state import as_row, named_parameters
from samestep.step.leaves import Flat, LeafSpec

_PART, _TENSOR, _VALUE = "part", "tensor", "value"


def is_like(key: str, value: Any, shape: Sequence[int]) -> bool:
    """Whether an entry of the state has an element for each of a parameter of this shape."""
    return isinstance(value, torch.Tensor) and value.shape == shape and key != "step"


def slice_state(entries: dict[str, Any], parameter: torch.Tensor, part: range) -> dict[str, Any]:
    """The state of a part of a parameter: elements of tensors of its shape; copies of other tensors."""
    return {key: _sliced(key, value, parameter, part) for key, value in entries.items()}


def _sliced(key: str, value: Any, parameter: torch.Tensor, part: range) -> Any:
    if not is_like(key, value, parameter.shape):
        return value.clone() if isinstance(value, torch.Tensor) else value
    aligned = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
    return as_row(aligned)[part.start : part.stop].reshape(part_shape(parameter.shape, len(part))).clone()


def joined(parts: Sequence[tuple[int, dict[str, Any]]], parameter: torch.Tensor) -> dict[str, Any]:
    """The state of a whole parameter from that of all its parts, in order, with their numbers of elements."""
    made = dict(parts[0][1])
    for key, value in made.items():
        if is_like(key, value, part_shape(parameter.shape, parts[0][0])):
            flat = torch.cat([of[key].reshape(-1) for _, of in parts])
            made[key] = torch.empty_like(
                parameter, dtype=value.dtype, device=value.device, requires_grad=False
            )
            as_row(made[key]).copy_(flat)
    return made


def gather(
    backend: Group,
    exchange: FlatExchange,
    parameters: Sequence[torch.Tensor],
    parts: Sequence[torch.Tensor],
    mine: dict[int, dict[str, Any]],
    *,
    root: int | None,
) -> dict[int, dict[str, Any]]:
    """The state of whole parameters, by index, on `root` or all ranks; `mine`: of this rank's parts. Collective."""
    facts = [
        [str(i), key, *_described(key, value, parts[i])]
        for i, entries in mine.items()
        for key, value in entries.items()
    ]
    with _core.UserCall("ShardedOptimizer: state_dict()"):
        everyone = backend._allgather_facts(facts, Many([str, str, str, str, str]))
        table: dict[tuple[int, str], tuple[str, str, str]] = {}
        for reported in everyone:
            for index, key, kind, dtype, text in reported:
                table.setdefault((int(index), key), (kind, dtype, text))
        whole: dict[int, dict[str, Any]] = {}
        for (i, key), (kind, dtype, text) in sorted(table.items(), key=lambda item: item[0][0]):
            if kind == _PART:
                data = exchange.gather(i, mine[i][key] if i in mine else None, dtype, root)
                value: Any = _joined(data, getattr(torch, dtype), parameters[i])
            else:
                value = _restored(kind, dtype, text)
            whole.setdefault(i, {})[key] = value
    return whole


def _described(key: str, value: Any, part: torch.Tensor) -> tuple[str, str, str]:
    if not isinstance(value, torch.Tensor):
        try:
            return _VALUE, "", json.dumps(value)
        except TypeError:
            raise InvalidArgumentError(
                f"ShardedOptimizer: the entry {key!r} of the state is a {type(value).__name__}, which "
                "cannot be gathered"
            ) from None
    dtype = str(value.dtype)[6:]
    if is_like(key, value, part.shape):
        return _PART, dtype, ""
    return _TENSOR, dtype, json.dumps([list(value.shape), _bytes_of(value).hex()])


def _restored(kind: str, dtype: str, text: str) -> Any:
    value = json.loads(text)
    if kind == _VALUE:
        return value
    shape, data = value
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    if tensor.numel():
        tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray.fromhex(data), dtype=torch.uint8))
    return tensor


def _bytes_of(value: torch.Tensor) -> bytes:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _joined(data: np.ndarray[Any, Any] | None, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor | None:
    if data is None:
        return None
    result = torch.empty_like(like, dtype=dtype, requires_grad=False)
    if len(data):
        _core.unpack(data, [as_row(result)])
    return result


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer works element by element; see `probe.require_elementwise`."""
    named = {name: p for name, p in named_parameters(optimizer).items() if p.requires_grad}
    specs = [LeafSpec("", "torch", str(p.dtype)[6:], tuple(p.shape)) for p in named.values()]

    def trial(params: list[Flat], steps: list[list[Flat]], shapes: list[tuple[int, ...]]) -> probe.Steps:
        def tensors(values: list[Flat]) -> list[torch.Tensor]:
            return [
                torch.from_numpy(value.copy()).to(p.dtype).to(p.device).reshape(shape)
                for value, p, shape in zip(values, named.values(), shapes, strict=True)
            ]

        small = list(map(torch.nn.Parameter, tensors(params)))
        other = _on(optimizer, dict(zip(named.values(), small, strict=True)))
        for grads in steps:
            before = [p.detach().clone() for p in small]
            for parameter, grad in zip(small, tensors(grads), strict=True):
                parameter.grad = grad
            other.step()
            changes = [
                (p.detach().double() - old.double()).reshape(-1).cpu().numpy()
                for p, old in zip(small, before, strict=True)
            ]
            settings = [{k: v for k, v in group.items() if k != "params"} for group in other.param_groups]
            yield changes, probe.state_of(settings)

    probe.require_elementwise(type(optimizer).__name__, list(named), specs, trial)


def _on(
    optimizer: torch.optim.Optimizer, new: dict[torch.Tensor, torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings for other parameters, made as `pickle` makes one."""
    groups = [
        {
            **{key: copy.deepcopy(value) for key, value in group.items() if key != "params"},
            "params": [new[p] for p in group["params"] if p in new],
        }
        for group in optimizer.param_groups
    ]
    state: dict[Any, Any] = collections.defaultdict(dict)
    for old, entries in optimizer.state.items():
        if old in new:
            state[new[old]] = {key: _shrunk(key, value, old, new[old]) for key, value in entries.items()}
    made: Any = object.__new__(type(optimizer))
    made.__setstate__({**optimizer.__getstate__(), "state": state, "param_groups": groups})
    return made


def _shrunk(key: str, value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    if not is_like(key, value, old.shape):
        return copy.deepcopy(value)
    return value.reshape(-1)[: new.numel()].clone().reshape(new.shape)
