"""Collectives in functions that JAX traces: arrays have no values there, so the call becomes part of the program."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from samestep import _core, arrays
from samestep._util.deadline import seconds
from samestep.errors import InvalidArgumentError
from samestep.group.compiled_collective import Collective
from samestep.reduce_ops import Op, resolve

Group = Any  # samestep.group.group.Group, which cannot be imported here: its bases use this module
_MADE_BY = "samestep.group.jax_primitive"  # is loaded where a program has collectives
_Method = TypeVar("_Method", bound=Callable[..., Any])
_REDUCTIONS = ("allreduce", "reduce", "reduce_scatter")
NO_SUM_OF_KEYS = "a random key, whose bits have no sum or mean; leave it out, or make it equal by synchronize"
"""Why reductions refuse typed random keys of JAX."""


def is_traced(leaves: Sequence[Any]) -> bool:
    """Whether a leaf is a tracer: JAX is tracing the caller."""
    jax = sys.modules.get("jax")
    return jax is not None and any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def group_of(backend: Group) -> Group:
    """The group that compiled programs use: all ranks of `backend`, separate from it.

    JAX runs a program while Python continues, so its messages would otherwise meet the caller's in an order
    that differs from rank to rank. Made when JAX traces the first program, collectively: all ranks trace the
    same one.
    """
    group: Group | None = backend._cache.get("compiled programs")
    if group is None:
        with _core.UserCall("tracing of the first function of JAX that has collectives"):
            group = backend._split(0, backend.rank, backend.timeout, backend.name)
        assert group is not None
        backend._cache["compiled programs"] = group
    return group


def call(collective: Collective, leaves: Sequence[Any]) -> list[Any]:
    """Add the collective to the program that JAX is tracing, after those already in it.

    Args:
      collective: of the group that `group_of` returns.
      leaves: tracers, arrays and numbers.

    Returns:
      Tracers of the results.
    """
    from samestep.group import jax_primitive

    _refuse_parallel_devices(collective.act)
    if collective.verb in _REDUCTIONS:
        _refuse_keys(collective, leaves)
    _refuse_dtypes(collective, leaves)
    return jax_primitive.bind(collective, leaves)


def call_function(
    act: str,
    function: Callable[..., Sequence[Any]],
    leaves: Sequence[Any],
    *,
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> list[Any]:
    """Add to the program a call of `function` with writable NumPy arrays of the leaves' values.

    Args:
      function: gets the values when the program runs, and returns arrays of the same dtypes.
      leaves: of the tree; tracers, arrays and numbers.
      shapes: of the results; those of the leaves unless given.
    """
    from samestep.group import jax_primitive

    _refuse_parallel_devices(act)
    return jax_primitive.bind_function(act, function, leaves, shapes)


def await_programs() -> None:
    """Wait for compiled programs that run in the background, and raise what their collectives raise."""
    if _MADE_BY in sys.modules:
        sys.modules["jax"].effects_barrier()


def forget_programs() -> None:
    """Let JAX compile all functions anew: their programs hold the rank and size that this process had."""
    if _MADE_BY in sys.modules:
        sys.modules["samestep.group.jax_primitive"].forget_failed_program()
        sys.modules["jax"].clear_caches()


def traceable(method: _Method) -> _Method:
    """A verb on one array that becomes part of the program if the array is a tracer."""
    signature = inspect.signature(method)
    verb = method.__name__
    names = _positional(signature)

    @functools.wraps(method)
    def either(self: Group, x: Any, *args: Any, **keywords: Any) -> Any:
        _refuse_second_buffer(verb, names, args, keywords)
        if not is_traced([x]):
            return method(self, x, *args, **keywords)
        given = signature.bind(self, x, *args, **keywords)
        given.apply_defaults()
        return _call_verb(self, verb, x, given.arguments)

    return either  # type: ignore[return-value]


def one_buffer(method: _Method) -> _Method:
    """A verb that explains how its output array is passed."""
    names = _positional(inspect.signature(method))

    @functools.wraps(method)
    def checked(self: Group, *args: Any, **keywords: Any) -> Any:
        _refuse_second_buffer(method.__name__, names, args[1:], keywords)
        return method(self, *args, **keywords)

    return checked  # type: ignore[return-value]


def _positional(signature: inspect.Signature) -> list[str]:
    """Names of the parameters after `self` and `x` that may be given by position."""
    return [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][2:]


def _refuse_second_buffer(
    verb: str, names: list[str], args: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    # As in MPI's Reduce(x, y, op=op, root=root).
    if args and (len(args) > len(names) or names[0] in keywords):
        call = ", ".join(["x", *(name for name in names if name != "out"), "out=y"])
        raise TypeError(f"{verb}: too many arguments; pass the output array by keyword: {verb}({call})")


def _call_verb(backend: Group, verb: str, x: Any, given: dict[str, Any]) -> Any:
    if given["out"] is not None:
        raise InvalidArgumentError(f"{verb}: out= is not available in functions compiled by JAX")
    op: Op = given.get("op", "sum")
    code, factor = resolve(op)
    root = backend._rank_number(given.get("root", 0), verb, "root")
    backend._require_root(root, verb)
    if verb == "reduce_scatter":
        backend._block_shape(x.shape, verb)
    if verb == "alltoall":
        backend._require_blocks(x.shape, verb)
    timeout = given["timeout"]
    limit = backend.timeout if timeout is None else seconds(timeout)
    return call(Collective(group_of(backend), verb, verb, code, factor, root, limit), [x])[0]


def _refuse_keys(collective: Collective, leaves: Sequence[Any]) -> None:
    import jax

    for i, leaf in enumerate(leaves):
        if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
            which = f"leaf {collective.names[i]}: " if collective.names[i] else ""
            raise InvalidArgumentError(f"{collective.act}: {which}{NO_SUM_OF_KEYS}")


def _refuse_dtypes(collective: Collective, leaves: Sequence[Any]) -> None:
    """Raise the error of arrays outside of compiled functions, for which XLA has numbers in place of names."""
    for name, leaf in zip((*collective.names, *collective.compared), leaves, strict=True):
        if isinstance(dtype := getattr(leaf, "dtype", None), np.dtype):
            arrays.info(np.empty(0, dtype), f"{collective.act}: leaf {name}" if name else collective.act)


def _refuse_parallel_devices(act: str) -> None:
    """Inside `pmap` and `shard_map` each device would call, in no order that ranks agree on."""
    import jax

    if not hasattr(jax.sharding, "get_abstract_mesh"):  # JAX before 0.5
        return
    mesh = jax.sharding.get_abstract_mesh()
    n_devices = math.prod(mesh.shape[axis] for axis in getattr(mesh, "manual_axes", ()))
    if n_devices > 1:
        raise InvalidArgumentError(
            f"{act} inside pmap or shard_map would be called by each of {n_devices} devices; reduce over them first "
            "(jax.lax.psum or pmean) and call it outside, or start one rank for each device"
        )
