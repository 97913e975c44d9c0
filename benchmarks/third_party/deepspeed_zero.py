"""DeepSpeed's ZeRO on CPU, of the stage that the first argument names: the loss falls in 20 steps."""

import sys

import deepspeed
import torch
import torch.distributed as dist

STAGE = int(sys.argv[1])
STEPS, WIDTH = 20, 64


def main() -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 16,
            "zero_optimization": {"stage": STAGE},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
    )
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        x = torch.randn(16, 8, generator=data)
        loss = ((engine(x) - x.sum(1, keepdim=True)) ** 2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean, op=dist.ReduceOp.SUM)
    mean /= dist.get_world_size()
    assert mean[-5:].mean() < 0.5 * mean[:5].mean(), mean
    if dist.get_rank() == 0:
        print("losses", *(f"{x:.6f}" for x in mean.tolist()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
