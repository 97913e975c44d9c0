"""What each rank of `samestep bench` does."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from samestep._util.cpus import usable_cpus
from samestep._util.text import size
from samestep.backend import Backend
from samestep.world.lifecycle import finalize, initialize

_KIB, _MIB = 1 << 10, 1 << 20
_SIZES = (8, _KIB, 16 * _KIB, 64 * _KIB, 256 * _KIB, _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB)
_BURST = 0.02  # seconds of calls in a row
_ROUNDS = 7
# Okabe and Ito's colours, distinct with any colour vision; the markers tell the same in grey.
_STYLES = {"samestep": ("#0072B2", "o"), "shared": ("#009E73", "s"), "mpi4py": ("#D55E00", "^")}
_BUSY = 0.5  # load before the start from which the machine is called busy

Burst = Callable[[], object]
Times = Mapping[int, Mapping[str, float]]


def main(verb: str, plot: Path | None) -> int:
    """Measures on all ranks; rank 0 prints. Returns the exit code."""
    busy = os.getloadavg()[0]
    backend = initialize()
    first, several = backend.rank == 0, backend.size > 1
    times = {}
    if first:
        print(title(backend, verb), legend(backend), sep="\n")
        if busy > _BUSY:
            print(f"other programs are running (load {busy:.1f}): times are longer than they need be")
    for done, nbytes in enumerate(_SIZES):
        times[nbytes] = measure(backend, calls(backend, verb, nbytes))
        if first:
            lines = [row(nbytes, times[nbytes], speed=several)]
            print(*([] if done else [head(times[nbytes], speed=several)]), *lines, sep="\n", flush=True)
    finalize()
    if first and several:
        print("\n".join(findings(times)))
    if first and plot:
        draw(times, title(backend, verb), plot)
        print(f"plot: {plot.resolve()}")
    return 0


def title(backend: Backend, verb: str) -> str:
    """What the table is about."""
    return (
        f"{verb} of float32, {backend.size} rank(s) on {usable_cpus()} core(s), transport {backend.transport}: "
        f"us per call, median of {_ROUNDS} runs, slowest rank"
    )


def legend(backend: Backend) -> str:
    """What the columns are about."""
    if backend.size == 1:
        return "One rank exchanges nothing, so these are the times of the calls alone; -n 2 measures an exchange."
    return "GB/s: bytes that each rank passes in, per second, in the fastest of our columns."


def head(times: Mapping[str, float], *, speed: bool = True) -> str:
    """The names of the columns."""
    ratios = [f"mpi4py/{name}" for name in times if "mpi4py" in times and name != "mpi4py"]
    return _line("size", list(times), ["GB/s"] * speed, ratios)


def row(nbytes: int, times: Mapping[str, float], *, speed: bool = True) -> str:
    """One line: microseconds, bytes of one rank per second for the fastest of ours, times faster than mpi4py."""
    ours = [name for name in times if name != "mpi4py"]
    fastest = nbytes / min(times[name] for name in ours) / 1e9
    ratios = [f"{times['mpi4py'] / times[name]:.2f}" for name in ours if "mpi4py" in times]
    micros = [f"{seconds * 1e6:.2f}" for seconds in times.values()]
    return _line(size(nbytes), micros, [f"{fastest:.2f}"] * speed, ratios)


def _line(first: str, times: Sequence[str], speed: Sequence[str], ratios: Sequence[str]) -> str:
    """Columns of one width each, and a space between them whatever they hold."""
    cells = [f"{first:>8}", *(f"{cell:>11}" for cell in times), *(f"{cell:>7}" for cell in speed)]
    return " ".join([*cells, *(f"{cell:>16}" for cell in ratios)])


def findings(times: Times) -> list[str]:
    """Where one column overtakes another, in words. Pure.

    Example:
      >>> findings({8: {"samestep": 1.0, "shared": 1.0}, 64: {"samestep": 3.0, "shared": 2.0}})
      ['shared is faster than samestep at 64 B']
    """
    names = list(next(iter(times.values())))
    pairs = [("shared", "samestep"), ("samestep", "mpi4py"), ("shared", "mpi4py")]
    return [
        f"{ours} is faster than {theirs} {faster_where(times, ours, theirs)}"
        for ours, theirs in pairs
        if ours in names and theirs in names
    ]


def faster_where(times: Times, ours: str, theirs: str) -> str:
    """The runs of sizes at which `ours` takes less time. Pure.

    Example:
      >>> t = {8: {"a": 1, "b": 2}, 16: {"a": 1, "b": 2}, 32: {"a": 3, "b": 2}, 64: {"a": 1, "b": 2}}
      >>> faster_where(t, "a", "b"), faster_where(t, "b", "a")
      ('from 8 B to 16 B, at 64 B', 'at 32 B')
    """
    by_speed = itertools.groupby(sorted(times), lambda nbytes: times[nbytes][ours] < times[nbytes][theirs])
    runs = [list(sizes) for is_faster, sizes in by_speed if is_faster]
    if not runs:
        return "nowhere"
    if len(runs[0]) == len(times):
        return "at every size"
    return ", ".join(_run(sizes) for sizes in runs)


def _run(sizes: Sequence[int]) -> str:
    return f"at {size(sizes[0])}" if len(sizes) == 1 else f"from {size(sizes[0])} to {size(sizes[-1])}"


def measure(backend: Backend, contenders: Mapping[str, Burst]) -> dict[str, float]:
    """Seconds of one call for each of the `contenders`, calls that all ranks make together, in turn. Collective."""

    def burst(call: Burst, count: int) -> float:
        backend.barrier()
        start = time.perf_counter()
        for _ in range(count):
            call()
        return float(backend.allreduce((time.perf_counter() - start) / count, "max"))

    counts = {}
    for name, call in contenders.items():
        counts[name] = max(3, int(_BURST / min(burst(call, 3) for _ in range(3))))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(_ROUNDS):
        for name, call in contenders.items():
            times[name].append(burst(call, counts[name]))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def calls(backend: Backend, verb: str, nbytes: int) -> dict[str, Burst]:
    """Contender -> the verb on `nbytes` that each rank passes in. Collective."""

    def ordinary(shape: tuple[int, ...]) -> np.ndarray:
        return np.zeros(shape, np.float32)

    def shared(shape: tuple[int, ...]) -> np.ndarray:
        array = backend.empty(shape, np.float32)
        array[...] = 0
        return array

    made = {
        "samestep": _ours(backend, verb, nbytes, ordinary),
        "shared": _ours(backend, verb, nbytes, shared),
    }
    if has_mpi4py(backend):
        made["mpi4py"] = _mpi4py(backend, verb, nbytes, ordinary)
    return made


def has_mpi4py(backend: Backend) -> bool:
    """Whether mpi4py's world is the same group of ranks."""
    if backend.kind != "mpi":
        return False
    from mpi4py import MPI

    return bool(MPI.COMM_WORLD.size == backend.size)


def _arrays(
    backend: Backend, verb: str, nbytes: int, make: Callable[[tuple[int, ...]], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """What is passed in, and what is received into; the same where the verb works in place."""
    count, n = nbytes // 4, backend.size
    block = -(-count // n)
    shapes = {
        "allgather": ((count,), (n, count)),
        "reduce_scatter": ((n, block), (block,)),
        "alltoall": ((n, block), (n, block)),
    }
    if verb not in shapes:
        x = make((count,))
        return x, x
    given, received = shapes[verb]
    return make(given), make(received)


def _ours(backend: Backend, verb: str, nbytes: int, make: Callable[[tuple[int, ...]], np.ndarray]) -> Burst:
    x, out = _arrays(backend, verb, nbytes, make)
    return partial(getattr(backend, verb), x, **({} if out is x else {"out": out}))


def _mpi4py(backend: Backend, verb: str, nbytes: int, make: Callable[[tuple[int, ...]], np.ndarray]) -> Burst:
    from mpi4py import MPI

    x, out = _arrays(backend, verb, nbytes, make)
    comm, in_place = MPI.COMM_WORLD, MPI.IN_PLACE
    table: dict[str, Burst] = {
        "allreduce": partial(comm.Allreduce, in_place, x),
        "bcast": partial(comm.Bcast, x, root=0),
        "allgather": partial(comm.Allgather, x, out),
        "reduce_scatter": partial(comm.Reduce_scatter_block, x, out),
        "alltoall": partial(comm.Alltoall, x, out),
    }
    return table[verb]


def draw(times: Mapping[int, Mapping[str, float]], title: str, path: Path) -> None:
    """Microseconds over size for each contender, on logarithmic axes, in a file whose ending decides the format."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    sizes = sorted(times)
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name in times[sizes[0]]:
        colour, marker = _STYLES[name]
        axes.plot(sizes, [times[s][name] * 1e6 for s in sizes], color=colour, marker=marker, label=name)
    axes.set(xscale="log", yscale="log", xlabel="bytes that each rank passes in", ylabel="us per call")
    axes.set_xticks(sizes, [size(s) for s in sizes], rotation=45, ha="right")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(title, fontsize=8, wrap=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)
