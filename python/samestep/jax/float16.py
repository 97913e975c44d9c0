"""float16 in JAX programs of several processes.

XLA's MPI collectives know no float16. So, before XLA sees it, a reduction of float16 is turned into one of float32,
rounded once at its end, and a gather into one of uint16. Matrix products, convolutions and reductions of programs that
`jit` divides over devices are computed in float32 too, because the partitioner may make collectives of them. A float16
array that only changes its sharding is beyond reach: XLA refuses the gather that its partitioner inserts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from jax._src.lax import convolution, lax, parallel
from jax._src.lib.mlir.dialects import hlo
from jax.interpreters import mlir

_REDUCTIONS = ("psum_p", "psum_invariant_p", "pmax_p", "pmin_p", "reduce_scatter_p")
_GATHERS = ("all_gather_p", "all_gather_invariant_p")
_PARTITIONED = ("dot_general_p", "reduce_sum_p", "reduce_max_p", "reduce_min_p", "reduce_prod_p")

_FLOAT32 = (np.float32, hlo.convert)
_Rule = Callable[..., Iterable[Any]]


@functools.cache
def install() -> None:
    """Replaces the rules by which JAX compiles these operations for CPU, once; other types are compiled as before."""
    for module, names, wrap in (
        (parallel, _REDUCTIONS, functools.partial(_with_other_type, _FLOAT32)),
        (parallel, _GATHERS, functools.partial(_with_other_type, (np.uint16, hlo.bitcast_convert))),
        (lax, _PARTITIONED, _compute_in_float32),
        (convolution, ("conv_general_dilated_p",), _compute_in_float32),
    ):
        for name in names:
            primitive = getattr(module, name, None)
            if rule := _rule_of(primitive):
                mlir.register_lowering(primitive, functools.partial(wrap, rule), platform="cpu")


def _rule_of(primitive: Any) -> Any:
    entry = mlir._platform_specific_lowerings["cpu"].get(primitive) or mlir._lowerings.get(primitive)
    return getattr(entry, "rule", entry)


def _compute_in_float32(rule: _Rule, ctx: Any, *args: Any, **params: Any) -> Iterable[Any]:
    """Where a partitioner may divide it: not on one device, nor within shard_map."""
    if getattr(ctx.module_context.axis_context, "num_devices", 1) in (None, 1):
        return rule(ctx, *args, **params)
    return _with_other_type(_FLOAT32, rule, ctx, *args, **params)


def _with_other_type(
    other_type: tuple[Any, Callable[[Any, Any], Any]], rule: _Rule, ctx: Any, *args: Any, **params: Any
) -> Iterable[Any]:
    """The rule with another dtype in place of float16, between two casts."""
    dtype, cast = other_type

    def replaced(avals: Iterable[Any]) -> list[Any]:
        return [aval.update(dtype=np.dtype(dtype)) if _is_float16(aval) else aval for aval in avals]

    def casted(values: Iterable[Any], avals: Iterable[Any], others: Iterable[Any]) -> list[Any]:
        types = [mlir.aval_to_ir_type(ctx.module_context, aval) for aval in others]
        changes = zip(values, types, map(_is_float16, avals), strict=True)
        return [cast(to, value) if changed else value for value, to, changed in changes]

    if not any(map(_is_float16, ctx.avals_in)):
        return rule(ctx, *args, **params)
    other = ctx.replace(avals_in=replaced(ctx.avals_in), avals_out=replaced(ctx.avals_out))
    results = rule(other, *casted(args, ctx.avals_in, other.avals_in), **params)
    return casted(results, ctx.avals_out, ctx.avals_out)


def _is_float16(aval: Any) -> bool:
    return getattr(aval, "dtype", None) == np.float16
