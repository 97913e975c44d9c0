"""torch's DDP and FSDP2 on CUDA tensors, in a group of "samestep" and in one of NCCL; see kit.sh."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import samestep.torch
from kit_failures import Findings
from kit_rank import RANK, SIZE, need, skip
from kit_times import PLACE


def train(torch: Any, wrap: Callable[[Any], Any]) -> float:
    """The loss after three steps."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256) for _ in range(4)]
    net = wrap(torch.nn.Sequential(*layers).cuda())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(1 + RANK)
    x = torch.randn(32, 256).cuda()
    for _ in range(3):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss)


def losses(torch: Any, backend: str, place: Path) -> dict[str, float]:
    """By what distributes the model."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    def sharded(net: Any) -> Any:
        for layer in net:
            fully_shard(layer)
        return fully_shard(net)

    dist.init_process_group(backend, store=dist.FileStore(str(place), SIZE), rank=RANK, world_size=SIZE)
    ddp = train(torch, lambda net: torch.nn.parallel.DistributedDataParallel(net, device_ids=[0]))
    found = {"DDP": ddp, "FSDP2": train(torch, sharded)}
    dist.destroy_process_group()
    return found


def main() -> int:
    torch, found = need("torch"), Findings("torch's own training")
    if not torch.cuda.is_available():
        skip("torch sees no device")
    samestep.torch.register()  # where the package is not installed torch does not find it by itself
    found.seen |= {backend: losses(torch, backend, PLACE / backend) for backend in ("nccl", "samestep")}
    found.expect(found.seen["nccl"] == found.seen["samestep"], "the losses differ")
    return found.finish()


if __name__ == "__main__":
    sys.exit(main())
