"""The primitive that stands for a collective in programs of JAX: how it is compiled, differentiated and vectorised.

On CPU it is one custom call of XLA, whatever the number of arrays. The calls of a program are chained by a token, which
JAX hands through loops and branches: all ranks make them in the order of tracing. On other platforms,
and in programs for several devices, it is a call back to Python.

Derivatives are those of the map from all ranks' inputs to all ranks' results, as with `jax.lax.psum` and torch: the
gradient on a rank is that of the sum of what all ranks compute.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp
from jax._src import core, dispatch, effects
from jax.interpreters import ad, batching, mlir

from samestep import _core, errors
from samestep._util.text import error_line
from samestep.errors import InvalidArgumentError
from samestep.group.compiled_collective import Collective
from samestep.reduce_ops import PREMUL, ReduceOp

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

    XLA knows errors as text. Where the program is waited for, at the call or only at `block_until_ready`, JAX raises a
    `JaxRuntimeError` with that text among others. No Python code of ours runs there, so that class itself makes our
    error when the text holds one. A JAX that does not allow it raises `JaxRuntimeError` with our text in it, as it does
    for other libraries.
    """
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
    with contextlib.suppress(AttributeError):  # an internal name of JAX
        dispatch.runtime_tokens.clear()


def _is_not_ours(record: logging.LogRecord) -> bool:
    """JAX logs the traceback of each error in a callback, in front of the error itself."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or not issubclass(kind, _CallbackError)


_TARGET = "samestep_collective"
_SUM, _AVG = ReduceOp.SUM.value, ReduceOp.AVG.value
_ALLOWED_IN = ("ordered", "lowerable", "control_flow_allowed", "custom_derivatives_allowed", "remat_allowed")


class _Order(effects.Effect):  # type: ignore[misc]
    """That a program makes its collectives in the order of tracing."""

    def __str__(self) -> str:
        return "samestep"


class _Called(effects.Effect):  # type: ignore[misc]
    """That a program is not repeated by JAX's fast path for `lower(...).compile()`, which hands over no tokens."""


_ORDER, _CALLED = _Order(), _Called()
_making = threading.RLock()  # making one primitive may make another
_aval = getattr(jax, "typeof", None) or jax.core.get_aval  # the second until JAX 0.6


def _made_once(make: Callable[[], Any]) -> Callable[[], Any]:
    """Calls `make` once and returns its result every time: JAX refuses a second registration."""
    cached = functools.cache(make)

    def get() -> Any:
        with _making:
            return cached()

    return get


def bind(collective: Collective, leaves: Sequence[Any]) -> list[Any]:
    """Add the collective to the program that JAX is tracing."""
    install()
    return list(_primitive().bind(*map(jnp.asarray, leaves), collective=collective))


@_made_once
def _primitive() -> Any:
    for where in (*_ALLOWED_IN, "shardable_ordered"):  # the last one is newer than JAX 0.4
        if hasattr(effects, f"{where}_effects"):
            getattr(effects, f"{where}_effects").add_type(_Order)
            if "ordered" not in where:
                getattr(effects, f"{where}_effects").add_type(_Called)
    made = core.Primitive(_TARGET)
    made.multiple_results = True
    made.def_impl(functools.partial(dispatch.apply_primitive, made))
    made.def_effectful_abstract_eval(_abstract_results)
    ad.primitive_jvps[made] = _jvp
    ad.primitive_transposes[made] = _transpose
    batching.primitive_batchers[made] = _batch
    anew = {"cacheable": False} if "cacheable" in inspect.signature(mlir.register_lowering).parameters else {}
    mlir.register_lowering(made, _lower_to_callback, **anew)
    if hasattr(jax, "ffi"):  # since JAX 0.5
        jax.ffi.register_ffi_target(_TARGET, _core.compiled_call_handler(), platform="cpu")
        mlir.register_lowering(made, _lower_to_custom_call, platform="cpu", **anew)
    return made


class _Rule(NamedTuple):
    """What JAX must know of a verb."""

    transposed: str
    """The verb of the gradient."""
    shape: Callable[[tuple[int, ...], int], tuple[int, ...]] = lambda given, size: given
    """Of the result, from that of the input and the number of ranks."""
    batch_axes: tuple[int, int] | None = None
    """Where `vmap` puts the axis of the batch in the input, and finds it in the result; None: where it is."""


_RULES = {
    "allreduce": _Rule("allreduce"),
    "bcast": _Rule("reduce"),
    "reduce": _Rule("bcast"),
    "allgather": _Rule("reduce_scatter", lambda given, size: (size, *given), (0, 1)),
    "reduce_scatter": _Rule("allgather", lambda given, size: given[1:], (1, 0)),
    "alltoall": _Rule("alltoall", batch_axes=(1, 1)),
}


def _abstract_results(*avals: Any, collective: Collective) -> tuple[list[Any], set[effects.Effect]]:
    shape, size = _RULES[collective.verb].shape, collective.group.size
    moved = avals[: len(collective.names)]
    # As inputs, results vary over the axes of a shard_map: a gradient must have the type of the result.
    return [aval.update(shape=shape(aval.shape, size), weak_type=False) for aval in moved], {_ORDER, _CALLED}


# ---- how it is compiled


def _compiled_call(ctx: Any, collective: Collective) -> _core.CompiledCall:
    """The object that the program refers to by number. It lives as long as the group: XLA may still run a program that
    Python has dropped.
    """
    group, verb, act, op, factor, root, timeout, names, flags, facts, compared, _, explain = collective
    shapes, dtypes = zip(*((aval.shape, str(aval.dtype)) for aval in ctx.avals_in), strict=True)
    made = _core.CompiledCall(
        group._comm,
        verb,
        op=op,
        factor=factor,
        root=root,
        timeout=timeout,
        act=act,
        names=zlib.crc32(
            "\0".join([act, *names, *sum(flags + facts, ()), *compared]).encode(errors="surrogatepass")
        ),
        explain=explain and functools.partial(explain, collective, shapes, dtypes),
    )
    group._cache.setdefault("compiled calls", []).append(made)
    return made


def _lower_to_custom_call(ctx: Any, *args: Any, collective: Collective) -> Any:
    if getattr(ctx.module_context.axis_context, "num_devices", 1) != 1:
        return _lower_to_callback(ctx, *args, collective=collective)
    made = _compiled_call(ctx, collective)
    with_token = ctx.replace(
        avals_in=(core.abstract_token, *ctx.avals_in), avals_out=(core.abstract_token, *ctx.avals_out)
    )
    rule = jax.ffi.ffi_lowering(_TARGET, has_side_effect=True)
    token, *results = rule(with_token, ctx.tokens_in.get(_ORDER), *args, number=np.int64(made.number))
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({_ORDER: token})))
    return results


def _lower_to_callback(ctx: Any, *args: Any, collective: Collective) -> Any:
    made = _compiled_call(ctx, collective)

    def callback(*given: Any) -> list[Any]:
        results = [np.empty(aval.shape, aval.dtype) for aval in ctx.avals_out]
        with transport():
            made.run([np.asarray(value, order="C") for value in given], results)
        return results

    return _emit_callback(ctx, callback, args)


def _emit_callback(ctx: Any, callback: Callable[..., Sequence[Any]], args: Sequence[Any]) -> Any:
    """A call back on the first of the program's devices."""
    from jax._src.callback import _callback_op_sharding

    results, token, _ = mlir.emit_python_callback(
        ctx,
        callback,
        ctx.tokens_in.get(_ORDER),
        list(args),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=True,
        sharding=_callback_op_sharding(ctx.module_context.axis_context, None, ctx.avals_out),
    )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({_ORDER: token})))
    return results


# ---- derivatives


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, collective: Collective) -> tuple[Any, Any]:
    """All collectives with linear operators are linear: the tangent of a reduction is the reduction of the tangents."""
    if collective.op not in (_SUM, _AVG, PREMUL):
        raise InvalidArgumentError(
            f"{collective.act}: only reductions with op sum, avg and premul have a derivative; "
            "keep others out of it with jax.lax.stop_gradient(x)"
        )
    results = _primitive().bind(*primals, collective=collective)
    moved = [i for i in range(len(results)) if not isinstance(tangents[i], ad.Zero)]
    changes = [ad.Zero(_aval(result).to_tangent_aval()) for result in results]
    part = _part(collective, moved, "tangent")
    for i, change in zip(moved, _bind_some(part, [tangents[i] for i in moved]), strict=True):
        changes[i] = change
    return results, changes


def _transpose(cotangents: Sequence[Any], *inputs: Any, collective: Collective) -> list[Any]:
    moved = [i for i, cotangent in enumerate(cotangents) if not isinstance(cotangent, ad.Zero)]
    given = [cotangents[i] for i in moved]
    back = _part(collective, moved, "gradient")
    is_mean = (collective.verb, collective.op) == ("allreduce", _AVG)
    if not is_mean:  # which is its own transpose: the sum of half types need not fit them
        back = back._replace(verb=_RULES[collective.verb].transposed, op=_SUM, factor=1.0)
    size, root, rank = collective.group.size, collective.root, collective.group.rank
    scale = {_AVG: 1.0 / size, PREMUL: collective.factor}.get(collective.op)
    changes = _bind_some(back, given)
    if scale is not None and not is_mean:
        changes = [change * jnp.asarray(scale, change.dtype) for change in changes]
    if collective.verb == "bcast" and rank != root:
        changes = [jnp.zeros_like(change) for change in changes]
    if collective.verb == "reduce" and rank != root:  # there the result was the input
        changes = [change + own for change, own in zip(changes, given, strict=True)]
    results = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in inputs]
    for i, change in zip(moved, changes, strict=True):
        results[i] = change
    return results


def _part(collective: Collective, moved: Sequence[int], what: str) -> Collective:
    names = tuple(collective.names[i] for i in moved)
    return collective._replace(act=f"{what} of {collective.act}", names=names, compared=())


def _bind_some(collective: Collective, leaves: list[Any]) -> list[Any]:
    return list(_primitive().bind(*leaves, collective=collective)) if leaves else []


# ---- vmap


def _batch(args: Sequence[Any], axes: Sequence[Any], *, collective: Collective) -> tuple[Any, Any]:
    """One call for the whole batch: the batch axis is one more axis of the array."""
    if (batch_axes := _RULES[collective.verb].batch_axes) is None:
        return _primitive().bind(*args, collective=collective), axes[: len(collective.names)]
    (x,), (axis,) = args, axes
    before, after = batch_axes
    return _primitive().bind(jnp.moveaxis(x, axis, before), collective=collective), [after]


# ---- functions of the host


def bind_function(
    act: str,
    function: Callable[..., Sequence[Any]],
    leaves: Sequence[Any],
    shapes: Sequence[tuple[int, ...]] | None,
) -> list[Any]:
    """Add a call of a Python function to the program, ordered with its collectives."""
    install()
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    results = zip(shapes or [x.shape for x in arrays], arrays, strict=True)
    types = tuple((tuple(shape), str(x.dtype)) for shape, x in results)
    return list(_function_primitive().bind(*arrays, act=act, function=function, types=types))


@_made_once
def _function_primitive() -> Any:
    _primitive()  # makes the effect known
    made = core.Primitive("samestep_function")
    made.multiple_results = True
    made.def_impl(functools.partial(dispatch.apply_primitive, made))
    made.def_effectful_abstract_eval(
        lambda *_, types, **__: (
            [core.ShapedArray(shape, np.dtype(dtype)) for shape, dtype in types],
            {_ORDER},
        )
    )
    ad.primitive_jvps[made] = _refuse_transformation
    batching.primitive_batchers[made] = _refuse_transformation
    mlir.register_lowering(made, _lower_function)
    return made


def _refuse_transformation(*_: Any, act: str, **__: Any) -> Any:
    raise InvalidArgumentError(
        f"{act} can be compiled by jit, but not transformed by vmap or grad; call it outside of them"
    )


def _lower_function(ctx: Any, *args: Any, act: str, function: Any, types: Any) -> Any:
    def callback(*values: Any) -> list[Any]:
        with transport():
            return list(function(*[np.array(value) for value in values]))

    return _emit_callback(ctx, callback, args)
