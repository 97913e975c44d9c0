"""What is measured: for each verb the data of a rank, and the one right answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Allocate = Callable[[tuple[int, ...], "np.dtype[Any]"], Array]

FLOAT32 = "float32"
DTYPES = (FLOAT32, "float16", "bfloat16")
VERBS = (
    "allreduce",
    "bcast",
    "allgather",
    "reduce_scatter",
    "alltoall",
    "sendrecv",
    "barrier",
    "synchronize",
)
WITHOUT_SIZES = {"barrier": 0, "synchronize": 2_000_000}
"""Verbs that are measured at one size only, in bytes."""

LEAVES = 200
"""Arrays in the tree of `synchronize`, all of one size."""

_LEAVES = {"barrier": 0, "synchronize": LEAVES}
_SAMPLES = 64


def numpy_dtype(name: str) -> np.dtype[Any]:
    """One of `DTYPES` as NumPy knows it. bfloat16 needs ml_dtypes."""
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    kind: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return kind


def pattern(rank: int, shape: tuple[int, ...], shift: int = 0, dtype: str = FLOAT32) -> Array:
    """Small integers that differ by position and rank.

    Sums are exact in any order: in float32 up to 2**17 ranks, in bfloat16 up to 8.

    Example:
      >>> pattern(0, (3,)).tolist(), pattern(1, (3,)).tolist()
      ([-125.0, -124.0, -123.0], [-108.0, -107.0, -106.0])
    """
    period = 251 if dtype == FLOAT32 else 61  # primes: blocks that are swapped or shifted differ
    one = (np.arange(period) + 17 * rank + shift) % period - period // 2
    return np.resize(one.astype(numpy_dtype(dtype)), shape)


@dataclass
class Buffers:
    """Arrays of one rank that one contender works on.

    Attributes:
      sent: what the verb reads, and writes where it works in place.
      results: where the result is found; the same objects as `sent` for verbs in place.
    """

    sent: list[Array]
    results: list[Array]

    @property
    def x(self) -> Array | None:
        """The array passed in; None for a barrier."""
        return self.sent[0] if self.sent else None

    @property
    def out(self) -> Array | None:
        """The array to receive into; None for a barrier."""
        return self.results[0] if self.results else None

    def map(self, change: Callable[[Array], Any]) -> Buffers:
        """The same, each array as `change` makes of it."""
        sent = [change(array) for array in self.sent]
        results = sent if self.results is self.sent else [change(array) for array in self.results]
        return Buffers(sent, results)


@dataclass
class Problem:
    """One verb at one size, as one rank sees it.

    Attributes:
      verb: one of `VERBS`, or one of the limits, see `build`.
      nbytes: bytes of the array each rank passes in; rounded up to what the verb can divide.
      dtype: of the elements.
      rank, size: who we are.
      fresh: what the arrays that are passed in hold before each call.
      answers: computes what the results hold after one call.
      out_shape: of the array to receive into; None: in place.
      grows: a sum in place, repeated, multiplies the result by `size` each time.
    """

    verb: str
    nbytes: int
    dtype: np.dtype[Any]
    rank: int
    size: int
    fresh: list[Array]
    answers: Callable[[], list[Array]]
    out_shape: tuple[int, ...] | None = None
    grows: bool = False
    _samples: list[tuple[Array, Array]] = field(init=False)

    def __post_init__(self) -> None:
        self._samples = []
        self.answers = cache(self.answers)  # big ones take long, and each contender is compared with them
        for answer in self.answers():
            where = np.unique(np.linspace(0, answer.size - 1, min(answer.size, _SAMPLES)).astype(np.int64))
            self._samples.append((where, answer.reshape(-1)[where]))

    def buffers(self, allocate: Allocate) -> Buffers:
        """New arrays for one contender, from its own allocator."""
        sent = [allocate(values.shape, self.dtype) for values in self.fresh]
        results = sent if self.out_shape is None else [allocate(self.out_shape, self.dtype)]
        return Buffers(sent, results)

    def rewrite(self, buffers: Buffers) -> None:
        """Writes everything that is sent, and spoils what an old result would be taken for."""
        for array, values in zip(buffers.sent, self.fresh, strict=True):
            np.copyto(array, values)
        if self.out_shape is not None:
            for array, (where, _) in zip(buffers.results, self._samples, strict=True):
                array.reshape(-1)[where] = np.nan

    def check(self, buffers: Buffers, calls: int) -> str:
        """What is wrong with samples of the results after `calls` calls in a row; "" if nothing is."""
        for array, (where, answer) in zip(buffers.results, self._samples, strict=True):
            if wrong := self._compare(array.reshape(-1)[where], answer, calls, where):
                return wrong
        return ""

    def check_all(self, buffers: Buffers, calls: int) -> str:
        """As `check`, every element."""
        for array, answer in zip(buffers.results, self.answers(), strict=True):
            if wrong := self._compare(array.reshape(-1), answer.reshape(-1), calls, None):
                return wrong
        return ""

    def _compare(self, found: Array, answer: Array, calls: int, where: Array | None) -> str:
        if self.grows and calls > 1:
            with np.errstate(over="ignore", invalid="ignore"):
                grown = answer.astype(np.float64) * np.float64(self.size) ** (calls - 1)
                answer = np.where(answer == 0, 0, grown).astype(self.dtype)
        if np.array_equal(found, answer):
            return ""
        # Powers of three and other odd numbers of ranks are rounded as they grow.
        tolerance = 4 * float(_epsilon(self.dtype)) * min(calls, 100) if self.grows and calls > 1 else 0
        near = np.isclose(found.astype(np.float32), answer.astype(np.float32), rtol=tolerance, atol=0)
        if near.all():
            return ""
        first = int(np.argmin(near))
        position = first if where is None else int(where[first])
        return (
            f"{self.verb} of {self.nbytes} bytes on rank {self.rank} of {self.size} after {calls} calls: "
            f"element {position} is {found[first]}, expected {answer[first]}"
        )


def _epsilon(dtype: np.dtype[Any]) -> float:
    return {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype.name]


def build(verb: str, nbytes: int, rank: int, size: int, dtype: str = FLOAT32) -> Problem:
    """The problem of one rank.

    Args:
      verb: one of `VERBS`, or what is measured as a limit: "increment" (one is added to each element in place), "copy"
        (of the rank's own array), "copy_share" (of so much that all ranks together copy the array for all but one of
        them) or "copy_all" (of an array as long as those of all ranks together).
      nbytes: bytes of the array each rank passes in, at least one element where the verb has data.
      rank, size: who we are.
      dtype: one of `DTYPES`.

    Example:
      >>> problem = build("allreduce", 8, rank=0, size=2)
      >>> problem.fresh[0].tolist(), problem.answers()[0].tolist()
      ([-125.0, -124.0], [-233.0, -231.0])
    """
    kind = numpy_dtype(dtype)
    if verb in _LEAVES:
        shape, shifts = (nbytes // kind.itemsize // LEAVES,), range(_LEAVES[verb])
        mine = [pattern(rank, shape, shift, dtype) for shift in shifts]
        sent = sum(leaf.nbytes for leaf in mine)
        return Problem(
            verb, sent, kind, rank, size, mine, lambda: [pattern(0, shape, shift, dtype) for shift in shifts]
        )

    count, every = -(-nbytes // kind.itemsize), range(size)
    flat, blocks = (count,), (size, -(-count // size))
    share = (-(-count * (size - 1) // size),)
    of = partial(pattern, dtype=dtype)
    table: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None, Callable[[], Array]]] = {
        "allreduce": (flat, None, lambda: _total(of, flat, size)),
        "increment": (flat, None, lambda: of(rank, flat) + kind.type(1)),
        "copy": (flat, flat, lambda: of(rank, flat)),
        "copy_share": (share, share, lambda: of(rank, share)),
        "copy_all": ((size, count), (size, count), lambda: of(rank, (size, count))),
        "bcast": (flat, None, lambda: of(0, flat)),
        "allgather": (flat, (size, count), lambda: np.stack([of(r, flat) for r in every])),
        "reduce_scatter": (blocks, blocks[1:], lambda: _total(of, blocks, size)[rank]),
        "alltoall": (blocks, blocks, lambda: np.stack([of(r, blocks)[rank] for r in every])),
        "sendrecv": (flat, flat, lambda: of((rank - 1) % size, flat)),
    }
    sent_shape, out_shape, answer = table[verb]
    own = of(rank, sent_shape)
    grows = verb == "allreduce"
    return Problem(verb, own.nbytes, kind, rank, size, [own], lambda: [answer()], out_shape, grows)


def _total(of: Callable[[int, tuple[int, ...]], Array], shape: tuple[int, ...], size: int) -> Array:
    summed = of(0, shape)
    for rank in range(1, size):
        summed += of(rank, shape)
    return summed
