"""Wrong results of compiled JAX collectives on CPU, counted: each result is compared with NumPy's, bit for bit.

    python benchmarks/jax_wrong_results.py --verbs psum_scatter         # 24 devices of one process in 12 groups of 2
    python benchmarks/jax_wrong_results.py -n 2 --group 24 --kib 16     # 24 devices of two processes in one group

The first is the program of a report (jax-ml/jax#40830) in which `psum_scatter` over gloo gave wrong results in 148 of
150 iterations: each device receives 4 MiB of float64. Two inputs take turns, so a result that was left from the
iteration before counts as wrong. Iterations are dispatched without waiting for their results (`--wait` waits for each);
gloo gets as many threads of XLA as samestep asks for, since it cannot end otherwise. Inputs are random numbers, and
sums are expected in pairwise order of rank, as samestep defines them; over gloo, which promises no order, groups of
more than two devices add whole numbers.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np

IMPLEMENTATIONS = ("gloo", "samestep")
VERBS = ("psum", "pmax", "pmin", "psum_scatter", "all_gather", "all_to_all", "ppermute")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=1, help="processes")
    parser.add_argument("--devices", type=int, default=24, help="of all processes together")
    parser.add_argument("--group", type=int, default=2, help="devices that communicate with each other")
    parser.add_argument(
        "--kib", type=int, default=4096, help="of the block that psum_scatter leaves on a device"
    )
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument(
        "--wait", action="store_true", help="for each iteration before the next is dispatched"
    )
    parser.add_argument("--gloo-iterations", type=int, default=150)
    parser.add_argument("--verbs", nargs="+", default=VERBS)
    parser.add_argument("--only", choices=IMPLEMENTATIONS, help="run one of the two")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.rank:
        print(count_wrong(flags.verbs[0], flags))
        return
    print(
        f"{flags.devices} devices of {flags.n} processes in groups of {flags.group}, blocks of {flags.kib} KiB, "
        f"{flags.dtype}; wrong results of all results"
    )
    names = [flags.only] if flags.only else IMPLEMENTATIONS
    print(f"| verb | {' | '.join(names)} |\n|---|{'--:|' * len(names)}")
    for verb in flags.verbs:
        cells = [run(name, verb, flags) for name in names]
        print(f"| {verb} | {' | '.join(cells)} |", flush=True)


def iterations(name: str, flags: argparse.Namespace) -> int:
    return int(flags.gloo_iterations if name == "gloo" else flags.iterations)


def run(name: str, verb: str, flags: argparse.Namespace) -> str:
    """Wrong results on all devices, or the error with which a process ended."""
    from samestep.jax.check import run_processes

    program = [__file__, "--rank", name, "--verbs", verb, "--dtype", flags.dtype]
    for flag in ("devices", "group", "kib"):
        program += [f"--{flag}", str(getattr(flags, flag))]
    program += ["--iterations", str(iterations(name, flags))]
    program += ["--wait"] if flags.wait else []
    others = {}
    if name == "gloo":
        threads = 2 * flags.devices // flags.n + len(os.sched_getaffinity(0))
        others = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo", "PJRT_NPROC": str(threads)}
    wrong = 0
    for code, out, err in run_processes(program, flags.n, flags.devices // flags.n, timeout=None, **others):
        if code != 0:
            return f"ended with an error: {err.strip()[-120:]}"
        wrong += int(out.splitlines()[-1])
    return f"{wrong:,} of {iterations(name, flags) * flags.devices:,}"


def count_wrong(verb: str, flags: argparse.Namespace) -> int:
    """Wrong results on the devices of this process."""
    import jax
    from jax import lax
    from jax import numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from samestep.jax.check import initialize

    initialize()
    mesh = Mesh(np.array(jax.devices()).reshape(-1, flags.group), ("group", "i"))
    split = PartitionSpec(("group", "i"))
    ring = [(i, (i + 1) % flags.group) for i in range(flags.group)]
    functions = {
        "psum": lambda x: lax.psum(x, "i"),
        "pmax": lambda x: lax.pmax(x, "i"),
        "pmin": lambda x: lax.pmin(x, "i"),
        "psum_scatter": lambda x: lax.psum_scatter(x, "i", scatter_dimension=1, tiled=True),
        "all_gather": lambda x: lax.all_gather(x, "i", axis=1, tiled=True),
        "all_to_all": lambda x: lax.all_to_all(x, "i", 1, 1, tiled=True),
        "ppermute": lambda x: lax.ppermute(x, "i", ring),
    }

    def check(x: Any, expected: Any, wrong: Any) -> Any:
        bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        found = functions[verb](x)
        differs = lax.bitcast_convert_type(found, bits) != lax.bitcast_convert_type(expected, bits)
        return wrong + differs.any().astype(wrong.dtype)

    program = jax.jit(
        jax.shard_map(check, mesh=mesh, in_specs=(split,) * 3, out_specs=split, check_vma=False)
    )

    def sharded(x: Any) -> Any:
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, split), lambda index: x[index])

    whole = flags.rank == "gloo" and flags.group > 2
    turns = [[sharded(x) for x in case(verb, flags, seed, whole)] for seed in (0, 1)]
    wrong = sharded(np.zeros(flags.devices, np.int32))
    for i in range(flags.iterations):
        wrong = program(*turns[i % 2], wrong)
        if flags.wait:
            wrong.block_until_ready()
    return int(sum(np.asarray(shard.data).sum() for shard in wrong.addressable_shards))


def case(verb: str, flags: argparse.Namespace, seed: int, whole: bool) -> tuple[Any, Any]:
    """The input and the expected result of all devices, a row for each."""
    dtype, group = np.dtype(flags.dtype), flags.group
    block = (flags.kib << 10) // dtype.itemsize
    width = block if verb == "all_gather" else block * group
    rng = np.random.default_rng(seed)
    shape = (flags.devices // group, group, width)
    x = (rng.integers(-99, 99, shape) if whole else rng.standard_normal(shape)).astype(dtype)
    found = {
        "psum": lambda: np.repeat(pairwise_sum(x), group, 1),
        "pmax": lambda: np.repeat(x.max(1, keepdims=True), group, 1),
        "pmin": lambda: np.repeat(x.min(1, keepdims=True), group, 1),
        "psum_scatter": lambda: pairwise_sum(x),
        "all_gather": lambda: np.repeat(x.reshape(shape[0], 1, -1), group, 1),
        "all_to_all": lambda: x.reshape(*shape[:2], group, -1).swapaxes(1, 2),
        "ppermute": lambda: np.roll(x, 1, 1),
    }[verb]()
    return x.reshape(flags.devices, -1), found.reshape(flags.devices, -1)


def pairwise_sum(x: Any) -> Any:
    """((r0 + r1) + (r2 + r3)) + ... over axis 1."""
    terms = [x[:, i] for i in range(x.shape[1])]
    while len(terms) > 1:
        pairs = [a + b for a, b in zip(terms[::2], terms[1::2], strict=False)]
        terms = pairs + terms[len(pairs) * 2 :]
    return terms[0][:, None]


if __name__ == "__main__":
    main()
