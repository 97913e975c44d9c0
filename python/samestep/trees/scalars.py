"""Python and NumPy numbers as plain values, restored with the same type and bits."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from samestep._util.json_layout import Many
from samestep.errors import MismatchError

LAYOUT = (None, Many(str))
_DTYPE = re.compile(r"[<>|=][biufc][0-9]{1,2}")


def encode(value: Any) -> list[str] | None:
    """A number as texts; None for one of another type, such as a fraction or a member of an enumeration.

    Example:
      >>> [decode(encode(x)) for x in (True, 1 << 80, 0.1, 1 - 2j)]
      [True, 1208925819614629174706176, 0.1, (1-2j)]
      >>> decode(encode(np.float16(0.1)))
      np.float16(0.1)
    """
    if type(value) in (bool, int):
        return [type(value).__name__, f"{value:x}"]
    if type(value) is float:
        return ["float", value.hex()]
    if type(value) is complex:
        return ["complex", value.real.hex(), value.imag.hex()]
    if isinstance(value, np.generic) and _DTYPE.fullmatch(value.dtype.str):
        return [value.dtype.str, value.tobytes().hex()]
    return None


def decode(words: list[str]) -> Any:
    """What `encode` was given; raises MismatchError if these are no words of it."""
    try:
        return _decode(*words)
    except (TypeError, ValueError, OverflowError) as error:
        raise MismatchError(f"{words!r} is not a number: {error}") from error


def _decode(kind: str, *texts: str) -> Any:
    if kind == "complex" and len(texts) == 2:
        return complex(float.fromhex(texts[0]), float.fromhex(texts[1]))
    if len(texts) != 1:
        raise ValueError("too many or too few words")
    if kind in ("bool", "int"):
        number = int(texts[0], 16)
        return bool(number) if kind == "bool" else number
    if kind == "float":
        return float.fromhex(texts[0])
    if not _DTYPE.fullmatch(kind):
        raise ValueError("no type of a number")
    (number,) = np.frombuffer(bytes.fromhex(texts[0]), np.dtype(kind))
    return number
