"""Reduction operators and what users may write for them."""

from __future__ import annotations

import builtins
import enum
import operator
from dataclasses import dataclass
from typing import Any

from samestep import _core
from samestep.errors import InvalidArgumentError

__all__ = [
    "AVG",
    "BAND",
    "BOR",
    "BXOR",
    "LAND",
    "LOR",
    "MAX",
    "MIN",
    "PROD",
    "SUM",
    "Premul",
    "ReduceOp",
    "premul",
]


class ReduceOp(enum.Enum):
    """How the elements of all ranks become one.

    Wherever an operator is asked for, these may be written too: the lower-case name ("sum"),
    `operator.add` and `operator.mul`, the builtins `min` and `max`, and `premul(factor)`.

    `AVG` is the sum divided by the number of ranks: one multiplication after the sum for floats, floor
    division of an exact 64-bit sum for integers. Sums of float16 and bfloat16 are made in float32 and
    rounded once. `BAND BOR BXOR LAND LOR` are for integers and bool, `MIN MAX` not for complex numbers.
    """

    SUM = 0
    PROD = 1
    MIN = 2
    MAX = 3
    AVG = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    LAND = 8
    LOR = 9


SUM, PROD, MIN, MAX, AVG = ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG
BAND, BOR, BXOR, LAND, LOR = ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR, ReduceOp.LAND, ReduceOp.LOR

PREMUL = 10
"""The number of `Premul` in the core."""


@dataclass(frozen=True)
class Premul:
    """The sum over ranks of `factor * x`, each rank with its own factor. Made by `premul`."""

    factor: float


def premul(factor: float) -> Premul:
    """The operator "sum of factor * x"; each rank may give its own factor.

    Args:
      factor: a real number; a whole one where the arrays are of integers.

    Example:
      >>> import numpy as np, samestep as ss
      >>> backend = ss.initialize()
      >>> backend.allreduce(np.array([1.0, 2.0]), ss.premul(0.5))
      array([0.5, 1. ])
    """
    try:
        return Premul(float(factor))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"premul: factor must be a real number, got {factor!r}") from error


_NAMED = {op.name.lower(): op for op in ReduceOp}
_FUNCTIONS: dict[Any, ReduceOp] = {
    operator.add: SUM,
    operator.iadd: SUM,
    operator.mul: PROD,
    operator.imul: PROD,
    builtins.sum: SUM,
    builtins.min: MIN,
    builtins.max: MAX,
}


def resolve(op: Any) -> tuple[int, float]:
    """The operator's number in the core, and this rank's factor.

    Raises:
      InvalidArgumentError: `op` stands for no operator.

    Example:
      >>> resolve("max"), resolve(premul(0.25))
      ((3, 1.0), (10, 0.25))
    """
    if isinstance(op, ReduceOp):
        return op.value, 1.0
    if isinstance(op, Premul):
        return PREMUL, op.factor
    try:
        known = _NAMED.get(op) or _FUNCTIONS.get(op)
    except TypeError:  # cannot be hashed
        known = None
    if known is None:
        names = ", ".join(_NAMED)
        if hasattr(op, "shape"):  # as in MPI's Allreduce(x, y)
            raise InvalidArgumentError(
                f"op is an array; use one of {names}; an array to receive into is given by name: out="
            )
        raise InvalidArgumentError(
            f"op {op!r} is no reduction; use one of {names}, or samestep.premul(factor)"
        )
    return known.value, 1.0


for _op in ReduceOp:
    _core.register_op(_op, _op.value)
    _core.register_op(_op.name.lower(), _op.value)
_core.register_op(operator.add, SUM.value)
