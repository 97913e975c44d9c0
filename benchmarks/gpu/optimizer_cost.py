"""What `DistributedOptimizer` costs of the host's time for each parameter of torch, without a device.

    python benchmarks/gpu/optimizer_cost.py                  # a minute
    python benchmarks/gpu/optimizer_cost.py --also PYTHON    # in turns with the package that PYTHON has

A backward pass over 200 parameters of 64 float32, whose gradients are there already, with and without
`DistributedOptimizer`; the difference of the CPU time that the process takes, in us for each parameter. "cuda": on one
rank of `null_libraries.c`, whose calls return at once, with the CUDA tensors of `tests/fakes/torch_on_fakes.cpp`, whose
copies do nothing but are counted. On a device each takes the launch of a kernel more, 4 to 5 us. "host": tensors of the
host.

Reported are medians over processes, of medians within each, with the least and the most. It needs a torch that has no
CUDA of its own, and a C++ compiler.
"""

from __future__ import annotations

import argparse
import itertools
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
N_PARAMETERS, N_ELEMENTS = 200, 64
PASSES, ROUNDS = 3, 60


def main() -> None:
    """Start a process for each measurement, in turns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--also", metavar="PYTHON", action="append", default=[], help="another interpreter")
    parser.add_argument("--turns", type=int, default=5, help="processes for each figure")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libnull.so"
        words = ["-O2", "-shared", "-fPIC", "-o", str(library), str(HERE / "null_libraries.c")]
        subprocess.run([os.environ.get("CC", "cc"), *words], check=True)
        environ = {
            **os.environ,
            "SAMESTEP_CUDART_LIBRARY": str(library),
            "SAMESTEP_NCCL_LIBRARY": str(library),
        }
        environ["TORCH_ON_FAKES_NO_COPIES"] = "1"
        found: dict[tuple[str, str], list[dict[str, float]]] = {}
        contenders = list(itertools.product(("cuda", "host"), (sys.executable, *given.also)))
        for i, (where, python) in enumerate(contenders * given.turns):
            rank = environ | {"MEASURE": where, "STORE": f"file://{folder}/{i}"}
            output = subprocess.run([python, __file__], env=rank, check=True, stdout=subprocess.PIPE).stdout
            found.setdefault((where, python), []).append(json.loads(output))
    for (where, python), each in found.items():
        us = [one["us"] for one in each]
        copies = f", {each[0]['copies']:.0f} copies a pass" if where == "cuda" else ""
        median = f"{statistics.median(us):5.2f} us a parameter ({min(us):.2f} to {max(us):.2f})"
        print(f"{where:5} {median}{copies}   {python}")


def measure(where: str) -> dict[str, float]:
    """In a process of its own: us for each parameter, and kernels that copy in one pass."""
    sys.path.insert(0, str(FAKES))
    if where == "cuda":
        import torch_on_fakes

        torch: Any = torch_on_fakes.load()
    else:
        import torch
    import samestep as ss

    torch.set_num_threads(1)
    kind, device = ("nccl", "cuda:0") if where == "cuda" else ("native", "cpu")
    group = ss.initialize(kind, init_method=os.environ["STORE"], rank=0, world_size=1)
    plain = backward_pass(torch, device, lambda optimizer: optimizer)
    ours = backward_pass(torch, device, lambda optimizer: ss.DistributedOptimizer(group, optimizer))
    spent: dict[Any, list[float]] = {plain: [], ours: []}
    for _ in range(ROUNDS):
        for one, seconds in spent.items():
            begin = time.process_time()
            for _ in range(PASSES):
                one()
            seconds.append(time.process_time() - begin)
    extra = statistics.median(spent[ours]) - statistics.median(spent[plain])
    before = torch.cuda_copies() if where == "cuda" else 0
    ours()
    copies = torch.cuda_copies() - before if where == "cuda" else 0
    return {"us": 1e6 * extra / PASSES / N_PARAMETERS, "copies": copies}


def backward_pass(torch: Any, device: str, distribute: Any) -> Any:
    """A function that makes one, in which all gradients come from one node of the graph."""
    parameters = [torch.nn.Parameter(torch.ones(N_ELEMENTS).to(device)) for _ in range(N_PARAMETERS)]
    grads = [torch.ones(N_ELEMENTS).to(device) for _ in parameters]
    optimizer = distribute(torch.optim.SGD(parameters, 0.0))
    seed = torch.ones(1).to(device)

    class All(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *parameters: Any) -> Any:
            return parameters[0].new_empty(1)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return tuple(grad.detach() for grad in grads)

    def one() -> None:
        optimizer.zero_grad()
        All.apply(*parameters).backward(seed)

    return one


if __name__ == "__main__":
    if "MEASURE" in os.environ:
        print(json.dumps(measure(os.environ["MEASURE"])), flush=True)
        os._exit(0)  # a group and threads that nobody waits for
    main()
