"""Names that are known from elsewhere and do not exist here: their AttributeError shows what to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

_BACKEND = {  # beside those of mpi4py that differ by their first letter alone
    "Get_rank": "rank",
    "Get_size": "size",
    "Get_name": "name",
    "Bcast": "bcast(x, root)",
    "Ibcast": "ibcast(x, root)",
    "Reduce_scatter_block": "reduce_scatter(x, op, out=y)",
    "Create_group": "group(ranks)",
    "Free": "close()",
    "get_rank": "rank",
    "get_world_size": "size",
    "world_size": "size",
    "total_workers": "size",
    "all_reduce": "allreduce(x, op)",
    "all_gather": "allgather(x)",
    "broadcast": "bcast(x, root)",
}
_WORK = {"Wait": "wait()", "Test": "done()", "test": "done()", "is_completed": "done()", "result": "wait()"}
_ARRAY = ("T", "astype", "copy", "dtype", "item", "mean", "ndim", "numpy", "reshape", "shape", "size", "sum")
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_OPERATORS = [
    *_BINARY,
    *(f"r{name}" for name in _BINARY),
    "array",
    "float",
    "getitem",
    "neg",
    "lt",
    "le",
    "gt",
    "ge",
]


_NO_ARRAY = "a Work is a pending operation, not an array: work.wait() returns the array"


class _Elsewhere:
    """An attribute that no instance has. `__getattr__` would slow down those that exist."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(self._text)

    def __set__(self, instance: object, value: object) -> NoReturn:
        raise AttributeError(self._text)

    def __repr__(self) -> str:  # as help() shows it
        return self._text


def _names_of_mpi4py(backend: type) -> dict[str, str]:
    """For `Allreduce`, and so on, how the method is called."""
    methods = [(name, method) for kind in backend.__mro__ for name, method in vars(kind).items()]
    public = [(name, method) for name, method in methods if callable(method) and name[0] != "_"]
    return {name.capitalize(): f"{name}({', '.join(_arguments(method))})" for name, method in public}


def _arguments(method: Callable[..., Any]) -> Iterator[str]:
    """What may be given by position, behind `self`, and the array that gets the result."""
    for p in list(inspect.signature(method).parameters.values())[1:]:
        if p.name == "out":
            yield "y" if p.default is p.empty else "out=y"
        elif p.kind is p.POSITIONAL_OR_KEYWORD:
            yield p.name


def refuse(backend: type, work: type) -> None:
    """Answer for what MPI, torch and Lux call the members of these classes, and for a Work that is used as an array."""
    for name, known in (_names_of_mpi4py(backend) | _BACKEND).items():
        setattr(backend, name, _Elsewhere(f"a backend has no {name}: write backend.{known}"))
    for name, known in _WORK.items():
        setattr(work, name, _Elsewhere(f"a Work has no {name}: write work.{known}"))
    for name in _ARRAY:
        setattr(work, name, _Elsewhere(f"{_NO_ARRAY}, which has {name}"))
    for name in _OPERATORS:
        setattr(work, f"__{name}__", _refuse_operator)
    for kind in (backend, work):
        kind.__dir__ = _existing_names  # type: ignore[assignment]


def _refuse_operator(self: object, *_: object, **__: object) -> NoReturn:
    raise TypeError(_NO_ARRAY)


def _existing_names(self: object) -> list[str]:
    kind = type(self)
    return [
        n for n in object.__dir__(self) if not isinstance(inspect.getattr_static(kind, n, None), _Elsewhere)
    ]
