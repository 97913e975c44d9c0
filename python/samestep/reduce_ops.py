"""Reduction operators, and the values that stand for them."""

from __future__ import annotations

import builtins
import enum
import math
import numbers
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

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
    "Op",
    "Premul",
    "ReduceOp",
    "avg",
    "premul",
]


class ReduceOp(enum.Enum):
    """How the elements of all ranks are combined.

    An argument `op` may also be the lower-case name ("sum"), `operator.add` or `operator.mul`, the builtins `sum`,
    `min` and `max`, or `premul(factor)`.

    `AVG` is the sum over the number of ranks: for floats one multiplication after the sum, for integers the
    floor division of an exact 64-bit sum. float16 and bfloat16 are summed in float32 and rounded once.
    `BAND BOR BXOR LAND LOR` accept integers and bool; `MIN MAX` do not accept complex numbers.
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
avg = AVG
"""Lux's name of the averaging operator."""

PREMUL = 10
"""The code of `Premul` in the core."""
MEAN = 11
"""That of the weighted mean, which `weight=` of trees stands for."""


@dataclass(frozen=True)
class Premul:
    """The sum over ranks of `factor * x`, each rank with its own factor. Made by `premul`."""

    factor: float


def premul(factor: float) -> Premul:
    """Return the operator "sum of factor * x", with one factor for each rank.

    Args:
      factor: a real number; an integer for integer arrays.

    Raises:
      InvalidArgumentError: `factor` is not a real number, or an integer that is none in float64.

    Example:
      >>> import numpy as np, samestep as ss
      >>> backend = ss.initialize()
      >>> backend.allreduce(np.array([1.0, 2.0]), ss.premul(0.5))
      array([0.5, 1. ])
    """
    try:
        value = float(factor)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"premul: factor must be a real number, got {factor!r}") from error
    except OverflowError:
        value = math.inf
    if isinstance(factor, numbers.Integral) and value != int(factor):
        raise InvalidArgumentError(
            f"premul: an integer must be equal to a float64, as all up to 2**53 are, got {factor}; multiply the array "
            "and use SUM"
        )
    return Premul(value)


OpName = Literal["sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor"]
Op: TypeAlias = ReduceOp | Premul | OpName | Callable[..., Any]
"""The type of the arguments `op`; the functions allowed are those that `ReduceOp` lists."""

_NAMED: dict[Any, ReduceOp] = {op.name.lower(): op for op in ReduceOp}
_FUNCTIONS: dict[Any, ReduceOp] = {
    operator.add: SUM,
    operator.iadd: SUM,
    operator.mul: PROD,
    operator.imul: PROD,
    builtins.sum: SUM,
    builtins.min: MIN,
    builtins.max: MAX,
}


def resolve(op: Op, verb: str = "") -> tuple[int, float]:
    """Return the operator's code in the core, and this rank's factor. `verb`: the call, at the beginning of errors.

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
        names, head = ", ".join(_NAMED), f"{verb}: " if verb else ""
        if hasattr(op, "shape"):  # as in MPI's Allreduce(x, y)
            raise InvalidArgumentError(
                f"{head}op is an array; use one of {names}; pass the output array by keyword: out="
            )
        raise InvalidArgumentError(
            f"{head}op {op!r} is not a reduction; use one of {names}, or samestep.premul(factor)"
        )
    return known.value, 1.0


def is_mean(op: Op) -> bool:
    """Whether `op` stands for AVG."""
    return resolve(op) == (AVG.value, 1.0)


def why_too_large(x: Any, op: int, factor: float, size: int) -> str:
    """Why the result for `x`, if it is an int of Python, may not fit 64 bits; "" if it does. Arrays wrap around.

    Example:
      >>> why_too_large(2**62, SUM.value, 1.0, 2)
      'the int 4611686018427387904, too large to add up or multiply 2 of in 64 bits; pass a float'
    """
    if type(x) is not int or op not in (SUM.value, PROD.value, PREMUL):
        return ""
    most = 2**64 - 1 if abs(x) >> 63 else 2**63 - 1
    largest_factor = math.ceil(max(1.0, abs(factor))) if math.isfinite(factor) else 1  # the core refuses that
    if (abs(x) ** size if op == PROD.value else abs(x) * largest_factor * size) <= most:
        return ""
    return f"the int {x}, too large to add up or multiply {size} of in 64 bits; pass a float"


for _op in ReduceOp:
    _core.register_op(_op, _op.value)
    _core.register_op(_op.name.lower(), _op.value)
_core.register_op(operator.add, SUM.value)
