"""Whether the kernel's number of a user is this process's own, and a proof of it."""

from __future__ import annotations

import functools
import os

_N_USERS = 0xFFFFFFFF


def is_own(uid: int) -> bool:
    """Whether `uid` is the user of this process, and nobody else.

    In a user namespace one number, 65534 most often, stands for all users that it does not map, and perhaps for this
    process's own; there it proves nothing.

    Example:
      >>> is_own(os.geteuid() + 1)
      False
    """
    return uid == os.geteuid() and not _is_of_many(uid)


def text(uid: int) -> str:
    """The number, for errors; with the cure where it stands for several users."""
    if _is_of_many(uid):
        return f"uid {uid}: all users that this user namespace does not map; map the job's own, as by `unshare -r`"
    return f"uid {uid}"


def _is_of_many(uid: int) -> bool:
    if uid != _unmapped():
        return False
    mapped = _read("/proc/self/uid_map", f"0 0 {_N_USERS}").splitlines()
    return sum(int(line.split()[2]) for line in mapped) < _N_USERS


@functools.cache  # a setting of the kernel; groups are opened by the hundred
def _unmapped() -> int:
    return int(_read("/proc/sys/kernel/overflowuid", "65534"))


def _read(path: str, otherwise: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return otherwise
