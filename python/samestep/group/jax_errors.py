"""Raises errors of programs compiled by JAX with the class that samestep gave them.

XLA knows errors as text. Where the program is waited for, at the call or only at `block_until_ready`, JAX raises a
`JaxRuntimeError` with that text among others. No Python code of ours runs there, so the class `JaxRuntimeError` itself
makes our error when the text holds one.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from samestep import errors
from samestep._util.text import error_line

if TYPE_CHECKING:
    import logging

_TEXT = "<samestep.{}>{}</samestep>"
_PATTERN = re.compile(r"<samestep\.(\w+)>(.*?)</samestep>", re.DOTALL)


class _CallbackError(Exception):
    """Passes the class name and text of an error through XLA."""


def text_of(error: BaseException) -> str:
    """The form in which an error survives XLA; that of samestep's errors and of Ctrl-C names the class.

    Example:
      >>> text_of(errors.TimeoutError("rank 1 is late"))
      '<samestep.TimeoutError>rank 1 is late</samestep>'
    """
    names = [name for name, kind in _KINDS.items() if kind in type(error).__mro__]
    return _TEXT.format(names[0], error) if names else error_line(error)


_KINDS = {name: getattr(errors, name) for name in errors.__all__ if name != "Error"}
_KINDS |= {"Error": errors.Error, "KeyboardInterrupt": KeyboardInterrupt}


@contextlib.contextmanager
def transport() -> Iterator[None]:
    """In this context, inside a host callback, errors of samestep are raised in that form."""
    try:
        yield
    except (errors.Error, KeyboardInterrupt) as error:
        raise _CallbackError(text_of(error)) from None


@functools.cache
def install() -> None:
    """Let `JaxRuntimeError` recognise our errors; once per process, before the first program is compiled.

    A JAX that does not allow it raises `JaxRuntimeError` with our text in it, as it does for other libraries.
    """
    import logging  # rarely needed

    import jax

    base = getattr(jax.errors, "JaxRuntimeError", None)
    if base is None:
        return
    usual = base.__new__

    def new(cls: type[BaseException], *args: Any) -> BaseException:
        found = _PATTERN.search(args[0]) if cls is base and args and isinstance(args[0], str) else None
        if found is None:
            return usual(cls, *args)  # type: ignore[no-any-return]
        forget_failed_program()
        kind = _class_for(found[1], base)
        return kind.__new__(kind)  # type: ignore[no-any-return]

    with contextlib.suppress(AttributeError, TypeError):
        base.__new__ = new
    logging.getLogger("jax._src.callback").addFilter(_is_not_ours)


@functools.cache
def _class_for(name: str, base: Any) -> Any:
    """A class that is both the error of that name and JAX's."""
    kind = _KINDS[name]

    def init(self: BaseException, message: str, *details: Any) -> None:
        base.__init__(self, message, *details)
        found = _PATTERN.search(message)
        self.args = (found[2] if found else message,)

    members = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "__init__": init,
        "__str__": kind.__str__,
        "__reduce__": lambda self: (kind, self.args),
    }
    return type(kind.__name__, (kind, base), members)


def forget_failed_program() -> None:
    """Let later programs run: JAX would make each wait for the one before, and fail with its error."""
    with contextlib.suppress(ImportError, AttributeError):  # an internal name of JAX
        from jax._src import dispatch

        dispatch.runtime_tokens.clear()


def _is_not_ours(record: logging.LogRecord) -> bool:
    """JAX logs the traceback of each error in a callback, in front of the error itself."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or not issubclass(kind, _CallbackError)
