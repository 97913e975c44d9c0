"""Cost of samestep's collectives inside programs compiled by JAX: the custom call, and a call back to Python instead.

    samestep run -n 2 benchmarks/jax_compiled_calls.py
    samestep run -n 1 benchmarks/jax_compiled_calls.py      # without any communication

Both are measured in turns, in the same processes: medians of the rounds, in microseconds.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import samestep as ss
from jax.interpreters import mlir
from samestep.group import jax_primitive

ROUNDS, CALLS, INSIDE = 7, 20, 50


def main() -> None:
    backend = ss.initialize()
    cells = {
        "one call in a loop of a program, 1 KiB": (loop_of(backend), jnp.ones(256), INSIDE),
        "a program with one call, 1 KiB": (backend.allreduce, jnp.ones(256), 1),
        "a program without any": (lambda x: x * 2, jnp.ones(256), 1),
        "a tree of 100 leaves, 1 MB": (backend.allreduce_tree, [jnp.ones(2500)] * 100, 1),
        "a tree of 3 leaves, 40 MB": (backend.allreduce_tree, [jnp.ones(3_333_333)] * 3, 1),
    }
    rules = {
        "callback": jax_primitive._lower_to_callback,
        "custom call": jax_primitive._lower_to_custom_call,
    }
    programs: dict[str, dict[str, Any]] = {cell: {} for cell in cells}
    for name, rule in rules.items():
        jax.jit(backend.allreduce).lower(1.0)  # makes the primitive
        mlir.register_lowering(jax_primitive._primitive(), rule, platform="cpu", cacheable=False)
        for cell, (function, argument, _) in cells.items():
            programs[cell][name] = jax.jit(lambda x, function=function: function(x))
            jax.block_until_ready(programs[cell][name](argument))
    if backend.rank == 0:
        print(f"{backend.size} ranks\n| cell | callback | custom call | ratio |\n|---|--:|--:|--:|")
    for cell, (_, argument, n) in cells.items():
        times: dict[str, list[float]] = {name: [] for name in rules}
        for _ in range(ROUNDS):
            for name in rules:
                times[name].append(seconds_of(backend, programs[cell][name], argument) / n * 1e6)
        old, new = (statistics.median(times[name]) for name in rules)
        if backend.rank == 0:
            print(f"| {cell} | {old:.1f} | {new:.1f} | {old / new:.1f} |", flush=True)


def loop_of(backend: Any) -> Any:
    def looped(x: Any) -> Any:
        return jax.lax.fori_loop(0, INSIDE, lambda _, y: backend.allreduce(y, "max"), x)

    return looped


def seconds_of(backend: Any, program: Any, argument: Any) -> float:
    """Median time of a call."""
    jax.block_until_ready(program(argument))
    backend.barrier()
    times = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        jax.block_until_ready(program(argument))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


if __name__ == "__main__":
    main()
