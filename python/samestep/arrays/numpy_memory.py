"""`initialize(shared_arrays=True)`: NumPy allocates from memory that the ranks of a host share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from samestep import _core, _settings
from samestep.errors import InvalidArgumentError

__all__ = ["begin", "default_limit", "usable_memory"]

_KEPT = 4  # one in so many bytes of the limit may wait unused


def begin(comm: _core.Communicator, n_local: int) -> Callable[[], None]:
    """Arrays that NumPy makes in this context lie in memory shared with the ranks of `comm` on this host, `n_local`.

    Environment: `SAMESTEP_SHARED_LIMIT` is the most memory of this rank, in bytes; beyond it arrays are ordinary.

    Returns:
      What ends it, to be called in the same context. Nothing begins where ranks share no memory.

    Raises:
      InvalidArgumentError: `SAMESTEP_SHARED_LIMIT` is not a number of bytes.
      UnavailableError: this NumPy lets nobody else give it memory.
    """
    limit = _limit(n_local)
    numpy_memory = _core.share_numpy(comm, limit, limit // _KEPT)
    return numpy_memory.remove if numpy_memory is not None else lambda: None


def _limit(n_ranks: int) -> int:
    text = _settings.get(_settings.SHARED_LIMIT)
    if text is None:
        return default_limit(usable_memory(), n_ranks)
    if not text.isdecimal():
        raise InvalidArgumentError(
            f"initialize: SAMESTEP_SHARED_LIMIT must be a number of bytes, got {text!r}"
        )
    return int(text)


def default_limit(usable_nbytes: int, n_ranks: int) -> int:
    """Half of the memory, in equal parts for the ranks of the host.

    Shared memory is present from its first use on, also that of an array of which little is ever used. Such
    arrays, if large, are better off as ordinary ones.

    Example:
      >>> default_limit(64 << 30, n_ranks=8) >> 30
      4
    """
    return usable_nbytes // 2 // n_ranks


def usable_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: the machine's, or less if its control group says so."""
    usable = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return usable
    limits = [_group_limit(root, *line.split(":", 2)[1:]) for line in groups if line.count(":") >= 2]
    return min([usable, *(limit for limit in limits if limit is not None)])


def _group_limit(root: Path, controllers: str, group: str) -> int | None:
    """The lowest limit of `group` and its ancestors; a container may not see all ancestors."""
    if controllers == "":  # version 2
        home, name = root / "sys/fs/cgroup", "memory.max"
    elif "memory" in controllers.split(","):
        home, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
    else:
        return None
    relative = Path(group.lstrip("/"))
    found = []
    for folder in (relative, *relative.parents):
        try:
            found.append(int((home / folder / name).read_text()))
        except (OSError, ValueError):  # no such file; "max"
            continue
    return min(found, default=None)
