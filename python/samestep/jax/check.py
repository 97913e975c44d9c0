"""`python -m samestep.jax --check`: compares every collective that XLA issues with NumPy, on several processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import numpy as np

from samestep._util.jax_variables import environment

_TIMEOUT_S = 300.0
_DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64")
_WIDTH = 5  # elements of each block: no multiple of anything


def main(n_processes: int = 2, n_devices: int = 1) -> int:
    """Starts the processes, which print what they find; returns 0 if all collectives are right."""
    program = ["-c", "from samestep.jax.check import _run; _run()"]
    results = run_processes(program, n_processes, n_devices)
    for process, (code, out, err) in enumerate(results):
        if process == 0 or code != 0:
            print(out, end="")
        if code != 0:
            print(f"process {process} ended with code {code}: {err.strip()[-2000:]}", file=sys.stderr)
    wrong = any(code != 0 for code, *_ in results)
    verdict = "NOT every collective is right" if wrong else "every collective is right"
    print(f"{n_processes * n_devices} devices of {n_processes} processes: {verdict}")
    return int(wrong)


def run_processes(
    program: list[str],
    n_processes: int,
    n_devices: int = 1,
    timeout: float | None = _TIMEOUT_S,
    **variables: str,
) -> list[tuple[int, str, str]]:
    """Runs `python *program` on several processes of a JAX program on this host.

    Each finds its arguments of `jax.distributed.initialize` in `JAX_TEST_ADDRESS`, `_PROCESSES` and `_ID`. After
    `timeout` seconds all are killed.

    Returns:
      Exit code, output and error output of each.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    common = {
        **os.environ,
        **environment(),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(n_devices),
        "JAX_ENABLE_X64": "1",
        "JAX_TEST_ADDRESS": f"127.0.0.1:{port}",
        "JAX_TEST_PROCESSES": str(n_processes),
        **variables,
    }
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([sys.executable, *program], env={**common, "JAX_TEST_ID": str(i)}, **pipes)
        for i in range(n_processes)
    ]
    results = []
    for process in started:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            for other in started:
                other.kill()
            out, err = process.communicate()
            err += f"\nkilled after {timeout:g} s"
        results.append((process.returncode, out, err))
    return results


def initialize() -> None:
    """What a program of `run_processes` calls first."""
    import jax

    where, n, process = (os.environ[f"JAX_TEST_{name}"] for name in ("ADDRESS", "PROCESSES", "ID"))
    jax.distributed.initialize(where, int(n), int(process))


def _run() -> None:
    initialize()
    wrong = 0
    for dtype in _dtypes():
        results = {name: _outcome(*case) for name, case in _cases(dtype).items()}
        bad = {name: text for name, text in results.items() if text}
        wrong += len(bad)
        print(f"{dtype}: {', '.join(name for name in results if name not in bad)}", flush=True)
        for name, text in bad.items():
            print(f"  {name}: {text}", flush=True)
    if wrong:
        raise SystemExit(1)


def _dtypes() -> list[np.dtype[Any]]:
    from jax import numpy as jnp

    return [*map(np.dtype, (*_DTYPES, "complex64", "complex128", "float16")), np.dtype(jnp.bfloat16)]


def _cases(dtype: np.dtype[Any]) -> dict[str, tuple[Any, Any, Any]]:
    """By collective: function of a shard, the whole input, and the whole output by position in the mesh."""
    import jax
    from jax import lax
    from jax import numpy as jnp

    n = jax.device_count()
    x = np.random.default_rng(0).integers(0, 3, (n, n * _WIDTH)).astype(dtype)
    wide: Any = object
    # One large term, to which adding the others singly changes nothing.
    if dtype in (np.float16, jnp.bfloat16):
        x[0] += np.asarray(2 / jnp.finfo(dtype).eps, dtype)
        wide = np.float64
    blocks = x.reshape(n, n, _WIDTH)
    total = x.astype(wide).sum(0).astype(dtype)
    ring = [(i, (i + 1) % n) for i in range(n)]
    only_last = np.concatenate([np.zeros_like(x[1:]), x[:1]])
    one_each = [[i] for i in range(n)]
    cases: dict[str, tuple[Any, Any, Any]] = {
        "psum": (lambda s: lax.psum(s, "i"), x, np.tile(total, (n, 1))),
        "psum of one": (lambda s: lax.psum(s, "i", axis_index_groups=one_each), x, x),
        "psum_scatter": (
            lambda s: lax.psum_scatter(s, "i", scatter_dimension=1, tiled=True),
            x,
            total.reshape(n, _WIDTH),
        ),
        "all_gather": (lambda s: lax.all_gather(s, "i", tiled=True), x, np.tile(x, (n, 1))),
        "all_to_all": (
            lambda s: lax.all_to_all(s, "i", 1, 0, tiled=True),
            x,
            blocks.transpose(1, 0, 2).reshape(n * n, _WIDTH),
        ),
        "ppermute": (lambda s: lax.ppermute(s, "i", ring), x, np.roll(x, 1, 0)),
        "partial ppermute": (lambda s: lax.ppermute(s, "i", [(0, n - 1)]), x, only_last),
    }
    if dtype.kind != "c":
        cases["pmax"] = (lambda s: lax.pmax(s, "i"), x, np.tile(x.max(0), (n, 1)))
        cases["pmin"] = (lambda s: lax.pmin(s, "i"), x, np.tile(x.min(0), (n, 1)))
    return cases


def _outcome(function: Any, x: Any, expected: Any) -> str:
    """Runs it over all devices; "" if every shard of this process is right."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh, split = jax.make_mesh((jax.device_count(),), ("i",)), PartitionSpec("i")
    whole = jax.make_array_from_callback(x.shape, NamedSharding(mesh, split), lambda index: x[index])
    program = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))
    try:
        shards = program(whole).addressable_shards
        found = [(np.asarray(shard.data), expected[shard.index]) for shard in shards]
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    wrong = sum(not np.array_equal(got, wanted) for got, wanted in found)
    return f"{wrong} of {len(found)} shards are wrong" if wrong else ""
