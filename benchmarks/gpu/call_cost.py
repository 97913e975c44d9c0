"""What a call on device arrays costs of the host's time, beside raw NCCL, without a device.

    python benchmarks/gpu/call_cost.py          # half a minute

The CPU time of the calling thread, in us, of `ncclAllReduce` by ctypes and of samestep's calls, on one rank and on two
of `null_libraries.c`, whose calls return at once, with the CUDA tensors of `tests/fakes/torch_on_fakes.cpp`. Medians of
15 turns of 200 calls. On a device each event takes about a microsecond more: a blocking call has one.

It needs a torch that has no CUDA of its own, and C and C++ compilers.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FAKES = HERE.parents[1] / "tests/fakes"
TURNS, CALLS = 15, 200


def main() -> None:
    """Start the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libnull.so"
        words = ["-O2", "-shared", "-fPIC", "-o", str(library), str(HERE / "null_libraries.c")]
        subprocess.run([os.environ.get("CC", "cc"), *words], check=True)
        null = {"SAMESTEP_CUDART_LIBRARY": str(library), "SAMESTEP_NCCL_LIBRARY": str(library)}
        found = {}
        for size in (1, 2):
            of_all = {**os.environ, **null, "SIZE": str(size), "STORE": f"file://{folder}/{size}"}
            of_all["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # there is one device
            ranks = [
                subprocess.Popen(
                    [sys.executable, __file__], env={**of_all, "MEASURE": str(rank)}, stdout=subprocess.PIPE
                )
                for rank in range(size)
            ]
            found[size] = json.loads(max(rank.communicate()[0] for rank in ranks))
    print("| us of the calling thread | one rank | two ranks |\n|---|--:|--:|")
    for name in found[1]:
        print(f"| {name} | {found[1][name]:.2f} | {found[2][name]:.2f} |")


def measure(rank: int, size: int) -> dict[str, float]:
    """In a process of its own: medians by the name of the call."""
    sys.path.insert(0, str(FAKES))
    import torch_on_fakes

    torch: Any = torch_on_fakes.load()
    import samestep as ss

    group = ss.initialize("nccl", init_method=os.environ["STORE"], rank=rank, world_size=size)
    x, y = (torch.ones(1024).to("cuda:0") for _ in range(2))
    raw = ctypes.CDLL(os.environ["SAMESTEP_NCCL_LIBRARY"]).ncclAllReduce
    pointer = ctypes.c_void_p
    raw.argtypes = [pointer, pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, pointer, pointer]
    a, b = x.data_ptr(), y.data_ptr()
    calls = {
        "`ncclAllReduce`, by ctypes": lambda: raw(a, b, 1024, 7, 0, 1, None),
        "`allreduce(x)`": lambda: group.allreduce(x),
        "`allreduce(x, out=y)`": lambda: group.allreduce(x, out=y),
        "`iallreduce(x).wait()`": lambda: group.iallreduce(x).wait(),
    }
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(TURNS + 1):  # the first is not counted
        for name, call in calls.items():
            group.barrier()
            begin = time.thread_time()
            for _ in range(CALLS):
                call()
            if turn:
                spent[name].append(1e6 * (time.thread_time() - begin) / CALLS)
    return {name: statistics.median(each) for name, each in spent.items()}


if __name__ == "__main__":
    if "MEASURE" in os.environ:
        number = int(os.environ["MEASURE"])
        times = measure(number, int(os.environ["SIZE"]))
        if number == 0:
            print(json.dumps(times), flush=True)
        os._exit(0)  # a group and threads that nobody waits for
    main()
