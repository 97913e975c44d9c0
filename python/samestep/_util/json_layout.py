"""JSON from a peer, checked against the layout that it must have. Nothing else is ever parsed from a socket."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, NoReturn

_INTS = range(-(1 << 63), 1 << 63)


class Many(NamedTuple):
    """A list of any length, all of whose items have one layout."""

    item: Any


class Map(NamedTuple):
    """An object with any names, all of whose values have one layout."""

    value: Any


def loads(data: bytes, layout: Any, *, most: int = 1 << 20) -> Any:
    """The value that `data`, JSON in UTF-8, holds, with tuples as lists.

    Raises:
      ValueError: `data` is longer than `most`, or is no JSON, or has another layout. No other error is possible.

    Example:
      >>> loads(b'["host", 29500]', [str, int])
      ['host', 29500]
    """
    if len(data) > most:
        raise ValueError(f"{len(data)} bytes, where at most {most} are allowed")
    import json  # `import samestep` does without

    try:
        value = json.loads(data, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not fits(value, layout):
        raise ValueError(f"it has another layout: {data[:80]!r}")
    return value


def fits(value: Any, layout: Any) -> bool:
    """Whether a value that JSON may hold has a layout. Pure.

    Args:
      value: of any type.
      layout: `bool`, `int` (of 64 bits), `float` (finite, or an int), `str` or None; a tuple of layouts, of which
        one must fit; a list of layouts, one for each item; a dict of layouts, one for each name; `Many` or `Map`.

    Example:
      >>> fits([1, "a"], [int, str]), fits([True], [int]), fits({"n": 1}, {"n": (int, None)}), fits([], Many(int))
      (True, False, True, True)
    """
    if layout is None or isinstance(layout, type):
        return _is_scalar(value, layout)
    if isinstance(layout, Many):
        return isinstance(value, (list, tuple)) and all(fits(item, layout.item) for item in value)
    if isinstance(layout, Map):
        return isinstance(value, dict) and all(
            isinstance(name, str) and fits(item, layout.value) for name, item in value.items()
        )
    if isinstance(layout, tuple):
        return any(fits(value, one) for one in layout)
    if isinstance(layout, list):
        return (
            isinstance(value, (list, tuple))
            and len(value) == len(layout)
            and all(fits(item, one) for item, one in zip(value, layout, strict=True))
        )
    return (
        isinstance(value, dict)
        and value.keys() == layout.keys()
        and all(fits(value[k], one) for k, one in layout.items())
    )


def _is_scalar(value: Any, kind: type | None) -> bool:
    if kind is None:
        return value is None
    if kind is float:
        return (type(value) is float and math.isfinite(value)) or (type(value) is int and value in _INTS)
    return type(value) is kind and (kind is not int or value in _INTS)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")
