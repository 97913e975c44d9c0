"""How ranks that share CPUs take turns: calls of allreduce in a row, in batches.

    samestep run -n 4 benchmarks/turns.py [--sizes 64,4KiB] [--seconds 2] [--busy 2]
    mpirun -n 4 python benchmarks/turns.py --beside mpi4py,gloo --turns 5

How long a call lasted, how often each rank lost its CPU for it, and how many ranks each CPU had. Each rank has to run
once in each call, and the last one of a CPU may go on with the next call. So with as many ranks on each CPU the least
is 1 - CPUs / ranks preemptions for each rank. `--busy` adds processes that compute all the time, as the workers of a
DataLoader do.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import samestep as ss
from results import KIB, microseconds, size, sizes_of

BATCH_S = 2e-3  # about; of calls that end at once
MOST_CALLS = 10_000
MOST_BUSY = 32
"""Calls in a batch beside busy processes: a call lasts 1 us at one time, and a round of the scheduler at another."""
MOVED = "moved"

_cpu_of_this_thread = ctypes.CDLL(None).sched_getcpu


@dataclass(frozen=True)
class Batch:
    """Calls in a row, as one rank saw them.

    Attributes:
      us: of a call.
      preemptions: of the CPU, for each call.
      cpus: that the rank ran on before and after.
    """

    us: float
    preemptions: float
    cpus: tuple[int, int]


def measure(
    backend: ss.Backend, call: Callable[[], object], seconds: float, most_calls: int
) -> list[list[Batch]]:
    """The batches of all ranks, by rank. Collective."""
    n_calls = 1
    while True:
        lasted_s = backend.allreduce(_batch(call, n_calls).us * n_calls * 1e-6, "max")
        if lasted_s > BATCH_S / 2 or n_calls >= most_calls:
            break
        n_calls *= 2
    batches = []
    end = time.perf_counter() + seconds
    while backend.bcast(np.array(time.perf_counter() < end)):  # rank 0's clock
        batches.append(_batch(call, n_calls))
    return backend.allgather_object(batches)


def _batch(call: Callable[[], object], n_calls: int) -> Batch:
    cpu, preemptions, start = _cpu_of_this_thread(), _preemptions(), time.perf_counter()
    for _ in range(n_calls):
        call()
    us = (time.perf_counter() - start) / n_calls * 1e6
    return Batch(us, (_preemptions() - preemptions) / n_calls, (cpu, _cpu_of_this_thread()))


def _preemptions() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_nvcsw + used.ru_nivcsw


def placement(batches: tuple[Batch, ...]) -> str:
    """How many ranks each CPU had, such as "2+2". Pure.

    Example:
      >>> placement((Batch(1, 0, (0, 0)), Batch(1, 0, (1, 1)), Batch(1, 0, (0, 0))))
      '2+1'
    """
    if any(batch.cpus[0] != batch.cpus[1] for batch in batches):
        return MOVED
    return "+".join(str(n) for _, n in Counter(batch.cpus[0] for batch in batches).most_common())


def table(name: str, nbytes: int, turns: list[list[list[Batch]]]) -> str:
    """A line: of the slowest rank's batches the median and the mean, the median of each rank's preemptions. Pure.

    Of several turns the median of the medians, and the mean of the means: slow turns have fewer batches.
    """
    by_turn = [list(zip(*by_rank, strict=True)) for by_rank in turns]
    us = [[max(batch.us for batch in of_all) for of_all in batches] for batches in by_turn]
    by_rank = [[batch for rank in ranks for batch in rank] for ranks in zip(*turns, strict=True)]
    preemptions = " ".join(
        f"{statistics.median(batch.preemptions for batch in rank):.2f}" for rank in by_rank
    )
    places = Counter(placement(of_all) for batches in by_turn for of_all in batches)
    where = ", ".join(f"{place} {n / places.total():.0%}" for place, n in places.most_common())
    median = microseconds(statistics.median(map(statistics.median, us)))
    mean = microseconds(statistics.fmean(map(statistics.fmean, us)))
    return f"{name:<8} {size(nbytes):>8} {median:>10} {mean:>10}  {preemptions:<24}  {where}"


@contextlib.contextmanager
def busy(n: int) -> Iterator[None]:
    """So many processes compute meanwhile."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def gloo(backend: ss.Backend, nbytes: int) -> Callable[[], object]:
    """All-reduce of torch.distributed."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        path = tempfile.mkdtemp() if backend.rank == 0 else None
        if path:
            atexit.register(shutil.rmtree, path, ignore_errors=True)  # gloo removes its file, too
        path = backend.bcast_object(path)
        dist.init_process_group(
            "gloo", init_method=f"file://{path}/store", rank=backend.rank, world_size=backend.size
        )
    x = torch.zeros(nbytes // 4)
    return lambda: dist.all_reduce(x)


def samestep_in_torch(backend: ss.Backend, nbytes: int) -> Callable[[], object]:
    """The same over samestep."""
    import torch
    import torch.distributed as dist

    gloo(backend, nbytes)
    group, x = dist.new_group(backend="samestep"), torch.zeros(nbytes // 4)
    return lambda: dist.all_reduce(x, group=group)


def mpi4py(_: ss.Backend, nbytes: int) -> Callable[[], object]:
    """All-reduce of the MPI library."""
    from mpi4py import MPI

    x = np.zeros(nbytes // 4, "float32")
    return lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x)


RIVALS = {"mpi4py": mpi4py, "gloo": gloo, "torch": samestep_in_torch}


def contenders(backend: ss.Backend, nbytes: int, rivals: Sequence[str]) -> dict[str, Callable[[], object]]:
    """What is called, by name."""
    x, shared = np.zeros(nbytes // 4, "float32"), backend.zeros(nbytes // 4, "float32")
    ours = {"samestep": lambda: backend.allreduce(x), "shared": lambda: backend.allreduce(shared)}
    return ours | {name: RIVALS[name](backend, nbytes) for name in rivals}


def _rivals(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(RIVALS):
        raise argparse.ArgumentTypeError(f"{text!r}: some of {', '.join(RIVALS)}")
    return names


def main() -> None:
    """The table, printed by rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=sizes_of, default=[8, 64, KIB, 4 * KIB], help="like 64,4KiB")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute all the time")
    parser.add_argument("--turns", type=int, default=1, help="of all contenders")
    parser.add_argument("--beside", type=_rivals, default=[], metavar="mpi4py,gloo,torch", help="as well")
    arguments = parser.parse_args()
    most_calls = MOST_BUSY if arguments.busy else MOST_CALLS
    with ss.initialize() as backend, busy(arguments.busy if backend.rank == 0 else 0):
        if backend.rank == 0:
            head = f"{'size':>8} {'median us':>10} {'mean us':>10}  {'preempted, by rank':<24}  ranks on each CPU"
            print(f"{'':<8} {head}", flush=True)
        for nbytes in arguments.sizes:
            calls = contenders(backend, nbytes, arguments.beside)
            turns: dict[str, list[list[list[Batch]]]] = {name: [] for name in calls}
            for _ in range(arguments.turns):
                for name, call in calls.items():
                    turns[name].append(measure(backend, call, arguments.seconds, most_calls))
            if backend.rank == 0:
                for name, measured in turns.items():
                    print(table(name, nbytes, measured), flush=True)


if __name__ == "__main__":
    main()
