"""The two forms of a call of torch's groups: lists of tensors and options, or tensors and what options would say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

_ROOT, _OP, _TIMEOUT = {"root": "rootRank"}, {"op": "reduceOp"}, {"timeout": "timeout"}
_OUTPUTS, _INPUTS = ("output_tensors", "output_tensor", "output"), ("input_tensors", "input_tensor", "input")


class Form:
    """The arguments of one operation.

    Args:
      tensors: for each argument that has tensors, the names that torch gives it.
      fields: the arguments that take the place of options, in order, and the field of the options that each one sets.
    """

    def __init__(
        self, verb: str, options: Any, tensors: Sequence[Sequence[str]], fields: Mapping[str, str]
    ) -> None:
        self._verb, self._options, self._tensors, self._fields = verb, options, tensors, fields
        self._types = (*(list for _ in tensors), options)

    def plain(self, args: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Any]:
        """The lists of tensors and the options of a call of either form; TypeError where torch has no such form."""
        if not named and tuple(map(type, args)) == self._types:
            return args
        given, left = list(args), dict(named)
        for names in self._tensors[len(given) :]:
            given += [left.pop(name) for name in names if name in left]
        n = len(self._tensors)
        lists, others = given[:n], given[n:]
        if (opts := left.pop("opts", None)) is not None:
            others.insert(0, opts)
        options = others.pop(0) if others and isinstance(others[0], self._options) else None
        fields = dict(zip(self._fields, others, strict=False)) | left
        if unknown := [name for name in fields if name not in self._fields]:
            raise self._error(f"there is no argument {unknown[0]!r}")
        if len(fields) < len(others) + len(left) or (options is not None and fields):
            raise self._error("there are too many arguments")
        if len(lists) < n:
            raise self._error("an argument is missing")
        if any(isinstance(each, torch.Tensor) for each in lists):
            if "root" in self._fields and options is None and fields.get("root") is None:
                raise self._error("the root is missing")
            lists = [[each] for each in lists]
        if options is None:
            options = self._options()
        for name, value in fields.items():
            if value is not None:
                setattr(options, self._fields[name], value)
        return [*lists, options]

    def _error(self, why: str) -> TypeError:
        return TypeError(
            f"{self._verb}: {why}; behind its tensors it takes {', '.join(self._fields)}, or behind lists of tensors "
            f"{self._options.__name__}"
        )


ALLREDUCE = Form("allreduce", c10d.AllreduceOptions, [("tensors", "tensor")], {**_OP, **_TIMEOUT})
BROADCAST = Form("broadcast", c10d.BroadcastOptions, [("tensors", "tensor")], {**_ROOT, **_TIMEOUT})
REDUCE = Form("reduce", c10d.ReduceOptions, [("tensors", "tensor")], {**_ROOT, **_OP, **_TIMEOUT})
ALLGATHER = Form("allgather", c10d.AllgatherOptions, [_OUTPUTS, _INPUTS], _TIMEOUT)
GATHER = Form("gather", c10d.GatherOptions, [_OUTPUTS, _INPUTS], {**_ROOT, **_TIMEOUT})
SCATTER = Form("scatter", c10d.ScatterOptions, [_OUTPUTS, _INPUTS], {**_ROOT, **_TIMEOUT})
REDUCE_SCATTER = Form("reduce_scatter", c10d.ReduceScatterOptions, [_OUTPUTS, _INPUTS], {**_OP, **_TIMEOUT})
BARRIER = Form("barrier", c10d.BarrierOptions, [], _TIMEOUT)
