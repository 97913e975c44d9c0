"""Exchange of facts about the ranks: JSON of a known layout, never pickle.

So a rank that is none can send wrong facts at worst, which are refused, and no code.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from samestep import _core
from samestep._util.deadline import Deadline
from samestep._util.json_layout import loads
from samestep.errors import MismatchError

MOST_NBYTES = 1 << 28
"""Of one rank's facts."""


def allgather(comm: _core.Communicator, fact: Any, layout: Any, timeout: float) -> list[Any]:
    """All ranks' facts, in order of rank, with tuples as lists. Collective.

    Args:
      fact: a value that `json_layout.fits` accepts; NumPy integers count as ints.
      layout: of each rank's fact, as `samestep._util.json_layout.fits` has it.

    Raises:
      MismatchError: a rank's facts have another layout, e.g. those of another version; names the rank.

    Example:
      >>> import samestep as ss
      >>> backend = ss.initialize()
      >>> allgather(backend._comm, ("host", 4), [str, int], timeout=60)
      [['host', 4]]
    """
    found = allgather_bytes(comm, _encode(fact), timeout)
    return [_decode(data, layout, rank) for rank, data in enumerate(found)]


def gather(comm: _core.Communicator, fact: Any, layout: Any, root: int, timeout: float) -> list[Any] | None:
    """As `allgather`, but for root alone; None on the others. Collective."""
    deadline = Deadline(timeout)
    mine = np.frombuffer(_encode(fact), np.uint8)
    counts = _sizes(comm, mine.size, timeout)
    into = np.empty(sum(counts), np.uint8) if comm.rank == root else None
    comm.gatherv(mine, into, counts if into is not None else [], root).wait(deadline.left(), True)
    if into is None:
        return None
    return [_decode(data, layout, rank) for rank, data in enumerate(_cut(into, counts))]


def broadcast(comm: _core.Communicator, fact: Any, layout: Any, root: int, timeout: float) -> Any:
    """Root's fact. Collective; raises as `allgather`."""
    deadline = Deadline(timeout)
    data = np.frombuffer(_encode(fact) if comm.rank == root else b"", np.uint8)
    size = np.array([data.size], np.int64)
    comm.bcast(size, root).wait(timeout, True)
    _check_sizes([int(size[0])], root)
    into = data if comm.rank == root else np.empty(int(size[0]), np.uint8)
    comm.bcast(into, root).wait(deadline.left(), True)
    return _decode(into.tobytes(), layout, root)


def allgather_bytes(comm: _core.Communicator, mine: bytes, timeout: float) -> list[bytes]:
    """All ranks' bytes, in order of rank. Collective."""
    deadline = Deadline(timeout)
    counts = _sizes(comm, len(mine), timeout)
    into = np.empty(sum(counts), np.uint8)
    comm.allgatherv(np.frombuffer(mine, np.uint8), into, counts).wait(deadline.left(), True)
    return _cut(into, counts)


def require_equal(verb: str, what: str, facts: Sequence[Any]) -> None:
    """Raise MismatchError unless the facts of all ranks are equal: on all ranks, as all have gathered them."""
    if any(fact != facts[0] for fact in facts):
        listed = "; ".join(f"rank {rank}: {fact}" for rank, fact in enumerate(facts))
        raise MismatchError(f"{verb}: the ranks do not agree on {what}. {listed}")


def _sizes(comm: _core.Communicator, mine: int, timeout: float) -> list[int]:
    sizes = np.empty(comm.size, np.int64)
    comm.allgather(np.array(mine, np.int64), sizes).wait(timeout, True)
    counts = [int(n) for n in sizes]
    _check_sizes(counts)
    return counts


def _cut(joined: np.ndarray[Any, Any], counts: list[int]) -> list[bytes]:
    ends = np.cumsum(counts)
    return [joined[end - n : end].tobytes() for n, end in zip(counts, ends, strict=True)]


def _encode(fact: Any) -> bytes:
    import json  # not needed by `import samestep`

    return json.dumps(fact, default=operator.index, separators=(",", ":")).encode()


def _decode(data: bytes, layout: Any, rank: int) -> Any:
    try:
        return loads(data, layout, most=MOST_NBYTES)
    except ValueError as error:
        raise MismatchError(
            f"the message of rank {rank} is malformed ({error}); does it run this version of samestep?"
        ) from error


def _check_sizes(counts: list[int], first: int = 0) -> None:
    for rank, n in enumerate(counts, first):
        if not 0 <= n <= MOST_NBYTES:
            raise MismatchError(f"rank {rank} announces {n} bytes, where at most {MOST_NBYTES} are allowed")
