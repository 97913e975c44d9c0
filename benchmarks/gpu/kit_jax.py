"""A part of the kit: `kit_jax.py`. Arrays of JAX: its results are new arrays, and XLA keeps its stream to itself."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

import device_kinds
import numpy as np
from kit_failures import Findings
from kit_rank import RANK, SIZE, need, skip, start, turns

COUNT = 100_003
WIDTH = 4096  # of a matrix whose square is itself


class Jax:
    """JAX itself, on the first device."""

    dtypes = ("float32", "bfloat16", "int32", "bool")

    def __init__(self) -> None:
        self.module = need("jax")
        try:
            platform = self.module.local_devices()[0].platform
        except Exception as error:  # a broken installation fails in any manner
            skip(f"JAX: {error}")
        if platform != "gpu":
            skip(f"JAX sees no GPU, only {platform}")
        jnp = self.module.numpy
        self._matrix = jnp.full((WIDTH, WIDTH), 1 / WIDTH, "float32")  # powers of two are exact in every mode
        self._square = self.module.jit(
            lambda x: self.module.lax.fori_loop(0, turns(150, 5), lambda _, y: y @ x, x)
        )

    def of(self, values: np.ndarray[Any, Any], dtype: str) -> Any:
        return self.module.numpy.asarray(values, dtype)

    def get(self, x: Any) -> np.ndarray[Any, Any]:
        found = np.asarray(x)
        return found.astype("float32") if found.dtype.name == "bfloat16" else found

    def late(self) -> Any:
        """An array of equal elements that takes a while to compute."""
        return self._square(self._matrix)

    def is_own(self, x: Any) -> bool:
        return isinstance(x, self.module.Array) and next(iter(x.devices())).platform == "gpu"


class Fake:
    """The stand-in."""

    dtypes = ("float32", "int32", "bool")

    def __init__(self) -> None:
        import fake_jax

        self.module = fake_jax

    def of(self, values: np.ndarray[Any, Any], dtype: str) -> Any:
        return self.module.late(values.astype(dtype), 0)

    def get(self, x: Any) -> np.ndarray[Any, Any]:
        return np.asarray(x.get())

    def late(self) -> Any:
        return self.module.late(np.full((64, 64), 1 / WIDTH, "float32"), 200_000)

    def is_own(self, x: Any) -> bool:
        return type(x) is self.module.Array


def values(rank: int, turn: int = 0) -> np.ndarray[Any, Any]:
    return (np.arange(COUNT) + turn + rank) % 5


def check(jax: Any, found: Findings) -> None:
    with start("nccl") as backend:

        def compare(what: str, got: Any, expected: Any) -> None:
            found.expect(jax.is_own(got), f"{what}: no array of JAX on the device")
            found.expect(bool(np.array_equal(jax.get(got), expected)), f"{what}: wrong numbers")

        for dtype in jax.dtypes:
            kind = "float32" if dtype == "bfloat16" else dtype
            inputs = [values(r).astype(kind) for r in range(SIZE)]
            x = jax.of(inputs[RANK], dtype)
            compare(f"allreduce of {dtype}", backend.allreduce(x, "max"), np.max(inputs, axis=0))
            compare(f"allgather of {dtype}", backend.allgather(x), np.stack(inputs))
            tree = backend.allreduce_tree({"a": x, "b": jax.of(inputs[RANK][:7], dtype)}, "min")
            compare(f"a tree of {dtype}", tree["a"], np.min(inputs, axis=0))
            compare(f"a small leaf of {dtype}", tree["b"], np.min(inputs, axis=0)[:7])
            compare(f"the input of {dtype}", x, inputs[RANK])
        for turn in range(turns(40, 5)):
            x = jax.of(values(RANK, turn), "float32")
            work = backend.iallreduce(x)
            del x  # XLA gives its memory to the next array
            other = jax.of(np.full(COUNT, -1.0), "float32")
            compare(f"turn {turn}", work.wait(), sum(values(r, turn).astype("float32") for r in range(SIZE)))
            compare(f"what was made beside turn {turn}", other, np.full(COUNT, -1.0))
        backend.allreduce(jax.late())  # code is compiled and NCCL connected
        found.seen.update(late(jax, backend, compare))


def late(jax: Any, backend: Any, compare: Callable[[str, Any, Any], None]) -> dict[str, float]:
    """An input that is still computed when the call is made: milliseconds until the call returned, and until it was."""
    backend.barrier()
    begin = time.perf_counter()
    x = jax.late()
    work = backend.iallreduce(x)
    returned = time.perf_counter() - begin
    x.block_until_ready()
    ready = time.perf_counter() - begin
    compare("a late input", work.wait(), np.full(x.shape, SIZE / WIDTH, "float32"))
    return {"call_returned_ms": round(1e3 * returned, 1), "input_computed_ms": round(1e3 * ready, 1)}


def main() -> int:
    found = Findings("JAX")
    with contextlib.ExitStack() as stack:
        if device_kinds.on_fakes():
            import fake_jax

            jax: Any = Fake()
            stack.enter_context(fake_jax.installed())
        else:
            jax = Jax()
        check(jax, found)
    return found.finish()


if __name__ == "__main__":
    sys.exit(main())
