"""What to measure and how long: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from problems import DTYPES, FLOAT32, VERBS, WITHOUT_SIZES
from results import KIB, MIB, Cell

BACK_TO_BACK = 4 * KIB
"""Up to here also back to back; one call is then shorter than the exit from a barrier."""

_HEAVY = 64 * MIB  # bytes of all ranks' arrays that take about as long as a small cell is measured


@dataclass(frozen=True)
class Preset:
    """A choice of cells and of the time for them.

    Attributes:
      seconds: for all cells together; big arrays on slow machines may take longer.
      rounds: turns for each contender in each cell.
      sizes: bytes, of float32 allreduce.
      other_sizes: bytes, of the other verbs.
      half_sizes: bytes, of float16 and bfloat16 allreduce.
      dtypes: of allreduce.
      small_single: whether sizes up to `BACK_TO_BACK` are measured in single calls as well.
      import_pairs: interpreters to start for the time of the import.
    """

    seconds: float
    rounds: int
    sizes: Sequence[int]
    other_sizes: Sequence[int]
    half_sizes: Sequence[int]
    dtypes: Sequence[str]
    small_single: bool
    import_pairs: int


QUICK = Preset(
    seconds=120,
    rounds=3,
    sizes=(8, KIB, 4 * KIB, 64 * KIB, MIB, 16 * MIB),
    other_sizes=(8, 64 * KIB, MIB),
    half_sizes=(8 * MIB,),
    dtypes=(FLOAT32, "bfloat16"),
    small_single=False,
    import_pairs=7,
)

FULL = Preset(
    seconds=215,
    rounds=6,
    sizes=(8, 64, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB),
    other_sizes=(8, KIB, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB),
    half_sizes=(32 * KIB, 512 * KIB, 8 * MIB, 32 * MIB),  # as many elements as 64 KiB to 64 MiB of float32
    dtypes=DTYPES,
    small_single=True,
    import_pairs=15,
)


def cells(
    preset: Preset,
    *,
    verbs: Sequence[str] = VERBS,
    dtypes: Sequence[str] = (),
    sizes: Sequence[int] = (),
) -> list[Cell]:
    """What to measure, without repetition.

    Args:
      preset: where sizes and dtypes come from.
      verbs: which, in this order.
      dtypes: of allreduce, instead of the preset's. Other verbs move bytes; they are measured in float32.
      sizes: bytes, instead of the preset's, for all verbs that have sizes.

    Example:
      >>> [str(cell) for cell in cells(QUICK, verbs=["barrier", "bcast"], sizes=[8, 65536])]
      ['barrier back to back', 'bcast 8 B back to back', 'bcast 64 KiB']
    """
    found: dict[Cell, None] = {}
    for verb in verbs:
        for dtype in (dtypes or preset.dtypes) if verb == "allreduce" else (FLOAT32,):
            for nbytes in _sizes(preset, verb, dtype, sizes):
                for mode in _modes(preset, nbytes):
                    found[Cell(verb, dtype, nbytes, mode)] = None
    return list(found)


def _sizes(preset: Preset, verb: str, dtype: str, sizes: Sequence[int]) -> Sequence[int]:
    if verb in WITHOUT_SIZES:
        return (WITHOUT_SIZES[verb],)
    if sizes:
        return sizes
    if verb != "allreduce":
        return preset.other_sizes
    return preset.sizes if dtype == FLOAT32 else preset.half_sizes


def _modes(preset: Preset, nbytes: int) -> list[str]:
    if nbytes > BACK_TO_BACK:
        return ["single"]
    return ["single", "b2b"] if preset.small_single and nbytes else ["b2b"]


def share(seconds: float, left: Sequence[Cell], ranks: int) -> float:
    """How many of the seconds that are left the first of the cells that are left may use. Pure.

    Arrays of many MiB get more: they are slow to prepare and to verify, too.
    """
    weights = [_weight(cell, ranks) for cell in left]
    return max(0.0, seconds) * weights[0] / sum(weights)


def _weight(cell: Cell, ranks: int) -> float:
    arrays = {"allgather": 1 + ranks, "alltoall": 2, "sendrecv": 2}.get(cell.verb, 1)
    return 1 + ranks * arrays * cell.nbytes / _HEAVY
