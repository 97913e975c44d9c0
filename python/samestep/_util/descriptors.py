"""Prevents, recognizes and explains the lack of free file descriptors."""

from __future__ import annotations

import errno
import os
import resource


def allow(wanted: int, *, above: int = 0) -> None:
    """Raise this process's soft limit to `wanted` descriptors, as far as the hard limit permits.

    Soft limits that are lower than `above` stay as they are.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and above <= soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def allow_for_ranks(n_ranks: int) -> None:
    """The same for two descriptors for each rank beside those of the program.

    The usual soft limit, 1024, is for programs that call select(), and not meant as a bound; a lower one is.
    """
    allow(2 * n_ranks + 512, above=1024)


def are_used_up(error: OSError) -> bool:
    """Whether a call failed because the process or the machine has no descriptor left."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def reason(error: OSError) -> str:
    """Why a call failed, and the cure if that is `ulimit -n`.

    Example:
      >>> import errno
      >>> reason(OSError(errno.EACCES, "Permission denied"))
      'Permission denied'
    """
    if not are_used_up(error):
        return error.strerror or str(error)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"{error.strerror}: this process may have {limit}, and needs one for each rank; raise `ulimit -n`"


def open_closed() -> None:
    """Open those that are closed on /dev/null, so that no connection of ours gets the number that prints go to."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
