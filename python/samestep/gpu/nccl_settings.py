"""The variables and files by which NCCL is configured."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Mapping

from samestep import _settings


def defaults(env: Mapping[str, str], files: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """What to set before NCCL starts, where the user has not. Pure.

    Source: NCCL documentation, "Environment Variables" and "Using multiple NCCL communicators concurrently".

    Example:
      >>> defaults({"SAMESTEP_SOCKET_IFNAME": "eth1,eth2", "NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, {})
      {'NCCL_SOCKET_IFNAME': '=eth1,eth2'}
    """
    wanted = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
    wanted = {name: value for name, value in wanted.items() if not env.get(name) and name not in files}
    return wanted | interfaces(env, files)


def interfaces(env: Mapping[str, str], files: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """What to set, where the user has not, for NCCL to use the network interfaces that the package uses. Pure."""
    names, variable = _settings.get(_settings.SOCKET_IFNAME, env), "NCCL_SOCKET_IFNAME"
    if not names or env.get(variable) or variable in files:
        return {}
    # These interfaces, not all whose names begin so.
    return {variable: "=" + ",".join(name.strip() for name in names.split(","))}


def of_files(env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The variables that NCCL will set from its configuration files: the value of each, and the file.

    Source: NCCL documentation, "Environment Variables".
    """
    files = ["/etc/nccl.conf"]
    with contextlib.suppress(KeyError):  # a user without an entry, as in containers, has no file either
        home = pwd.getpwuid(os.getuid()).pw_dir
        files.insert(0, os.path.join(home, ".nccl.conf"))
    if chosen := env.get("NCCL_CONF_FILE"):
        files = [chosen, "/etc/nccl.conf"]
    found: dict[str, tuple[str, str]] = {}
    for file in files:
        with contextlib.suppress(OSError), open(file, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, equals, value = line.rstrip("\n").partition("=")
                if equals and not line.startswith("#"):
                    found.setdefault(name, (value, file))
    return found


def problem(env: Mapping[str, str], files: Mapping[str, tuple[str, str]]) -> str:
    """What is wrong with the settings by which NCCL overrides what it is asked for, "" if nothing. Pure.

    NCCL takes an empty variable for one that is not set, but prefers it to a file.
    """

    def setting(name: str) -> tuple[str, str, str]:
        """Its value, where it is, and the cure."""
        if name in env:
            return env[name], "is set", "unset it"
        value, file = files.get(name, ("", ""))
        return value, f"is in {file}", "remove it there, or set the variable to an empty value"

    # It applies to both communicators of a group. One must not block, so that its start can be interrupted. The other
    # must block: a call that returns before NCCL has enqueued the operation would let streams pass its end too early.
    value, where, cure = setting("NCCL_COMM_BLOCKING")
    if value:
        return (
            f"NCCL_COMM_BLOCKING={value} {where}, but groups need both a communicator that blocks and one that does "
            f"not. Cure: {cure}"
        )
    # Only what shares its parent's resources is interrupted by an abort of the parent.
    value, where, cure = setting("NCCL_COMM_SPLIT_SHARE_RESOURCES")
    if value not in ("", "1"):
        return (
            f"NCCL_COMM_SPLIT_SHARE_RESOURCES={value} {where}, with which calls of NCCL cannot be interrupted. Cure: "
            f"{cure}"
        )
    return ""
