"""The frames in which two processes exchange data: a kind of one byte, the length, the content."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

_HEADER = struct.Struct("!cI")


def encode(kind: bytes, content: object = b"") -> bytes:
    """One frame: a kind of one byte, the length, and bytes or (anything else) JSON."""
    payload = content if isinstance(content, bytes) else json.dumps(content).encode()
    return _HEADER.pack(kind, len(payload)) + payload


class Decoder:
    """Cuts a stream of bytes into the frames that `encode` made."""

    def __init__(self, *, most: int) -> None:
        self.most = most
        self._bytes = bytearray()

    @property
    def n_waiting(self) -> int:
        """Bytes of a frame that is not complete."""
        return len(self._bytes)

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yields (kind, payload) of each frame that is complete now.

        Raises:
          ValueError: a frame is longer than `most` bytes, so this is not one of ours.
        """
        self._bytes += data
        while len(self._bytes) >= _HEADER.size:
            kind, nbytes = _HEADER.unpack_from(self._bytes)
            if nbytes > self.most:
                raise ValueError(f"a frame of {nbytes} bytes where at most {self.most} are allowed")
            end = _HEADER.size + nbytes
            if len(self._bytes) < end:
                return
            payload = bytes(self._bytes[_HEADER.size : end])
            del self._bytes[:end]
            yield kind, payload
