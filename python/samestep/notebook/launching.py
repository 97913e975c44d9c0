"""`launch`: one function call on each of several fresh ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from samestep.errors import InvalidArgumentError
from samestep.notebook.rank import dumps
from samestep.notebook.ranks import Ranks

_GRACE_S = 1.0  # for the other ranks to report, after one has failed


def launch_ranks(
    function: Callable[..., Any], n: int, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> list[Any]:
    """See `samestep.launch`."""
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"launch: n must be an int, got {type(n).__name__}")
    if n < 1:
        raise InvalidArgumentError(f"launch: n must be at least 1, got {n}")
    if not callable(function):
        raise TypeError(f"launch: the function must be callable, got {type(function).__name__}")
    try:
        order = dumps((function, tuple(arguments), dict(keywords)))
    except Exception as error:
        raise InvalidArgumentError(
            f"launch: the function or an argument cannot be pickled: {error}{_advice()}"
        ) from error
    if getattr(function, "__module__", "") == "__main__" and _advice():
        raise InvalidArgumentError(f"launch: other processes do not have this __main__{_advice()}")
    ranks = Ranks(n)
    results = ranks.order("call", order, grace=_GRACE_S)
    ranks.end()
    return [pickle.loads(result) for result in results]


def _advice() -> str:
    """What to install; empty if cloudpickle is there."""
    try:
        import cloudpickle  # noqa: F401
    except ImportError:
        return "; functions defined in a notebook or script need cloudpickle: pip install samestep[notebook]"
    return ""
