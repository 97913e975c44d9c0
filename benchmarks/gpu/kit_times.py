"""Parts of the kit that take times: `kit_times.py overhead|waiting|staging|trees`.

Contenders live in one process and take turns; reported are medians over the rounds, in microseconds.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import device_kinds
import numpy as np
import raw_nccl
import samestep as ss
from kit_rank import RANK, SHORT, SIZE, start, tell, turns

MIB = 1 << 20
PLACE = Path(os.environ.get("KIT_PLACE", "."))
# Ranks that share a device take turns on it, of some 10 ms: that many for each size, and the part keeps its deadline.
SECONDS_EACH = 4.0


def rounds(
    contenders: dict[str, Callable[[], Any]],
    ended: Callable[[], None],
    n: int,
    each: int,
    *,
    within: tuple[Any, float] | None = None,
    warm: int = 0,
) -> Any:
    """Times of one call: until it returned, and until its work had ended.

    "cold_us" is the first of a turn, which follows a wait for the device: what it needs is not in the caches.

    Args:
      contenders: calls that begin some work, by name.
      ended: waits until all of it has ended.
      n: rounds; in each, every contender has a turn, in rotating order.
      each: calls of a turn.
      within: a backend and the seconds that all rounds may take: its ranks then agree on fewer where calls are slow.
      warm: calls at the beginning of a turn that count only in what the whole took.
    """
    cold: dict[str, list[float]] = {name: [] for name in contenders}
    returned: dict[str, list[float]] = {name: [] for name in contenders}
    complete: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for name in names:  # not counted: memory, channels, code
        contenders[name]()
        ended()
    if within is not None:
        backend, seconds = within
        begin = time.perf_counter()
        for name in names:
            contenders[name]()
            ended()
        slowest = backend.allreduce(np.array([time.perf_counter() - begin]), "max")
        n, each = fewer(n, each, float(slowest[0]), seconds, warm)
    for turn in range(n):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            call = contenders[name]
            ended()
            first = time.perf_counter()
            for _ in range(warm):
                call()
                if len(cold[name]) <= turn:
                    cold[name].append(1e6 * (time.perf_counter() - first))
            begin = time.perf_counter()
            for _ in range(each):
                call()
            back = time.perf_counter()
            ended()
            returned[name].append(1e6 * (back - begin) / each)
            complete[name].append(1e6 * (time.perf_counter() - first) / (warm + each))
    return {
        name: {
            "call_us": statistics.median(returned[name]),
            "whole_us": statistics.median(complete[name]),
            **({"cold_us": statistics.median(cold[name])} if warm else {}),
        }
        for name in names
    }


def fewer(n: int, each: int, once: float, seconds: float, warm: int = 0) -> tuple[int, int]:
    """Rounds and calls of a turn for the time there is, if one call of every contender takes `once` seconds. Pure.

    Example:
      >>> fewer(15, 50, 0.0001, 6.0)
      (15, 50)
      >>> fewer(15, 50, 0.08, 6.0)  # fewer calls of a turn first: medians need their rounds
      (15, 5)
      >>> fewer(15, 50, 1.0, 6.0)
      (6, 1)
    """
    most = max(int(seconds / max(once, 1e-9)), 1)
    n = min(n, most)
    return n, max(min(each, most // n - warm), 1)


def torch_nccl() -> Any:
    """torch.distributed on its own NCCL backend with the ranks of this part, or the reason why not."""
    if device_kinds.on_fakes() and device_kinds.wanted() != "torch":
        return "torch has no stand-in"
    try:
        import torch.distributed as dist

        store = dist.FileStore(str(PLACE / "torch"), SIZE)
        dist.init_process_group("nccl", store=store, rank=RANK, world_size=SIZE)
    except Exception as error:
        return f"torch.distributed: {error}"
    return dist


def overhead() -> int:
    """A call of ours, of NCCL by ctypes, and of torch's NCCL backend, on the same arrays."""
    arrays = device_kinds.choose()
    with start("nccl") as backend:
        library = raw_nccl.find()
        raw, raw_late = (
            raw_nccl.RawNccl(library, rank=RANK, size=SIZE, meeting=PLACE / name, blocking=name == "blocking")
            for name in ("blocking", "non-blocking")
        )
        dist = torch_nccl()
        if isinstance(dist, str):
            tell(what="note", text=f"without torch's own NCCL backend: {dist}")
        for nbytes in (4, 1 << 10, 64 << 10, MIB, 64 * MIB) if not SHORT else (4, 64 << 10):
            x, y = (arrays.of(np.ones(nbytes // 4, "float32")) for _ in range(2))
            a, b, stream, count = device_kinds.address(x), device_kinds.address(y), arrays.stream, nbytes // 4
            contenders = {
                "raw": lambda a=a, b=b, c=count, s=stream: raw.all_reduce(b, a, c, s),
                "samestep": lambda x=x, y=y: backend.iallreduce(x, out=y).wait(),
                "samestep blocking": lambda x=x, y=y: backend.allreduce(x, out=y),
                "raw non-blocking": lambda a=a, b=b, c=count, s=stream: raw_late.all_reduce(b, a, c, s),
                "raw in place": lambda a=a, c=count, s=stream: raw.all_reduce(a, a, c, s),
                "samestep in place": lambda x=x: backend.iallreduce(x).wait(),
                "samestep blocking in place": lambda x=x: backend.allreduce(x),
            }
            if not isinstance(dist, str) and arrays.name == "torch":
                if SIZE == 1:  # torch's sums are in place; of one rank a gather is a copy, too
                    contenders["torch"] = lambda x=x, y=y: dist.all_gather_into_tensor(
                        y, x, async_op=True
                    ).wait()
                contenders["torch in place"] = lambda x=x: dist.all_reduce(x, async_op=True).wait()
                contenders["torch blocking in place"] = lambda x=x: dist.all_reduce(x)
            measured = rounds(
                contenders,
                arrays.synchronize,
                turns(15, 3),
                50 if nbytes < MIB else 20,
                within=(backend, SECONDS_EACH),
                warm=2,
            )
            tell(what="overhead", nbytes=nbytes, ranks=SIZE, times=measured)
        for one in (raw, raw_late):
            one.close()
    return 0


def waiting() -> int:
    """How many calls return only after the device has arrived to them: none may."""
    arrays = device_kinds.choose()
    with start("nccl") as backend:
        x, y = (arrays.of(np.ones(1000, "float32")) for _ in range(2))
        rows = arrays.of(np.ones((SIZE, 1000), "float32"))  # to free memory is to wait
        calls: dict[str, Callable[[], Any]] = {
            "iallreduce": lambda: backend.iallreduce(x),
            "iallreduce, wait": lambda: backend.iallreduce(x, out=y).wait(),
            "iallreduce, premul": lambda: backend.iallreduce(x, ss.premul(0.5)).wait(),
            "ibcast": lambda: backend.ibcast(x).wait(),
            "iallgather": lambda: backend.iallgather(x, out=rows).wait(),
            "allreduce": lambda: backend.allreduce(x),
            "allreduce_tree": lambda: backend.allreduce_tree({"a": x, "b": y}),
        }
        waited = {}
        for name, call in calls.items():
            call()  # not counted: whatever the first call has to make
            waited[name] = 0
            for _ in range(turns(10, 2)):
                arrays.synchronize()
                arrays.busy(0.05)
                call()
                waited[name] += arrays.idle()
        arrays.synchronize()
        tell(what="waiting", busy_s=device_kinds.busy_really(arrays), waited=waited)
    return int(any(waited.values()))


def staging() -> int:
    """Through the host: ours, against torch's copies there and back, and against what neither can beat."""
    arrays = device_kinds.choose()
    with start("native") as backend:
        for nbytes in (4 << 10, MIB, 64 * MIB) if not SHORT else (MIB,):
            x, other = (arrays.of(np.ones(nbytes // 4, "float32")) for _ in range(2))
            there, back = arrays.pinned(nbytes), arrays.pinned(nbytes)
            host = np.ones(nbytes // 4, "float32")

            def naive(x: Any = x, shape: Any = host.shape) -> None:
                values = np.array(arrays.get(x)).reshape(shape)
                backend.allreduce(values, "max")
                arrays.copy(x, arrays.of(values))
                arrays.synchronize()

            def together() -> None:
                arrays.synchronize()
                backend.barrier()

            contenders = {
                "staged": lambda x=x: backend.iallreduce(x, "max").wait(host=True),
                "naive": naive,
                "copy there": lambda x=x, there=there: arrays.to_host(x, there),
                "copy back": lambda other=other, back=back: arrays.from_host(other, back),
                "host": lambda host=host: backend.allreduce(host, "max"),
            }
            each = 1 if nbytes > MIB else 5
            tell(
                what="staging",
                nbytes=nbytes,
                ranks=SIZE,
                times=rounds(contenders, together, turns(9, 3), each),
            )
    return 0


def leaf_sets() -> dict[str, list[int]]:
    """Sizes of leaves, in elements of float32."""
    uneven = [1 + 977 * k % 30_011 for k in range(128)]
    sets = {"128 of 256 KiB": [65536] * 128, "128 of 4 KiB": [1024] * 128, "128 uneven": uneven}
    return {"128 of 4 KiB": [1024] * 128} if SHORT else sets


def trees() -> int:
    """A tree of many small arrays: in one group of NCCL, and one call each."""
    arrays = device_kinds.choose()
    with start("nccl") as backend:
        for name, sizes in leaf_sets().items():
            tree = {str(k): arrays.of(np.ones(size, "float32")) for k, size in enumerate(sizes)}
            contenders = {
                "grouped": lambda tree=tree: backend.allreduce_tree(tree, "max"),
                "one by one": lambda tree=tree: [backend.allreduce(x, "max") for x in tree.values()],
            }
            measured = rounds(contenders, arrays.synchronize, turns(11, 2), turns(10, 1))
            tell(what="trees", leaves=name, nbytes=4 * sum(sizes), times=measured)
    return 0


PARTS = {
    "overhead": overhead,
    "waiting": waiting,
    "staging": staging,
    "trees": trees,
}

if __name__ == "__main__":
    sys.exit(PARTS[sys.argv[1]]())
