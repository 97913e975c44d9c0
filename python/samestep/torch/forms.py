"""The second form in which torch takes operations of a group: a tensor and a root in place of lists and options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

_ROOT, _OP, _TIMEOUT = {"root": "rootRank"}, {"op": "reduceOp"}, {"timeout": "timeout"}
_OUTPUTS, _INPUTS = ("output_tensors", "output_tensor", "output"), ("input_tensors", "input_tensor", "input")


class Form:
    """How an operation is called.

    Args:
      options: the class of its options.
      tensors: what torch calls each argument that has tensors.
      fields: what takes the place of options, in order; by name that of the option.
    """

    def __init__(self, options: Any, tensors: Sequence[Sequence[str]], fields: Mapping[str, str]) -> None:
        self._options, self._tensors, self._fields = options, tensors, fields
        self._types = (*(list for _ in tensors), options)

    def is_plain(self, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
        """Whether a call has lists of tensors and options, by position. Others go through `plain`."""
        return not named and tuple(map(type, args)) == self._types

    def plain(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """The lists of tensors and the options of a call of either form.

        Raises:
          TypeError: an argument is missing, or is none of torch's.
        """
        given, left = list(args), dict(named)
        for names in self._tensors[len(given) :]:
            given += [left.pop(name) for name in names if name in left]
        n = len(self._tensors)
        lists, others = given[:n], given[n:]
        if len(lists) < n or len(others) > len(self._fields):
            raise TypeError(f"an operation of a group takes {n} arguments with tensors, and then options")
        if any(isinstance(each, torch.Tensor) for each in lists):
            lists = [[each] for each in lists]
        if isinstance(options := left.pop("opts", others[0] if others else None), self._options):
            others = []
        else:
            options = self._options()
        left.update(zip(self._fields, others, strict=False))
        for name, value in left.items():
            if name not in self._fields:
                raise TypeError(f"an operation of this group has no argument {name!r}")
            if value is not None:
                setattr(options, self._fields[name], value)
        return [*lists, options]


ALLREDUCE = Form(c10d.AllreduceOptions, [("tensors", "tensor")], {**_OP, **_TIMEOUT})
BROADCAST = Form(c10d.BroadcastOptions, [("tensors", "tensor")], {**_ROOT, **_TIMEOUT})
REDUCE = Form(c10d.ReduceOptions, [("tensors", "tensor")], {**_ROOT, **_OP, **_TIMEOUT})
ALLGATHER = Form(c10d.AllgatherOptions, [_OUTPUTS, _INPUTS], _TIMEOUT)
GATHER = Form(c10d.GatherOptions, [_OUTPUTS, _INPUTS], {**_ROOT, **_TIMEOUT})
SCATTER = Form(c10d.ScatterOptions, [_OUTPUTS, _INPUTS], {**_ROOT, **_TIMEOUT})
REDUCE_SCATTER = Form(c10d.ReduceScatterOptions, [_OUTPUTS, _INPUTS], {**_OP, **_TIMEOUT})
BARRIER = Form(c10d.BarrierOptions, [], _TIMEOUT)
