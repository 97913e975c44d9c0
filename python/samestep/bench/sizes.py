"""Numbers of bytes, parsed and formatted."""

from __future__ import annotations

KIB, MIB = 1 << 10, 1 << 20


def size(nbytes: int) -> str:
    """Bytes for people.

    Example:
      >>> size(8), size(65536)
      ('8 B', '64 KiB')
    """
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"
