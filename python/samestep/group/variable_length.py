"""Variable-length collectives (the `v` forms of MPI), as methods of `Backend`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from samestep import _core, arrays
from samestep._util.json_layout import Many
from samestep.errors import InvalidArgumentError, MismatchError
from samestep.group import json_exchange
from samestep.group.method_support import MethodSupport
from samestep.group.work import Work

_A = TypeVar("_A")


def _lengths(counts: list[list[int]]) -> tuple[int, int]:
    """What `BlockLengths` of csrc/communicator/collective_args.h holds.

    Args:
      counts: by sender and receiver, the elements of each block.
    """
    blocks_by_receiver = zip(*counts, strict=True)
    return (
        max(max(row) for row in counts),
        max(sum(blocks) for blocks in (*counts, *blocks_by_receiver)),
    )


class VariableLengthMethods(MethodSupport):
    """Collectives on arrays whose number of rows (first extent) may differ between ranks."""

    def allgatherv(self, x: _A, *, out: _A | None = None, timeout: float | None = None) -> _A:
        """Gather the arrays of all ranks at every rank, concatenated along axis 0.

        Args:
          x: array whose first extent may differ between ranks; dtype and other extents are the same on all ranks.
          out: array of the shape of the result, to receive it.
          timeout: seconds, see the class.

        Returns:
          `out`, or a new array of shape `(sum of first extents, *x.shape[1:])`.

        Source: MPI 5.0, section 6.7 (MPI_Allgatherv).
        """
        limit = self._checked(timeout)
        return self._start_allgatherv(x, out, limit)._wait_blocking(limit)

    def iallgatherv(self, x: _A, *, out: _A | None = None) -> Work[_A]:
        """Non-blocking `allgatherv`; the call itself waits once, for the lengths."""
        return self._start_allgatherv(x, out, None)

    def _start_allgatherv(self, x: _A, out: _A | None, limit: float | None) -> Work[_A]:
        counts, shape = self._gather_counts(x, out, "allgatherv", limit)
        into, finish = self._output_of_shape(x, shape, out)
        return Work(self._comm.allgatherv(x, into, counts, _lengths([counts])), self._timeout, finish)

    def gatherv(
        self, x: _A, root: int = 0, *, out: _A | None = None, timeout: float | None = None
    ) -> _A | None:
        """Gather the arrays of all ranks at root, concatenated along axis 0. Elsewhere returns None.

        Args: as for `allgatherv`; `out` counts at root only.

        Source: MPI 5.0, section 6.5 (MPI_Gatherv).
        """
        limit = self._checked(timeout)
        return self._start_gatherv(x, root, out, limit)._wait_blocking(limit)

    def igatherv(self, x: _A, root: int = 0, *, out: _A | None = None) -> Work[_A | None]:
        """Non-blocking `gatherv`; the call itself waits once, for the lengths."""
        return self._start_gatherv(x, root, out, None)

    def _start_gatherv(self, x: _A, root: int, out: _A | None, limit: float | None) -> Work[_A | None]:
        self._require_root(root, "gatherv")
        counts, shape = self._gather_counts(x, out if self.rank == root else None, "gatherv", limit)
        if self.rank != root:
            return Work(self._comm.gatherv(x, None, [], root, _lengths([counts])), self._timeout)
        into, finish = self._output_of_shape(x, shape, out)
        return Work(self._comm.gatherv(x, into, counts, root, _lengths([counts])), self._timeout, finish)

    def scatterv(
        self,
        x: _A | None = None,
        counts: Sequence[int] | None = None,
        root: int = 0,
        *,
        out: _A | None = None,
        timeout: float | None = None,
    ) -> _A:
        """Scatter root's array: rank r gets the next `counts[r]` rows.

        Args:
          x: at root, an array of `sum(counts)` rows; elsewhere None.
          counts: at root, rows for each rank, each >= 0; elsewhere None.
          root: the rank, of this group, whose rows are sent.
          out: array for this rank's rows; None for a new array.
          timeout: seconds, see the class.

        Source: MPI 5.0, section 6.6 (MPI_Scatterv).
        """
        limit = self._checked(timeout)
        return self._start_scatterv(x, counts, root, out, limit)._wait_blocking(limit)

    def iscatterv(
        self,
        x: _A | None = None,
        counts: Sequence[int] | None = None,
        root: int = 0,
        *,
        out: _A | None = None,
    ) -> Work[_A]:
        """Non-blocking `scatterv`; the call itself waits once, for the counts from root."""
        return self._start_scatterv(x, counts, root, out, None)

    def _start_scatterv(
        self, x: _A | None, counts: Sequence[int] | None, root: int, out: _A | None, limit: float | None
    ) -> Work[_A]:
        def checked() -> tuple[int, ...]:
            shape = arrays.info(x, "scatterv").shape
            rows = self._row_counts(counts, shape, "scatterv")
            self._require_fitting(out, arrays.info(x).dtype, (rows[self.rank], *shape[1:]), "scatterv")
            return (*rows, *shape[1:])

        library, dtype, metadata = self._broadcast_metadata(x, root, "scatterv", checked, limit, out=out)
        rows, extents = metadata[: self.size], metadata[self.size :]
        shape = (rows[self.rank], *extents)
        into, finish = self._output_of_library(library, dtype, shape, x, out)
        row = int(np.prod(extents, dtype=np.int64))
        counts = [r * row for r in rows]
        inner = self._comm.scatterv(x if self.rank == root else None, into, counts, root, _lengths([counts]))
        return Work(inner, self._timeout, finish)

    def alltoallv(
        self, x: _A, send_counts: Sequence[int], *, out: _A | None = None, timeout: float | None = None
    ) -> tuple[_A, list[int]]:
        """Send the first `send_counts[0]` rows of `x` to rank 0, the next `send_counts[1]` to rank 1, and so on.

        Args:
          x: array of `sum(send_counts)` rows.
          send_counts: rows for each rank, each >= 0.
          out: array with as many rows as this rank receives.
          timeout: seconds, see the class.

        Returns:
          The received rows in rank order, and the number of rows from each rank.

        Source: MPI 5.0, section 6.8 (MPI_Alltoallv).
        """
        limit = self._checked(timeout)
        return self._start_alltoallv(x, send_counts, out, limit)._wait_blocking(limit)

    def ialltoallv(
        self, x: _A, send_counts: Sequence[int], *, out: _A | None = None
    ) -> Work[tuple[_A, list[int]]]:
        """Non-blocking `alltoallv`; the call itself waits once, for the lengths."""
        return self._start_alltoallv(x, send_counts, out, None)

    def _start_alltoallv(
        self, x: _A, send_counts: Sequence[int], out: _A | None, limit: float | None
    ) -> Work[tuple[_A, list[int]]]:
        known = arrays.info(x, "alltoallv")
        sent = self._row_counts(send_counts, known.shape, "alltoallv")
        self._require_usable("alltoallv", x, out)
        with _core.UserCall(f"alltoallv of {known.dtype}{list(known.shape)}"):
            gathered = self._allgather_facts(
                (known.dtype, known.shape[1:], sent), [str, Many(int), Many(int)], limit
            )
        table = [(dtype, tuple(extents), counts) for dtype, extents, counts in gathered]
        if any(len(counts) != self.size for *_, counts in table):
            raise MismatchError("alltoallv: a rank gave counts for another number of ranks")
        json_exchange.require_equal("alltoallv", "rows of (dtype, shape)", [entry[:2] for entry in table])
        received = [entry[2][self.rank] for entry in table]
        into, finish = self._output_of_shape(x, (sum(received), *known.shape[1:]), out)
        row = int(np.prod(known.shape[1:], dtype=np.int64))
        counts = [[n * row for n in entry[2]] for entry in table]
        inner = self._comm.alltoallv(
            x, counts[self.rank], into, [n * row for n in received], _lengths(counts)
        )
        return Work(inner, self._timeout, lambda: (finish(), received))

    # ---- helpers

    def _row_counts(self, counts: Sequence[int] | None, shape: tuple[int, ...], verb: str) -> list[int]:
        try:
            rows = [operator.index(n) for n in counts] if counts is not None else []
        except TypeError:
            rows = []
        if len(rows) != self.size or any(n < 0 for n in rows):
            raise InvalidArgumentError(f"{verb}: counts must be {self.size} whole numbers >= 0, got {counts}")
        if not shape or sum(rows) != shape[0]:
            raise InvalidArgumentError(
                f"{verb}: counts {rows} add up to {sum(rows)} rows but the array has shape {shape}"
            )
        return rows

    def _gather_counts(
        self, x: Any, out: Any, verb: str, limit: float | None
    ) -> tuple[list[int], tuple[int, ...]]:
        """Elements of each rank, and the joined shape, of arrays that differ along axis 0."""
        known = arrays.info(x, verb)
        if not known.shape:
            raise InvalidArgumentError(f"{verb}: an array without dimensions has no axis 0 to join along")
        self._require_usable(verb, x, out)
        with _core.UserCall(f"{verb} of {known.dtype}{list(known.shape)}"):
            gathered = self._allgather_facts((known.dtype, known.shape), [str, Many(int)], limit)
        table = [(dtype, tuple(shape)) for dtype, shape in gathered]
        json_exchange.require_equal(
            verb, "(dtype, shape without axis 0)", [(dtype, shape[1:]) for dtype, shape in table]
        )
        row = int(np.prod(known.shape[1:], dtype=np.int64))
        rows = [shape[0] for _, shape in table]
        return [n * row for n in rows], (sum(rows), *known.shape[1:])
