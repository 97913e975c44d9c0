"""What agents and their launcher say to each other, and how it is cut into bytes.

From an agent:

* `HELLO` (JSON: token, host, rank, size), at once;
* `STARTED` (JSON: pid), `LINES` (whole ones), and where asked for `PARTIAL` (the unfinished one);
* `TAKEN` (JSON: a number): as many bytes of `INPUT` need no more room;
* `CUT_OFF`: `mpirun` ended the agent's stub;
* `EXITED` (JSON: status, time, signals, signalled_at, error, as in `ending.Ending`): the rank ended;
* `DONE`: everything that the rank started is gone, too.

From the launcher: `START` (JSON: argv, env, cwd, stdin, live), `INPUT` (bytes for rank 0, none at the end),
`SIGNAL` (JSON: a number), `LEAVE`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

HELLO, STARTED, TAKEN, CUT_OFF, EXITED, DONE = b"H", b"P", b"T", b"M", b"X", b"D"
START, INPUT, SIGNAL, LEAVE = b"S", b"I", b"K", b"L"
LINES, PARTIAL = {1: b"o", 2: b"e"}, {1: b"O", 2: b"E"}  # by the rank's descriptor

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
