"""Ranks and values as they are written in messages, and warnings."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any

LINE_HEAD = rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[\d+ / \d+\] "
"""What a line of `println` begins with, as a pattern. `samestep run` puts no prefix of its own before it."""


def warn(text: str) -> None:
    """Logs a warning of samestep."""
    import logging  # costs as much to import as half the package

    logging.getLogger("samestep").warning(text)


def ranks_text(numbers: Sequence[int]) -> str:
    """Names ranks briefly; `numbers` ascend.

    Example:
      >>> ranks_text([0, 1, 2, 5]), ranks_text([3]), ranks_text([])
      ('ranks 0-2, 5', 'rank 3', 'no rank')
    """
    text = numbers_text(numbers)
    return f"rank{'s' if len(numbers) > 1 else ''} {text}" if text else "no rank"


def numbers_text(numbers: Sequence[int]) -> str:
    """Ascending numbers in brief.

    Example:
      >>> numbers_text([0, 1, 2, 5])
      '0-2, 5'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def by_rank(texts: Sequence[str]) -> str:
    """`a on ranks 0, 2 and b on rank 1`"""
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(str(rank))
    return " and ".join(f"{text} on rank{'s' * (len(r) > 1)} {', '.join(r)}" for text, r in ranks.items())


_MAX_ERROR = 2000  # characters
_NOT_SENDABLE = re.compile("[\0\ud800-\udfff]")  # by UTF-8, or by a string of C


def sendable(text: str) -> str:
    r"""`text` with those characters escaped that cannot be sent to another process, or cannot be encoded.

    Example:
      >>> print(sendable("name \udcff"))
      name \udcff
    """
    return _NOT_SENDABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def error_text(error: BaseException) -> str:
    """The text of an exception, for other processes: short, and never an error itself.

    Example:
      >>> error_text(KeyError("lr")), error_text(OSError(2, "No such file"))
      ("'lr'", '[Errno 2] No such file')
    """
    try:
        return sendable(str(error)[:_MAX_ERROR])
    # Whatever its __str__ does: the other ranks have to learn that this one has ended.
    except BaseException as another:
        return f"(its text cannot be made: {type(another).__name__})"


def error_line(error: BaseException) -> str:
    """Class and text of an exception, as the last line of a traceback has them; see `error_text`.

    Example:
      >>> error_line(KeyError("lr")), error_line(MemoryError())
      ("KeyError: 'lr'", 'MemoryError')
    """
    text = error_text(error)
    return sendable(type(error).__name__) + (f": {text}" if text else "")


def chain(error: BaseException | None, *, suppressed: bool = True) -> Iterator[BaseException]:
    """`error` and those that it was raised from or while handling; `suppressed`: also those hidden by `from None`."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        try:
            hidden = error.__suppress_context__ and not suppressed
            error = error.__cause__ or (None if hidden else error.__context__)
        except Exception:  # of a class that defines these names otherwise
            return


def short_repr(value: Any) -> str:
    """What a user gave, for an error text, which has to stay readable."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python prints no int of more than 4300 digits
        return "a very large int"


def size(nbytes: int | None) -> str:
    """Bytes for people; None for no limit.

    Example:
      >>> size(64 << 20), size(3 << 29), size(None), size(8192), size(8)
      ('64 MiB', '1.5 GiB', 'unlimited', '8 KiB', '8 B')
    """
    if nbytes is None:
        return "unlimited"
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"
