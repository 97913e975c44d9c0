"""The secret by which the ranks of a job know each other."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from dataclasses import replace

from samestep import _settings
from samestep._util import users
from samestep.launch.arguments import Options
from samestep.launch.mpirun import LaunchError

_LONGEST = 4096
_TRIES = 5
_CURE = f"set the same {_settings.SECRET} on all nodes, for example to the output of `openssl rand -hex 16`"


def job_secret(options: Options, env: Mapping[str, str], tell: Callable[[str], None]) -> str:
    """The secret that all ranks of the job get: the one that is given, or a random one.

    A job of one launcher gets a new one. Several launchers, one on each node, read it from a file: `--secret-file`, or
    one in the home folder of the user, which the first of them makes. "" = none: the user has asked for none, or the
    home folder cannot hold it, or the containers of a cluster system have no common home and no copy of the file.
    Launchers that let others join, and those that do, have one.

    Args:
      tell: what the user should know.

    Raises:
      LaunchError: the file cannot be used; says why. Or there is none, with `listen` or `join`.
    """
    if options.listen is None and options.join is None:
        return _given_or_made(options, env, tell)
    found = _given_or_made(replace(options, n_nodes=2), env, tell)
    if not found:
        raise LaunchError(f"--listen and --join need a secret that both launchers know; {_CURE}")
    return found


def _given_or_made(options: Options, env: Mapping[str, str], tell: Callable[[str], None]) -> str:
    if _settings.SECRET in options.env:
        return options.env[_settings.SECRET]
    if options.secret_file is not None:
        return _shared(options.secret_file, tell)
    if (inherited := _settings.get(_settings.SECRET, env)) is not None:
        return inherited
    if options.n_nodes == 1:
        return secrets.token_hex(16)
    try:
        if options.cluster and not os.path.lexists(default_file(env)):
            raise LaunchError(f"containers of {options.cluster} would each make their own")
        return _shared(default_file(env), tell)
    except LaunchError as error:
        tell(f"warning: the job has no secret, so that anybody on the network may join it ({error}); {_CURE}")
        return ""


def default_file(env: Mapping[str, str]) -> str:
    """Where the secret of jobs of several launchers is kept.

    Example:
      >>> default_file({"HOME": "/home/ada"}), default_file({"XDG_CONFIG_HOME": "/etc/ada"})
      ('/home/ada/.config/samestep/secret', '/etc/ada/samestep/secret')
    """
    home = env.get("HOME") or os.path.expanduser("~")
    return os.path.join(env.get("XDG_CONFIG_HOME") or os.path.join(home, ".config"), "samestep", "secret")


def _shared(path: str, tell: Callable[[str], None]) -> str:
    """The secret in `path`, which is made where there is none, whichever node comes first."""
    try:
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError):
                return _read(path)
            if _make(path):
                tell(
                    f"{path} holds the secret of jobs of several nodes from now on; nodes that do not share it need a "
                    f"copy, or the same {_settings.SECRET}"
                )
    except OSError as error:
        raise LaunchError(f"{path} cannot hold the secret of the job: {error.strerror}") from error
    raise LaunchError(f"{path} cannot hold the secret of the job: it disappears again and again")


def _read(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise LaunchError(f"{path} is not a regular file; give another one with --secret-file")
        if not users.is_own(found.st_uid):
            raise LaunchError(
                f"{path} belongs to another user ({users.text(found.st_uid)}); give another one with --secret-file"
            )
        if found.st_mode & 0o077:
            raise LaunchError(f"other users may read or write {path}; chmod 600 {path}")
        secret = os.read(fd, _LONGEST).decode(errors="replace").strip()
    finally:
        os.close(fd)
    if not secret:
        raise LaunchError(f"{path} is empty; remove it, or write a secret into it")
    return secret


def _make(path: str) -> bool:
    """Creates the file with a random secret, whole from the first moment; False if another node was first."""
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    draft = f"{path}.{secrets.token_hex(8)}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(draft)
    return True
