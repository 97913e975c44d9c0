"""Handlers for rendezvous URLs that an application registers."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from samestep.errors import InvalidArgumentError
from samestep.rendezvous.store import Store
from samestep.rendezvous.url import SCHEMES, with_query

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
