"""Recognizes and explains the lack of free file descriptors."""

from __future__ import annotations

import errno
import resource


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
