"""What the methods of a group share: timeouts, outputs, checks of arguments, and the exchange of metadata."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from samestep import _core, arrays
from samestep._util.deadline import seconds
from samestep._util.json_layout import Many
from samestep.errors import InvalidArgumentError, UnavailableError
from samestep.group import json_exchange
from samestep.reduce_ops import ReduceOp, why_too_large


class MethodSupport(_core.FastGroup):
    """The base of the classes whose methods are the operations of a group."""

    _device: int | None
    """Index of this rank's GPU, which need not be the thread's current device."""

    @property
    def rank(self) -> int:
        """The rank of this process in the group, 0 <= rank < size."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """The number of ranks of the group."""
        return self._comm.size

    # ---- timeouts

    @staticmethod
    def _checked(timeout: float | None) -> float | None:
        """The timeout of a blocking call, None for the group's; to be called before anything is started."""
        return None if timeout is None else seconds(timeout)

    def _within(self, limit: float | None) -> float:
        return self._timeout if limit is None else limit

    # ---- outputs

    def _output_like(self, x: Any, out: Any, is_number: bool, verb: str) -> tuple[Any, Callable[[], Any]]:
        """The output array (None: `x` itself) and a function that returns the result, which has the shape of `x`."""
        if out is not None:
            return out, lambda: out
        if is_number:
            return None, x.item
        known = arrays.info(x, verb)
        return (None, lambda: x) if known.writable else self._output_of_shape(x, known.shape, None)

    def _output_of_shape(self, x: Any, shape: tuple[int, ...], out: Any) -> tuple[Any, Callable[[], Any]]:
        """The output array and a function that returns the result, which has this shape."""
        if out is not None:
            return out, lambda: out
        row = arrays.of(x)
        into = row.like(x, shape)
        return into, lambda: row.finish(into, like=x)

    def _output_of_library(
        self, library: str, dtype: str, shape: tuple[int, ...], x: Any, out: Any
    ) -> tuple[Any, Callable[[], Any]]:
        """The same for a result that has the library and dtype of root's array; `x`: what is given here."""
        if out is not None:
            return out, lambda: out
        row = arrays.named(library)
        into = row.new(dtype, shape, self._device)
        return into, lambda: row.finish(into, sharding=arrays.sharding_of(x))

    def _to_average(self, x: Any, target: Any, op: int, verb: str) -> Any | None:
        """A float32 copy of what is averaged, if NCCL would round each product and each addition to 16 bits.

        None if NCCL is not used, or the arrays' library cannot convert them: then the host averages.
        """
        if op != ReduceOp.AVG.value or not _core.has_nccl(self._comm):
            return None
        if not (arrays.converts(x) and arrays.converts(target)):
            return None
        # Before the conversion, which a capture that continues after an error would contain.
        self._require_usable(verb, x, target, reduced="float32")
        _core.settle([x])
        return arrays.of(x).widen(x)

    def _block_shape(self, shape: tuple[int, ...], verb: str) -> tuple[int, ...]:
        if not shape or shape[0] != self._comm.size:
            raise InvalidArgumentError(
                f"{verb}: the array must have shape (size, ...) = ({self._comm.size}, ...), got {shape}"
            )
        return shape[1:]

    def _require_blocks(self, shape: tuple[int, ...], verb: str) -> None:
        if not shape or shape[0] % self._comm.size:
            raise InvalidArgumentError(
                f"{verb}: the first extent of shape {shape} is not a multiple of the {self._comm.size} ranks"
            )

    def _require_fitting(self, out: Any, dtype: str, shape: tuple[int, ...], verb: str) -> None:
        """Raise InvalidArgumentError unless `out` fits; for calls in which the core does not see the input."""
        if out is None:
            return
        given = arrays.info(out, f"{verb}: out")
        if given.dtype != dtype or math.prod(given.shape) != math.prod(shape) or not given.writable:
            writable = "" if given.writable else "read-only "
            raise InvalidArgumentError(
                f"{verb}: out is {writable}{given.dtype}{list(given.shape)}, but the result is {dtype}{list(shape)}"
            )

    def _require_usable(self, verb: str, *given: Any, reduced: str = "") -> None:
        """Raise what the operation would raise because of the memory of these arrays (None: not given).

        Called before ranks exchange anything, in whose place the others learn why this rank is refused. `reduced`: see
        `_core.tell_refusal`.
        """
        try:
            self._check_usable(verb, *given)
        except (InvalidArgumentError, UnavailableError) as error:
            _core.tell_refusal(self._comm, verb, str(error), reduced=reduced)
            raise

    def _require_exact(self, x: Any, op: int, factor: float, verb: str) -> None:
        """Raise InvalidArgumentError if a result of ints of Python might not fit; the others learn why."""
        if why := why_too_large(x, op, factor, self._comm.size):
            _core.tell_refusal(self._comm, verb, why, reduced="")
            raise InvalidArgumentError(f"{verb}: {why}")

    def _check_usable(self, verb: str, *given: Any) -> None:
        _core.check_arrays(self._comm, verb, [x for x in given if x is not None])

    @staticmethod
    def _rank_number(given: Any, verb: str, what: str) -> int:
        """Convert a rank or colour to an int that fits into one of C; the core checks that the rank exists."""
        if hasattr(given, "shape") and len(given.shape) > 0:  # as in MPI's Gather(x, y)
            advice = "; pass the output array by keyword: out=" if what == "root" else ""
            raise TypeError(f"{verb}: {what} must be an int, but it is an array{advice}")
        try:
            number = operator.index(given)
        except TypeError:
            raise TypeError(f"{verb}: {what} must be an int, got {given!r}") from None
        if not -(2**31) <= number < 2**31:
            raise InvalidArgumentError(f"{verb}: {what} {number} is not between -2**31 and 2**31 - 1")
        return number

    @staticmethod
    def _tag_number(given: Any, verb: str, *, or_any: bool = False) -> int:
        try:
            tag = operator.index(given)
        except TypeError:
            raise TypeError(f"{verb}: tag must be an int, got {given!r}") from None
        if not (0 <= tag < 2**31 or (or_any and tag == -1)):
            size = "negative" if tag < 0 else "too large"
            raise InvalidArgumentError(f"{verb}: tag {tag} is {size}; tags are 0..{2**31 - 1}")
        return tag

    def _require_root(self, root: int, verb: str) -> None:
        root = self._rank_number(root, verb, "root")
        if not 0 <= root < self._comm.size:
            raise InvalidArgumentError(
                f"{verb}: root {root} is outside this group's ranks 0..{self._comm.size - 1}"
            )

    def _allgather_facts(self, fact: Any, layout: Any, timeout: float | None = None) -> list[Any]:
        """Allgather one JSON value per rank; see `json_exchange.allgather`."""
        return json_exchange.allgather(self._comm, fact, layout, self._within(timeout))

    def _bcast_facts(self, fact: Any, layout: Any, root: int, timeout: float | None = None) -> Any:
        """Broadcast a JSON value from root; see `json_exchange.broadcast`."""
        return json_exchange.broadcast(self._comm, fact, layout, root, self._within(timeout))

    def _broadcast_metadata(
        self,
        x: Any,
        root: int,
        verb: str,
        shape: Callable[[], tuple[int, ...]],
        limit: float | None,
        *,
        out: Any,
    ) -> tuple[str, str, tuple[int, ...]]:
        """Broadcast library, dtype and shape of root's array, or the error that prevents root from sending it."""
        self._require_root(root, verb)
        metadata: Any = None
        failed: Exception | None = None
        if self._comm.rank != root:
            self._require_usable(verb, out)
        else:
            try:
                dtype = arrays.info(x, verb).dtype
                metadata = (arrays.of(x).name, dtype, shape())
                self._check_usable(verb, x, out)
            except (TypeError, ValueError, UnavailableError) as error:
                failed, metadata = error, str(error)
        with _core.UserCall(f"{verb}(root={root})"):
            metadata = self._bcast_facts(metadata, ([str, str, Many(int)], str), root, limit)
        if failed is not None:
            raise failed
        if isinstance(metadata, str):
            raise InvalidArgumentError(
                f"{verb}: root rank {root} cannot send: {metadata.removeprefix(f'{verb}: ')}"
            )
        library, dtype, extents = metadata
        return library, dtype, tuple(extents)
