"""What all programs of this folder train: a small network, whose rank `DIES` is killed in step `AT`."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

RANKS, STEPS, SHARDS, BATCH, DIES, AT = 4, 60, 8, 64, 1, 30
COMPUTE_S = 0.005  # that the gradients of a shard take, as of a larger model

torch.set_num_threads(1)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """`BATCH` items for each step, in order."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS * BATCH, 64, generator=draw)
    return x, torch.sin(x.sum(1, keepdim=True))


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The network, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Of the mean loss."""
    nn.functional.mse_loss(model(x), y).backward()
    time.sleep(COMPUTE_S * len(x) / BATCH * SHARDS)


def part(step: int, rank: int) -> slice:
    """The items of a rank in a step, where each has its share of the batch; steps count from 1."""
    each = BATCH // RANKS
    start = (step - 1) * BATCH + rank * each
    return slice(start, start + each)


class Notes:
    """What one process notes in a folder: when it has finished which step."""

    def __init__(self, folder: str, rank: int, life: int, *, dies: bool) -> None:
        self._folder, self._rank, self._dies = folder, rank, dies and rank == DIES and life == 0
        self._path = Path(folder, f"rank {rank} life {life}")

    def meet(self) -> None:
        """Waits until all processes of the beginning are here."""
        Path(self._folder, f"ready {self._rank}").touch()
        while len(list(Path(self._folder).glob("ready *"))) < RANKS:
            time.sleep(0.01)

    def finished(self, step: int, *, discarded: bool = False) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([time.time(), step, discarded]) + "\n")

    def within(self, step: int) -> None:
        """Ends this process, if it is the one."""
        if self._dies and step == AT:
            Path(self._folder, "killed").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    def ended(self, model: nn.Module) -> None:
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
        Path(self._folder, f"digest {self._rank}").write_text(digest.hexdigest())
