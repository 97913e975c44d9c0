"""Splits the output of a process into whole lines."""

from __future__ import annotations

LONGEST_LINE = 1 << 24
_LONG_PROGRESS = 1 << 16


class Lines:
    r"""Splits the output of one descriptor into whole lines.

    A line ends at a newline. A progress bar that only ever returns the carriage is cut at a return once it is
    64 KiB long, and any line at 16 MiB, so that memory stays bounded; such a piece gets a newline of its own.

    Example:
      >>> lines = Lines()
      >>> lines.feed(b"one\ntw"), lines.unfinished, lines.feed(b"o\nthree"), lines.remainder()
      (b'one\n', b'tw', b'two\n', b'three\n')
    """

    def __init__(self) -> None:
        self._unfinished = bytearray()

    @property
    def unfinished(self) -> bytes:
        """What came after the last newline."""
        return bytes(self._unfinished)

    def feed(self, data: bytes) -> bytes:
        """Adds `data`; returns the lines that are whole now, each with its newline."""
        end = data.rfind(b"\n") + 1
        whole = b""
        if end:
            whole = bytes(self._unfinished) + data[:end]
            self._unfinished.clear()
        self._unfinished += data[end:]
        if len(self._unfinished) > _LONG_PROGRESS and b"\r" in data:
            whole += self._cut(self._unfinished.rfind(b"\r") + 1)
        if len(self._unfinished) > LONGEST_LINE:
            whole += self._cut(LONGEST_LINE)
        return whole

    def remainder(self) -> bytes:
        """What is unfinished, with a newline; nothing is left."""
        return self._cut(len(self._unfinished))

    def _cut(self, end: int) -> bytes:
        piece = bytes(self._unfinished[:end])
        del self._unfinished[:end]
        return piece + b"\n" if piece else b""
