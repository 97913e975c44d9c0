"""A training step in a CUDA graph: `kit_graph.py`, for each rank; see kit.sh."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from kit_failures import Findings
from kit_rank import RANK, SIZE, need, skip, start

STEPS = 5


def model_of(torch: Any, dtype: Any) -> Any:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    return torch.nn.Sequential(*layers).cuda().to(dtype)


def step_of(torch: Any, backend: Any, net: Any) -> tuple[Any, Callable[[], None]]:
    """A batch, and what trains `net` with it."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.zeros(16, 64, device="cuda", dtype=next(net.parameters()).dtype)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        net(x).float().square().mean().backward()
        backend.allreduce_gradients(net)
        optimizer.step()

    return x, step


def compare(torch: Any, backend: Any, dtype: Any, found: Findings) -> None:
    """The same steps with and without a graph."""
    torch.manual_seed(1 + RANK)
    batches = [torch.randn(16, 64, device="cuda") for _ in range(STEPS)]
    eager, graphed = model_of(torch, dtype), model_of(torch, dtype)
    (x, step), (y, same) = step_of(torch, backend, eager), step_of(torch, backend, graphed)
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        for _ in range(3):
            step()
            same()
    warm.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        same()
    for batch in batches:
        x.copy_(batch)
        step()
        y.copy_(batch)
        graph.replay()
    torch.cuda.synchronize()
    for (name, p), q in zip(eager.named_parameters(), graphed.parameters(), strict=True):
        found.expect(bool(torch.equal(p, q)), f"{dtype}: {name} differs from that without a graph")
        low = backend.allreduce(q.detach().float().clone(), "min")
        found.expect(bool(torch.equal(low, q.float())), f"{dtype}: {name} differs between ranks")
    found.seen[str(dtype)] = float(sum(p.float().norm() for p in graphed.parameters()))


def main() -> int:
    torch, found = need("torch"), Findings("a training step in a graph")
    if not torch.cuda.is_available():
        skip("torch sees no device")
    with start("nccl") as backend:
        for dtype in (torch.float32, torch.bfloat16):
            compare(torch, backend, dtype, found)
    found.seen["ranks"] = SIZE
    return found.finish()


if __name__ == "__main__":
    sys.exit(main())
