"""The store of a job and the number of this rank: from a URL, arguments and the launcher's variables.

| URL | meaning |
|---|---|
| `env://` | `MASTER_ADDR`, `MASTER_PORT` (under `srun` the first host and a port of the step, where unset), and \
`WORLD_SIZE`, `RANK` where arguments do not say |
| `tcp://host:port` | the address of rank 0 |
| `file:///path` | a file that all ranks can reach |
| `mpi://` | the launcher of MPI brings the ranks together; for `MPIBackend` only |

`rank` and `world_size` may stand in the URL's query: `tcp://host:port?rank=0&world_size=2`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

from samestep._util import launchers
from samestep.errors import InvalidArgumentError
from samestep.rendezvous.store import Store
from samestep.rendezvous.tcp_address import check_address

SCHEMES = ("env", "file", "mpi", "tcp")


@dataclass(frozen=True)
class Method:
    """How one rank meets the others: at `host` and `port` of rank 0, "" being all interfaces, or in the file `path`."""

    host: str
    port: int
    path: str
    rank: int
    world_size: int


def parse(
    url: str, rank: int | None = None, world_size: int | None = None, env: Mapping[str, str] = os.environ
) -> Method:
    """How this rank meets the others by `env://`, `tcp://host:port` or `file:///path`.

    `rank` and `world_size` are from the URL's query where they are None, else from the launcher's variables.

    Raises:
      InvalidArgumentError: something is missing, malformed, out of range or said twice; names it.

    Example:
      >>> parse("tcp://10.0.0.1:4000?rank=1", world_size=2, env={})
      Method(host='10.0.0.1', port=4000, path='', rank=1, world_size=2)
    """
    parts = _split(url)
    in_query = parse_qs(parts.query, keep_blank_values=True)
    if parts.scheme == "env" and (wrong := launchers.contradiction(env)):
        raise InvalidArgumentError(f"{url}: {wrong}")
    started_by, env = launchers.launcher(env), launchers.own_variables(env)
    names = {"rank": ("RANK", started_by.rank), "world_size": ("WORLD_SIZE", started_by.size)}
    found: dict[str, int] = {}
    for name, given in (("rank", rank), ("world_size", world_size)):
        variable, launched = names[name]
        if given is not None and name in in_query:
            raise InvalidArgumentError(f"{name} is an argument ({given}) and in {url}; give it once")
        if given is not None or name in in_query:
            found[name] = _number(name, given if given is not None else in_query[name][0], url)
        elif parts.scheme == "env" and variable in env:
            found[name] = _number(f"variable {variable}", env[variable], url)
        elif started_by.name:
            found[name] = launched
        else:
            missing = f"variable {variable}" if parts.scheme == "env" else f"{name}= (or ?{name}= in the URL)"
            raise InvalidArgumentError(
                f"{missing} is missing for {url}, and no launcher says it; give it, or start with `samestep run`"
            )
    rank, world_size = found["rank"], found["world_size"]
    if world_size < 1:
        raise InvalidArgumentError(f"world_size must be at least 1, got {world_size} ({url})")
    if rank >= world_size:
        raise InvalidArgumentError(f"rank {rank} is outside a world_size of {world_size} ({url})")
    return Method(*_endpoint(parts, url, env, rank, world_size), rank, world_size)


def with_query(url: str, rank: int | None, world_size: int | None) -> str:
    """`url` with those of `rank` and `world_size` that are given added to its query.

    Example:
      >>> with_query("mine://here?a=b", 1, 2)
      'mine://here?a=b&rank=1&world_size=2'
    """
    said = [f"{k}={v}" for k, v in (("rank", rank), ("world_size", world_size)) if v is not None]
    parts = urlsplit(url)
    return parts._replace(query="&".join([*filter(None, [parts.query]), *said])).geturl()


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidArgumentError(f"{url!r} is not a URL: {error}") from error
    if parts.scheme == "mpi":
        raise InvalidArgumentError(
            f"{url} is for samestep.MPIBackend, whose launcher brings the ranks together; NativeBackend meets by "
            "env://, tcp:// or file://"
        )
    if parts.scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise InvalidArgumentError(f"{url!r} is not a known init_method; there are {known}")
    return parts


def _number(name: str, given: object, url: str) -> int:
    text = str(given).strip()
    if not (text.isascii() and text.isdigit()):
        raise InvalidArgumentError(f"{name} must be a whole number of at least 0, got {given!r} ({url})")
    return int(text)


def _endpoint(
    parts: SplitResult, url: str, env: Mapping[str, str], rank: int, world_size: int
) -> tuple[str, int, str]:
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/"):
            raise InvalidArgumentError(f"{url!r} must have an absolute path and no host: file:///path")
        return "", 0, parts.path
    if parts.scheme == "env":
        slurm_host, slurm_port = launchers.slurm_meeting(env) or ("", 0)
        host = env.get("MASTER_ADDR", slurm_host)
        if not host and rank != 0:
            raise InvalidArgumentError(
                "variable MASTER_ADDR is missing for env://: the address of rank 0's host"
            )
        if "MASTER_PORT" not in env and not slurm_port:
            raise InvalidArgumentError(
                "variable MASTER_PORT is missing for env://: a free port of rank 0's host"
            )
        port = _number("variable MASTER_PORT", env.get("MASTER_PORT", slurm_port), url)
    else:
        host = parts.hostname or ""
        try:
            given = parts.port
        except ValueError as error:
            raise InvalidArgumentError(f"{url!r} has a wrong port: {error}") from error
        if not host or given is None:
            raise InvalidArgumentError(f"{url!r} must have host and port of rank 0: tcp://host:port")
        port = given
    check_address(host, port)
    if port == 0 and world_size > 1:
        raise InvalidArgumentError(
            f"port 0 stands for any port, which the other ranks would not know ({url})"
        )
    return host, port, ""


Handler = Callable[..., Iterator[tuple[Store, int, int]]]

_handlers: dict[str, Handler] = {}
_numbers = itertools.count()
_lock = threading.Lock()  # of both, held for moments only


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Register a function that opens the store for URLs of another scheme.

    Args:
      scheme: what stands before `://`.
      handler: a generator function; `handler(url)` yields `(store, rank, world_size)`. A rank and a world size
        given as arguments stand in the query of `url`.

    Raises:
      InvalidArgumentError: the scheme is taken.

    Example:
      >>> from samestep.rendezvous import HashStore, open_rendezvous
      >>> def alone(url):
      ...     yield HashStore(), 0, 1
      >>> register_rendezvous_handler("alone", alone)
      >>> open_rendezvous("alone://").size
      1
    """
    if not isinstance(scheme, str) or not scheme:
        raise InvalidArgumentError(f"scheme must be a text that is not empty, got {scheme!r}")
    with _lock:
        if scheme in SCHEMES or scheme in _handlers:
            raise InvalidArgumentError(f"scheme {scheme}:// is taken")
        _handlers[scheme] = handler


def open_store(url: str, rank: int | None, world_size: int | None) -> tuple[Store, int, int] | None:
    """What the handler of this scheme yields first; None where there is none."""
    if not isinstance(url, str):
        raise TypeError(f"initialize: init_method is text such as 'tcp://host:29500', got {url!r}")
    handler: Any = _handlers.get(url.partition("://")[0])
    if handler is None:
        return None
    store, rank, world_size = next(iter(handler(with_query(url, rank, world_size))))
    return store, rank, world_size


@contextlib.contextmanager
def url_of_store(store: Store, rank: int, world_size: int) -> Iterator[str]:
    """A URL that means a store which is open already; of no use after the block."""
    with _lock:
        scheme = f"samestep-store-{next(_numbers)}"
    _handlers[scheme] = lambda url: iter([(store, rank, world_size)])
    try:
        yield f"{scheme}://"
    finally:
        del _handlers[scheme]
