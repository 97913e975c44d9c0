"""The backend as the first argument of a function, and the error of a call that forgets it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from samestep.group.collectives import CollectiveMethods

_F = TypeVar("_F", bound=Callable[..., Any])


def not_a_backend(call: str, *given: Any) -> TypeError:
    """The error of a function whose first argument is not the backend.

    Args:
      call: how it is called, "same(backend, tree)".
      given: the arguments.
    """
    kinds = ", ".join(f"the class {x.__name__}" if isinstance(x, type) else type(x).__name__ for x in given)
    return TypeError(
        f"{call.partition('(')[0]}: the first argument is the backend, got {kinds or 'nothing'}; "
        f"call {call} with backend = samestep.get_distributed_backend()"
    )


def _call_of(function: Callable[..., Any]) -> str:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    required = [str(p).partition(":")[0] for p in parameters if p.default is p.empty]
    return f"{function.__name__}({', '.join(['backend', *required])})"


def require_backend(function: Callable[..., Any], given: Any) -> None:
    """Raise TypeError unless `given`, the first argument of `function`, is a backend."""
    if not isinstance(given, CollectiveMethods):
        raise not_a_backend(_call_of(function), given)


def takes_backend(function: _F) -> _F:
    """A function that requires a backend first, before Python complains about the arguments that are missing then."""

    @functools.wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        first = args or [keywords[name] for name in ["backend"] if name in keywords]
        if not first or not isinstance(first[0], CollectiveMethods):
            raise not_a_backend(_call_of(function), *first)
        return function(*args, **keywords)

    return checked  # type: ignore[return-value]
