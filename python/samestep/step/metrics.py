"""Metrics over the data of all ranks, whose parts may differ in length."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from samestep import _core, arrays, trees
from samestep._util.json_layout import Many, Map
from samestep._util.text import short_repr
from samestep.errors import InvalidArgumentError
from samestep.group.backend_argument import takes_backend
from samestep.group.group import Group
from samestep.trees import scalars, signature
from samestep.trees.identity import attributes_text, is_array, is_number

_Tree = TypeVar("_Tree")


@takes_backend
def metric_mean(backend: Group, metrics: Mapping[str, tuple[Any, Any]]) -> dict[str, float]:
    """Means over all ranks: of each metric the sum of the sums over the sum of the counts. Collective.

    Sums are added without rounding and the quotient is rounded once, so that the result depends neither on the
    order of the ranks nor on how the items are split among them, as long as each rank's sum is exact.

    Args:
      backend: the group.
      metrics: by name, this rank's sum and count: numbers, or arrays of one element. A name may be missing on
        some ranks, which then add nothing.

    Returns:
      By name, in order of the first rank that has it, the mean. The same on all ranks.

    Raises:
      InvalidArgumentError: on all ranks: the counts of a metric add up to zero, a value is no real number or masked, or
        a count is negative.

    Example:
      >>> import samestep as ss
      >>> ss.metric_mean(ss.initialize(), {"loss": (6.0, 4), "accuracy": (3, 4)})
      {'loss': 1.5, 'accuracy': 0.75}
    """
    mine: Any
    try:
        if not isinstance(metrics, Mapping):
            kind = type(metrics).__name__
            raise InvalidArgumentError(
                f"metric_mean: the metrics are a dict, {{'loss': (sum, count)}}; got {kind}"
            )
        mine = {name: _pair(name, pair) for name, pair in metrics.items()}
    except InvalidArgumentError as error:  # raised on all ranks, which would wait for this one
        mine = str(error)
    with _core.UserCall("metric_mean"):
        everyone = backend._allgather_facts(mine, (Map([Many(str), Many(str)]), str))
    for rank, entry in enumerate(everyone):
        if isinstance(entry, str):
            raise InvalidArgumentError(f"{entry} on rank {rank}" if backend.size > 1 else entry)
    means = {}
    for name in dict.fromkeys(name for entry in everyone for name in entry):
        pairs = [[scalars.decode(words) for words in entry[name]] for entry in everyone if name in entry]
        means[name] = _quotient(name, [total for total, _ in pairs], [count for _, count in pairs])
    return means


def _pair(name: Any, pair: Any) -> list[list[str]]:
    if not isinstance(name, str):
        raise InvalidArgumentError(f"metric_mean: names are texts; got {short_repr(name)}")
    try:
        total, count = pair
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"metric_mean: {name!r} must be a sum and a count, {{{name!r}: (loss * n, n)}} for the mean over n items; "
            f"got {short_repr(pair)}"
        ) from None
    words = [_words(name, total), _words(name, count)]
    n = scalars.decode(words[1])
    if not n >= 0 or math.isinf(n):
        raise InvalidArgumentError(f"metric_mean: the count of {name!r} is {n}")
    return words


def _words(name: str, value: Any) -> list[str]:
    # Its `item` is 0, or what the mask hides.
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise InvalidArgumentError(
            f"metric_mean: leave {name!r} out where a rank has no items; its sum or count is masked"
        )
    if hasattr(value, "item"):
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            value = value.item()  # of NumPy, torch or JAX
    words = scalars.encode(value) if isinstance(value, (int, float)) else None
    if words is None:
        raise InvalidArgumentError(
            f"metric_mean: {name!r} must be a sum and a count, real numbers; got {type(value).__name__}"
        )
    return words


def _quotient(name: str, totals: list[float], counts: list[float]) -> float:
    from fractions import Fraction  # not needed by `import samestep`

    count = sum(map(Fraction, counts))
    if count == 0:
        raise InvalidArgumentError(f"metric_mean: the counts of {name!r} are zero on all ranks")
    if not all(map(math.isfinite, totals)):
        return float(sum(total for total in totals if not math.isfinite(total)))
    try:
        return float(sum(map(Fraction, totals)) / count)
    except OverflowError:
        return math.copysign(math.inf, sum(map(Fraction, totals)))


@takes_backend
def gather_metrics(backend: Group, tree: _Tree) -> _Tree:
    """Join the arrays of all ranks along axis 0, in order of rank, for metrics that need all items. Collective.

    Args:
      backend: the group.
      tree: arrays, which may differ in length between ranks; of the same structure on all ranks. A number counts as one
        row, None as no rows.

    Returns:
      A tree of new arrays, the same on all ranks; None where all ranks have None.

    Raises:
      MismatchError: on all ranks: the trees differ in structure, or arrays in dtype or in extents but the first.
      InvalidArgumentError: on all ranks: a leaf is neither array nor number nor None; names it.

    Example:
      >>> import numpy as np, samestep as ss
      >>> ss.gather_metrics(ss.initialize(), {"predicted": np.array([3, 1]), "loss": 0.5})
      {'predicted': array([3, 1]), 'loss': array([0.5])}
    """
    with _core.UserCall("gather_metrics"):
        flat = trees.flatten(tree)
        values = [_with_rows(leaf) for leaf in flat.leaves]
        known = [_kind(value) for value in values]
        layout = [Many(str), Many(([str, str, Many(int)], str, None))]
        everyone = backend._allgather_facts([flat.names, known], layout)
        kinds = _common_kinds(backend, [(names, rows) for names, rows in everyone])
        joined = [
            None if kind is None else _join(backend, value, kind)
            for value, kind in zip(values, kinds, strict=True)
        ]
    result: _Tree = flat.rebuild(joined)
    return result


def _with_rows(leaf: Any) -> Any:
    if is_number(leaf):
        return np.asarray([leaf])
    with contextlib.suppress(InvalidArgumentError):  # `_kind` passes the reason on to all ranks
        if is_array(leaf) and not arrays.info(leaf).shape:
            packed = np.empty(arrays.info(leaf).nbytes, np.uint8)
            _core.pack([leaf], packed)
            return arrays.like_bytes(packed, leaf, (1,))
    return leaf


def _kind(value: Any) -> list[Any] | str | None:
    """Library, dtype and shape of a row; or why the call does not take it."""
    if value is None:
        return None
    if not is_array(value):
        return f"a {type(value).__name__}, which is no array or number"
    try:
        info = arrays.info(value)
        if isinstance(value, np.ndarray) and (text := attributes_text(value)):
            return f"an array{text}, which would be lost; pass np.asarray(x)"
    except InvalidArgumentError as error:
        return str(error)
    return [arrays.of(value).name, info.dtype, list(info.shape[1:])]


def _common_kinds(backend: Group, everyone: list[tuple[list[str], list[Any]]]) -> list[Any]:
    """Of each leaf the library, the dtype and the shape of a row; None if no rank has an array."""
    act = "gather_metrics"
    described = []
    for names, kinds in everyone:
        refusals = {i: kind for i, kind in enumerate(kinds) if isinstance(kind, str)}
        what = [
            f"{kind[1]} rows of {tuple(kind[2])}" if isinstance(kind, list) else signature.ABSENT
            for kind in kinds
        ]
        described.append(signature.Description.of(act, names, signature.with_refusals(what, refusals)))
    signature.check_same(backend.name, described, absent_is_fine=True)
    return [
        next((kind for kind in column if kind is not None), None)
        for column in zip(*(kinds for _, kinds in everyone), strict=True)
    ]


def _join(backend: Group, value: Any, kind: list[Any]) -> Any:
    if value is None:
        library, dtype, row = kind
        value = arrays.from_bytes(None, library, dtype, (0, *row), backend.device)
    return backend.allgatherv(value)
