"""A part of the kit: `kit_step.py`. The time of a training step, with torch and without it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import device_kinds
import numpy as np
import samestep as ss
from kit_rank import SHORT, SIZE, need, skip, start, tell, turns
from kit_times import rounds, torch_nccl


def step_on_fakes() -> int:
    """Gradients of 48 layers, made and averaged: what a step has without torch."""
    arrays = device_kinds.choose()
    with start("nccl") as backend:
        grads = [arrays.of(np.ones(257, "float32")) for _ in range(48)]

        def one() -> None:
            for grad in grads:
                arrays.fill(grad, 1.0)
            ss.allreduce_gradients(backend, grads)

        contenders = {"samestep": one}
        tell(what="step", ranks=SIZE, times=rounds(contenders, arrays.synchronize, turns(11, 2), 2))
    return 0


def step() -> int:
    """A step of training with torch: forward, backward, gradients averaged, optimizer."""
    if device_kinds.on_fakes() and device_kinds.wanted() != "torch":
        return step_on_fakes()
    torch = need("torch")
    try:
        device_kinds.choose()
    except RuntimeError as error:
        skip(str(error))
    if not torch.cuda.is_available():
        skip("torch sees no device")
    width, depth = (32, 3) if SHORT else (1024, 24)
    dist = torch_nccl()
    with start("nccl") as backend:
        torch.manual_seed(0)

        def model() -> Any:
            layers = [torch.nn.Linear(width, width) for _ in range(depth)]
            return torch.nn.Sequential(*(part for x in layers for part in (x, torch.nn.ReLU()))).cuda()

        x = torch.randn(256, width).cuda()

        def train(
            net: Any,
            average: Callable[[Any], Any],
            distribute: Callable[[Any], Any] = lambda optimizer: optimizer,
        ) -> Callable[[], None]:
            optimizer = distribute(torch.optim.SGD(net.parameters(), lr=1e-4))

            def one() -> None:
                optimizer.zero_grad()
                net(x).square().mean().backward()
                average(net)
                optimizer.step()

            return one

        def ours(net: Any) -> None:
            ss.allreduce_gradients(backend, [p.grad for p in net.parameters()])

        def overlapping(optimizer: Any) -> Any:
            return ss.DistributedOptimizer(backend, optimizer)

        contenders = {
            "alone": train(model(), lambda _: None),
            "samestep": train(model(), lambda _: None, overlapping),
            "samestep after backward": train(model(), ours),
        }
        if not isinstance(dist, str):
            wrapped = torch.nn.parallel.DistributedDataParallel(model())
            contenders["torch DDP"] = train(wrapped, lambda _: None)
        within = (backend, 25.0)  # of the part's time, most of which goes into what is made before
        times = rounds(contenders, torch.cuda.synchronize, turns(11, 2), 10, within=within)
        tell(what="step", ranks=SIZE, times=times)
    return 0


if __name__ == "__main__":
    sys.exit(step())
