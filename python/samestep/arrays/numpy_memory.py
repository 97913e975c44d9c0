"""`initialize(shared_arrays=True)`: NumPy allocates from memory that the ranks of a host share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from samestep import _core, _settings
from samestep.errors import InvalidArgumentError

_FREE = ("MemAvailable:", "SwapFree:")  # of /proc/meminfo
_KEPT = 4  # one in so many bytes of the limit may wait unused


def begin(comm: _core.Communicator, n_local: int) -> Callable[[], None]:
    """Arrays that NumPy makes in this context lie in memory shared with the ranks of `comm` on this host, `n_local`.

    Environment: `SAMESTEP_SHARED_LIMIT` is the most memory of this rank, in bytes; beyond it arrays are ordinary.

    Returns:
      What ends it, to be called in the same context. Nothing begins where ranks share no memory.
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
    """
    return usable_nbytes // 2 // n_ranks


def usable_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: the machine's, or less if its control group says so."""
    usable = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([usable, *(limit for limit, _ in _group_limits(root))])


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process can still use, without what caches of files hold; None if that cannot be found out."""
    found = [limit - used for limit, used in _group_limits(root)]
    try:
        lines = [line.split() for line in (root / "proc/meminfo").read_text().splitlines()]
    except OSError:
        return min(found, default=None)
    return min([*found, sum(int(words[1]) << 10 for words in lines if words[0] in _FREE)])


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """The limits of the control groups of this process, and how much of each is used."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        if controllers == "":  # version 2
            home, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            home, limit, usage = (
                root / "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        relative = Path(group.lstrip("/"))
        for folder in (relative, *relative.parents):  # a container may not see all ancestors
            try:
                most = int((home / folder / limit).read_text())
            except (OSError, ValueError):  # no such file; "max"
                continue
            yield most, _used(home / folder, usage)


def _used(folder: Path, usage: str) -> int:
    try:
        caches = [line.split() for line in (folder / "memory.stat").read_text().splitlines()]
        freed = sum(int(words[1]) for words in caches if words[0] in ("inactive_file", "active_file"))
        return max(0, int((folder / usage).read_text()) - freed)
    except (OSError, ValueError):
        return 0
