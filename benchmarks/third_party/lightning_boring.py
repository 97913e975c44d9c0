"""Lightning's own BoringModel for two epochs, by two DDP strategies; the parameters are equal on all ranks."""

import os

os.environ.setdefault("PL_DISABLE_FORK", "1")

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.demos.boring_classes import BoringModel


def main() -> None:
    for strategy in ("ddp", "ddp_find_unused_parameters_true"):
        pl.seed_everything(1)
        model = BoringModel()
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_epochs=2,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            logger=False,
        )
        trainer.fit(model)
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
        others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(others, flat)
        assert all(torch.equal(flat, other) for other in others)
    print("equal")


if __name__ == "__main__":
    main()
