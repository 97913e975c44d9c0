"""A language model over samestep and then over gloo, by a trainer: what the ranks of test_torch_trainers.py run.

    samestep run -n 2 tests/torch_backend/trainer_jobs.py lightning

Prints a line for each rank and backend: the backend's name, the last loss,
the loss of guessing, and a checksum of the parameters.
"""

import math
import sys
import zlib
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch_models as models
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

BACKENDS = ("samestep", "gloo")
LENGTH, BATCH = 24, 16
N_BATCHES = 12  # of all ranks, in an epoch
N_EPOCHS = 4


def examples():
    """Lines of text that comes with Python, as numbers of their letters; and how many letters there are."""
    text = topics["assignment"]
    letters = sorted(set(text))
    numbers = torch.tensor([letters.index(c) for c in text])
    assert len(numbers) > N_BATCHES * BATCH * LENGTH // 2
    starts = torch.arange(N_BATCHES * BATCH) * 7 % (len(numbers) - LENGTH)
    return torch.stack([numbers[s : s + LENGTH] for s in starts]), len(letters)


def loss_of(net, words):
    logits = net(words[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def model(n_letters):
    return models.seeded(lambda: models.Language(n_letters, 32, LENGTH), torch.float32)


def by_lightning(backend, data, n_letters):
    try:
        import lightning.pytorch as pl
        from lightning.pytorch.strategies import DDPStrategy
    except ImportError:
        import pytorch_lightning as pl
        from pytorch_lightning.strategies import DDPStrategy

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.last = model(n_letters), None

        def training_step(self, batch, _):
            self.last = loss_of(self.net, batch[0])
            return self.last

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 0.01)

    net = Net()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=N_EPOCHS,
        **dict.fromkeys(quiet, False),
    )
    trainer.fit(net, DataLoader(data, BATCH))
    assert trainer.global_step == N_EPOCHS * N_BATCHES // 2
    return net.net, net.last.detach()


def by_accelerate(backend, data, n_letters):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    dist.init_process_group(backend)  # Accelerator would use gloo for the host, whatever its arguments
    accelerator = Accelerator(cpu=True)
    net = model(n_letters)
    net, opt, batches = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), 0.01), DataLoader(data, BATCH)
    )
    for _ in range(N_EPOCHS):
        for (words,) in batches:
            opt.zero_grad()
            loss = loss_of(net, words)
            accelerator.backward(loss)
            opt.step()
    assert accelerator.num_processes == 2
    return accelerator.unwrap_model(net), accelerator.reduce(loss.detach(), "mean")


def main(trainer):
    words, n_letters = examples()
    for backend in BACKENDS:
        net, loss = {"lightning": by_lightning, "accelerate": by_accelerate}[trainer](
            backend, TensorDataset(words), n_letters
        )
        assert dist.get_backend() == backend
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        check = 0
        for p in net.parameters():
            check = zlib.crc32(p.detach().numpy().tobytes(), check)
        print(backend, loss.item(), math.log(n_letters), check, flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
