"""The frames in which two processes exchange data: a kind of one byte, the length, the content, a proof of origin."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

_HEADER = struct.Struct("!cI")
_NUMBER = struct.Struct("!Q")
_KEY_NBYTES = 32
_MAC_NBYTES = 16
OVERHEAD_NBYTES = _HEADER.size + _MAC_NBYTES
"""What a frame with a proof is longer than its content."""


class Channel:
    """Both directions of one connection, as bytes: makes frames to send, and cuts what arrives into frames.

    With keys, each content is encrypted, and each frame ends with the first half of an HMAC-SHA256 over its number and
    its bytes. So nobody else can read contents, or add, change, repeat, leave out or reorder frames. The standard
    library has no cipher: the content is XORed with the output of SHAKE256 for the key and the frame's number.

    Args:
      most: bytes of the longest content that is accepted.
      keys: of the frames sent and of those received, 64 bytes each; None where the kernel vouches for the other end.
      readable: kinds whose contents are not encrypted, because there is much of them.

    Example:
      >>> mine, yours = bytes(range(64)), bytes(64)
      >>> one, other = Channel(most=100, keys=(mine, yours)), Channel(most=100, keys=(yours, mine))
      >>> list(other.feed(one.seal(b"Q", ["add", 1])))
      [(b'Q', b'["add", 1]')]
    """

    def __init__(
        self, *, most: int, keys: tuple[bytes, bytes] | None = None, readable: frozenset[bytes] = frozenset()
    ) -> None:
        self._most = most
        self._sending = None if keys is None else _Seal(keys[0])
        self._receiving = None if keys is None else _Seal(keys[1])
        self._readable = readable
        self._bytes = bytearray()

    @property
    def n_waiting(self) -> int:
        """Bytes of a frame that is not complete."""
        return len(self._bytes)

    def seal(self, kind: bytes, content: object = b"") -> bytes:
        """The next frame: a kind of one byte, and bytes or (anything else) JSON."""
        payload = content if isinstance(content, bytes) else json.dumps(content).encode()
        header = _HEADER.pack(kind, len(payload))
        if self._sending is None:
            return header + payload
        self._sending.number += 1
        if kind not in self._readable:
            payload = self._sending.crypt(payload)
        frame = header + payload
        return frame + self._sending.proof(frame)

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yields (kind, payload) of each frame that is complete now.

        Raises:
          ValueError: a frame is too long, or not the next one that the other end has sealed.
        """
        self._bytes += data
        n_proof = 0 if self._receiving is None else _MAC_NBYTES
        while len(self._bytes) >= _HEADER.size:
            kind, nbytes = _HEADER.unpack_from(self._bytes)
            if nbytes > self._most:
                raise ValueError(f"a frame of {nbytes} bytes where at most {self._most} are allowed")
            end = _HEADER.size + nbytes
            if len(self._bytes) < end + n_proof:
                return
            frame, proof = bytes(self._bytes[:end]), bytes(self._bytes[end : end + n_proof])
            del self._bytes[: end + n_proof]
            payload = frame[_HEADER.size :]
            if self._receiving is not None:
                self._receiving.number += 1
                self._receiving.check(frame, proof)
                if kind not in self._readable:
                    payload = self._receiving.crypt(payload)
            yield kind, payload


class _Seal:
    """One direction. Each frame has a number, which no other frame under this key has."""

    def __init__(self, key: bytes) -> None:
        self._mac_key, self._stream_key = key[:_KEY_NBYTES], key[_KEY_NBYTES:]
        self.number = 0

    def proof(self, frame: bytes) -> bytes:
        import hmac

        whole: bytes = hmac.digest(self._mac_key, _NUMBER.pack(self.number) + frame, "sha256")
        return whole[:_MAC_NBYTES]

    def check(self, frame: bytes, proof: bytes) -> None:
        import hmac

        if not hmac.compare_digest(self.proof(frame), proof):
            raise ValueError("a frame that the other end has not sent, or not in this place")

    def crypt(self, content: bytes) -> bytes:
        """Encrypts, or decrypts."""
        import hashlib

        stream = hashlib.shake_256(self._stream_key + _NUMBER.pack(self.number)).digest(len(content))
        mixed = int.from_bytes(content, "little") ^ int.from_bytes(stream, "little")
        return mixed.to_bytes(len(content), "little")
