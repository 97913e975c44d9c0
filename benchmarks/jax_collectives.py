"""Collectives of compiled JAX programs over several processes on CPU: jaxlib's gloo and samestep, in turns.

    python benchmarks/jax_collectives.py -n 2
    python benchmarks/jax_collectives.py -n 2 --step      # a training step of 10 M parameters, by jit with sharded data

Each round starts new processes with one of the two implementations and takes the median time of a call for each verb
and size; the table shows the medians over the rounds. Bytes are those of one device's input.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

IMPLEMENTATIONS = ("gloo", "samestep")
SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
VERBS = ("psum", "psum_scatter", "all_gather", "all_to_all", "ppermute")
WARM_UP = 3
SECONDS = 1.0  # for the calls of one cell
MOST_CALLS = 200
PROFILED_CALLS = 10
WIDTH, LAYERS, BATCH = 1826, 3, 64  # three square matrices: 10.0 M parameters


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=2, help="processes")
    parser.add_argument("--rounds", type=int, default=3, help="of both implementations in turns")
    parser.add_argument("--step", action="store_true", help="time a training step instead")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of each device's input")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.rank:
        measure_step() if flags.step else measure_verbs(flags.sizes)
        return
    found: dict[str, dict[str, list[float]]] = {name: {} for name in IMPLEMENTATIONS}
    for _ in range(flags.rounds):
        for name in IMPLEMENTATIONS:
            for cell, seconds in round_of(name, flags).items():
                found[name].setdefault(cell, []).append(seconds)
    print(f"{flags.n} processes, medians of {flags.rounds} rounds, milliseconds")
    print(f"| {'cell':26} | {'gloo':>8} | samestep | ratio |\n|---|--:|--:|--:|")
    for cell in found["gloo"]:
        gloo, ours = (statistics.median(found[name][cell]) * 1e3 for name in IMPLEMENTATIONS)
        print(f"| {cell:26} | {gloo:8.3f} | {ours:8.3f} | {gloo / ours:5.1f} |")


def round_of(name: str, flags: argparse.Namespace) -> dict[str, float]:
    from samestep.jax.check import run_processes

    arguments = [__file__, "--rank", "--sizes", *map(str, flags.sizes), *(["--step"] if flags.step else [])]
    others = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"} if name == "gloo" else {}
    results = run_processes(arguments, flags.n, JAX_ENABLE_X64="0", OMP_NUM_THREADS="1", **others)
    for code, _, err in results:
        if code != 0:
            raise SystemExit(f"{name} failed: {err[-2000:]}")
    reported: dict[str, float] = json.loads(results[0][1].splitlines()[-1])
    return reported


def measure_verbs(sizes: list[int]) -> None:
    import jax
    import numpy as np
    from jax import lax
    from jax.sharding import NamedSharding, PartitionSpec
    from samestep.jax.check import initialize

    initialize()
    n, split = jax.device_count(), PartitionSpec("i")
    mesh = jax.make_mesh((n,), ("i",))
    ring = [(i, (i + 1) % n) for i in range(n)]
    verbs = {
        "psum": lambda s: lax.psum(s, "i"),
        "psum_scatter": lambda s: lax.psum_scatter(s, "i", tiled=True),
        "all_gather": lambda s: lax.all_gather(s, "i", tiled=True),
        "all_to_all": lambda s: lax.all_to_all(s, "i", 0, 0, tiled=True),
        "ppermute": lambda s: lax.ppermute(s, "i", ring),
    }
    times = {}
    for nbytes in sizes:
        count = nbytes // 4 // n * n
        piece = np.ones(count, np.float32)
        whole = jax.make_array_from_callback(
            (count * n,), NamedSharding(mesh, split), lambda _, piece=piece: piece
        )
        for name in VERBS:
            program = jax.shard_map(verbs[name], mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
            times[f"{name} {text_of(nbytes)}"] = seconds_of(jax.jit(program), whole)
    if jax.process_index() == 0:
        print(json.dumps(times))


def measure_step() -> None:
    """A step over sharded data, how long its reductions last, and the same step with data of each process's own.

    The difference of the two steps is no measure of communication: where XLA divides the data, it computes gradients
    transposed, and copies them in the update.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from samestep.jax.check import initialize

    initialize()

    def loss(weights, x):  # type: ignore[no-untyped-def]
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return (x * x).mean()

    @jax.jit
    def step(weights, x):  # type: ignore[no-untyped-def]
        return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights, x), strict=True)]

    times = {}
    for cell, devices in (("alone", jax.local_devices()), ("step", jax.devices())):
        mesh = Mesh(np.array(devices), ("data",))
        rows = NamedSharding(mesh, PartitionSpec("data"))
        own = np.ones((BATCH, WIDTH), np.float32)
        x = jax.make_array_from_callback((BATCH * len(devices), WIDTH), rows, lambda _, own=own: own)
        everywhere = NamedSharding(mesh, PartitionSpec())
        weight = np.full((WIDTH, WIDTH), 1e-3, np.float32)
        weights = [
            jax.make_array_from_callback(weight.shape, everywhere, lambda _, w=weight: w)
            for _ in range(LAYERS)
        ]
        times[cell] = seconds_of(lambda x, weights=weights: step(weights, x), x)
    times["all-reduce in the step"] = seconds_in("all-reduce", lambda: step(weights, x))
    if jax.process_index() == 0:
        print(json.dumps(times))


def seconds_in(operation: str, program) -> float:  # type: ignore[no-untyped-def]
    """Median time that an operation of XLA takes in a call, as the profiler sees it, waits for other ranks included."""
    import jax
    from jax.profiler import ProfileData

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(PROFILED_CALLS):
                jax.block_until_ready(program())
        profile = ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
    events = [event for plane in profile.planes for line in plane.lines for event in line.events]
    durations = [event.duration_ns for event in events if event.name.startswith(operation)]
    if len(durations) != PROFILED_CALLS:
        raise SystemExit(f"{len(durations)} operations {operation} in {PROFILED_CALLS} calls")
    return float(statistics.median(durations)) / 1e9


def seconds_of(program, argument) -> float:  # type: ignore[no-untyped-def]
    """Median time of a call, the same number of calls on every process."""
    import jax
    from jax.experimental import multihost_utils

    for _ in range(WARM_UP):
        begin = time.perf_counter()
        jax.block_until_ready(program(argument))
    once = time.perf_counter() - begin
    calls = int(multihost_utils.broadcast_one_to_all(min(MOST_CALLS, max(5, int(SECONDS / once)))))
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        jax.block_until_ready(program(argument))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def text_of(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


if __name__ == "__main__":
    main()
