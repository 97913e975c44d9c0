"""What every operation must give, computed by NumPy alone, and the inputs to try it on.

Written from the public contract: elements are combined in pairwise order of rank, ((r0+r1)+(r2+r3)),
half types in float32 rounded once, AVG by one multiplication for floats and by floor division of the
exact sum for integers. So results are compared bit by bit.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
HALVES = ["float16", "bfloat16"]
FLOATS = [*HALVES, "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]
DTYPES = ["bool", *INTEGERS, *FLOATS, *COMPLEX]
MOVABLE = [*DTYPES, *FLOAT8]

OPS = ["sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor"]
SMALL_SIZES = [0, 1, 2, 5, 37]  # empty; fewer elements than ranks; uneven
BIG_SIZE = 1_000_003
SIZES = [0, 1, 2, 5, BIG_SIZE]


def dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


def ops_for(name: str) -> list[str]:
    """The operators that have a meaning for a dtype."""
    if name == "bool":
        return [op for op in OPS if op != "avg"]
    if name in INTEGERS:
        return OPS
    if name in FLOATS:
        return ["sum", "prod", "min", "max", "avg"]
    return ["sum", "prod", "avg"] if name in COMPLEX else []


def values(rank: int, shape: int | tuple[int, ...], name: str, *, seed: int = 0) -> Array:
    """What `rank` contributes: rough numbers of both signs and all sizes, so that every rounding shows."""
    rng = np.random.default_rng([seed, rank])
    to = dtype(name)
    if name == "bool":
        numbers = rng.integers(0, 2, shape)
    elif name in INTEGERS:
        numbers = rng.integers(np.iinfo(to).min, np.iinfo(to).max, shape, dtype=to, endpoint=True)
    elif name in COMPLEX:
        numbers = _rough(rng, shape) + 1j * _rough(rng, shape)
    else:
        numbers = _rough(rng, shape)
    return np.asarray(numbers).astype(to)


def _rough(rng: np.random.Generator, shape: int | tuple[int, ...]) -> Array:
    return rng.standard_normal(shape) * 10.0 ** rng.integers(-1, 2, shape)


def pairwise(terms: Sequence[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """((t0+t1)+(t2+t3))+..., cut at the largest power of two below the number of terms."""
    if len(terms) == 1:
        return terms[0]
    cut = 1 << (len(terms) - 1).bit_length() - 1
    return combine(pairwise(terms[:cut], combine), pairwise(terms[cut:], combine))


# Ranks of each host, as in "1,2,1", where the suite runs over hosts: see tests/hosts/conformance.py.
_LAYOUT = [int(n) for n in os.environ.get("SAMESTEP_TEST_LAYOUT", "").split(",") if n]


def in_order(terms: Sequence[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """In the order of the world that runs the suite: over the ranks of each host, then over the hosts."""
    if len(terms) != sum(_LAYOUT):
        return pairwise(terms, combine)
    ends = list(itertools.accumulate(_LAYOUT))
    hosts = [terms[end - n : end] for n, end in zip(_LAYOUT, ends, strict=True)]
    return pairwise([pairwise(host, combine) for host in hosts], combine)


def reduced(arrays: Sequence[Array], op: str, factors: Sequence[float] = ()) -> Array:
    """The reduction of one array per rank. `factors` (for "premul", and "mean" by `weight=`): one per rank."""
    with np.errstate(all="ignore"):
        return np.asarray(_reduced(arrays, op, factors))


def _reduced(arrays: Sequence[Array], op: str, factors: Sequence[float]) -> Array:
    name = arrays[0].dtype.name
    if name in COMPLEX:
        return _reduced_complex(arrays, op, factors)
    if name in INTEGERS and op == "avg":
        return _average_of_integers(arrays)
    if name in HALVES:
        wide = [a.astype(np.float32) for a in arrays]
        # All ranks' elements meet at once, to be rounded once, whatever the hosts.
        return _reduced_real(wide, op, factors, order=pairwise).astype(arrays[0].dtype)
    return _reduced_real(arrays, op, factors)


def _reduced_real(
    arrays: Sequence[Array], op: str, factors: Sequence[float], order: Callable[..., Any] = in_order
) -> Array:
    kind = arrays[0].dtype
    if op in ("premul", "mean"):
        scale = [kind.type(int(f) if kind.kind in "iu" else f) for f in factors]
        nothing = np.full_like(arrays[0], -0.0 if kind.kind == "f" else 0)
        terms = [a * f if f or op == "premul" else nothing for a, f in zip(arrays, scale, strict=True)]
        total = order(terms, np.add)
        return total if op == "premul" else total / kind.type(sum(factors))
    if op == "avg":
        return order(arrays, np.add) * kind.type(1.0 / len(arrays))
    if op in ("land", "lor"):
        return order([a.astype(bool) for a in arrays], _COMBINE[op]).astype(kind)
    return order(arrays, _COMBINE[op]).astype(kind, copy=False)


_COMBINE = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "land": np.logical_and,
    "lor": np.logical_or,
}


def _average_of_integers(arrays: Sequence[Array]) -> Array:
    exact = sum(a.astype(object) for a in arrays)
    return np.asarray(exact // len(arrays), object).reshape(arrays[0].shape).astype(arrays[0].dtype)


def _reduced_complex(arrays: Sequence[Array], op: str, factors: Sequence[float]) -> Array:
    if op == "prod":
        real, imag = in_order([(a.real, a.imag) for a in arrays], _times)
    else:
        real = _reduced_real([a.real for a in arrays], op, factors)
        imag = _reduced_real([a.imag for a in arrays], op, factors)
    result = np.empty(arrays[0].shape, arrays[0].dtype)
    result.real, result.imag = real, imag
    return result


def _times(x: tuple[Any, Any], y: tuple[Any, Any]) -> tuple[Any, Any]:
    (a, b), (c, d) = x, y
    return a * c - b * d, a * d + b * c


def assert_same(got: Any, expected: Array, what: str = "") -> None:
    """Same dtype, shape and bits; a NaN equals a NaN."""
    assert isinstance(got, np.ndarray), f"{what}: {type(got)}"
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, not {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: {got.shape}, not {expected.shape}"
    if _bits(got) == _bits(expected):
        return
    wide = (lambda a: a.astype(np.float32)) if got.dtype.kind == "V" else (lambda a: a)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(wide(got), wide(expected), err_msg=what)


def _bits(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def assert_same_everywhere(group: Any, array: Array) -> None:
    """All ranks of the group hold the same bytes."""
    assert len(set(group.allgather_object(_bits(array)))) == 1
