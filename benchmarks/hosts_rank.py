"""One rank of `hosts.py`: it does what it reads from a pipe, with the library that its command line names."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

BUDGET_S = 0.8  # of one contender, size and turn
MOST_CALLS = 20
PINGS = 200


@dataclass(frozen=True)
class Group:
    """What the measurement needs of a library; `arrays` makes an array of so many float32, by name of the kind."""

    library: str
    rank: int
    size: int
    arrays: Mapping[str, Callable[[int], Any]]
    allreduce: Callable[[Any], object]
    barrier: Callable[[], object]
    slowest: Callable[[float], float]
    send: Callable[[Any, int], object]
    recv: Callable[[Any, int], object]
    close: Callable[[], object]


def _ordinary(count: int) -> Any:
    return np.empty(count, np.float32)


def _samestep(backend: str) -> Group:
    import samestep as ss

    world = ss.initialize(backend, timeout=120)
    return Group(
        f"samestep {ss.__version__}, {world.transport}",
        world.rank,
        world.size,
        {"": _ordinary, " shared": lambda count: world.empty(count, np.float32)},
        world.allreduce,
        world.barrier,
        lambda seconds: float(world.allreduce(np.array([seconds]), "max")[0]),
        world.send,
        world.recv,
        ss.finalize,
    )


def _mpi4py() -> Group:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    library = MPI.Get_library_version().split("\n")[0].rstrip("\0 ,")
    return Group(
        library.partition(", package")[0],
        world.rank,
        world.size,
        {"": _ordinary},
        lambda x: world.Allreduce(MPI.IN_PLACE, x),
        world.Barrier,
        lambda seconds: float(world.allreduce(seconds, MPI.MAX)),
        world.Send,
        world.Recv,
        lambda: None,
    )


def _gloo() -> Group:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))

    def slowest(seconds: float) -> float:
        value = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return value.item()

    return Group(
        f"gloo of torch {torch.__version__}",
        dist.get_rank(),
        dist.get_world_size(),
        {"": _ordinary},
        lambda x: dist.all_reduce(torch.from_numpy(x)),
        dist.barrier,
        slowest,
        lambda x, peer: dist.send(torch.from_numpy(x), peer),
        lambda x, peer: dist.recv(torch.from_numpy(x), peer),
        dist.destroy_process_group,
    )


LIBRARIES: dict[str, Callable[[], Group]] = {
    "native": lambda: _samestep("native"),
    "mpi": lambda: _samestep("mpi"),
    "mpi4py": _mpi4py,
    "gloo": _gloo,
}


def _bytes_sent() -> int:
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        if line.strip().startswith("eth0:"):
            return int(line.split(":")[1].split()[8])
    return 0


def _half_round_trip(group: Group) -> float:
    """Seconds of 8 bytes in one direction between the first and the last rank."""
    word, peer, times = np.zeros(1), group.size - 1 - group.rank, []
    for _ in range(PINGS):
        begin = time.perf_counter()
        for act in (group.send, group.recv) if group.rank == 0 else (group.recv, group.send):
            act(word, peer)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / 2


def _allreduce(group: Group, x: Any) -> tuple[float, float]:
    """Seconds of an allreduce, and what the host sent meanwhile, as a multiple of the array."""

    def once() -> float:
        x[...] = group.rank + 1
        group.barrier()
        begin = time.perf_counter()
        group.allreduce(x)
        return group.slowest(time.perf_counter() - begin)

    calls = int(min(MOST_CALLS, max(2, BUDGET_S / once())))
    before = _bytes_sent()
    times = [once() for _ in range(calls)]
    sent = (_bytes_sent() - before) / calls / x.nbytes
    if not (x == group.size * (group.size + 1) / 2).all():
        raise RuntimeError("the sum is wrong")
    return statistics.median(times), sent


def _turn(group: Group, arrays: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"library": group.library}
    if group.rank in {0, group.size - 1}:
        _half_round_trip(group)
        found["half_round_trip_us"] = _half_round_trip(group) * 1e6
    group.barrier()
    for name, array in arrays.items():
        seconds, sent = _allreduce(group, array)
        found[name] = {"ms": seconds * 1e3, "sent": sent}
    return found


def work(library: str, sizes: Sequence[int], folder: Path, each: int) -> None:
    """What each rank runs: one measurement for each line in its pipe; rank 0 answers with a line of JSON.

    It sleeps between turns, so that idle ranks take no processor from those whose turn it is.
    """
    group = LIBRARIES[library]()
    arrays = {f"{nbytes}{kind}": make(nbytes // 4) for kind, make in group.arrays.items() for nbytes in sizes}
    with (folder / "answers").open("w") as answers, (folder / f"orders{group.rank}").open() as orders:
        if group.rank == 0:
            print("{}", file=answers, flush=True)
        for _ in orders:
            found = _turn(group, arrays)
            if group.rank == 0:
                print(json.dumps(found), file=answers, flush=True)
    group.close()
