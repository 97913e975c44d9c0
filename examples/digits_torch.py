"""The digits example with torch: model, optimizer and data loader stay torch's own.

    pip install ".[demo,torch]"
    samestep run -n 4 examples/digits_torch.py
    samestep run -n 4 examples/digits_torch.py --device cuda     # a GPU for each rank, through NCCL

`DistributedOptimizer` returns the same SGD object; when `backward` returns, the gradients are the means
over all ranks, so clipping, schedulers and scalers work as in one process. The end of the script checks
that all ranks hold the same bits and agree with a run of one process on the joined batches.
"""

import argparse
import copy

import samestep as ss
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

EPOCHS = 30
BATCH = 64  # images in one step, over all ranks
TRAIN = 1437  # the other 360 of the 1797 images are for the test


def load():
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(digits.data, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]


def new_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer, batches):
    """One step for each batch; returns the mean loss."""
    losses = []
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def main(backend, device):
    torch.set_num_threads(1)  # the network is too small to share out
    torch.manual_seed(backend.rank)
    x, y = (part.to(device) for part in load())

    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).to(device)
    model = ss.synchronize(backend, model)
    start = copy.deepcopy(model)
    optimizer = ss.DistributedOptimizer(backend, new_optimizer(model))

    sampler = ss.DistributedSampler(backend, range(TRAIN), seed=1)
    share = max(1, BATCH // backend.size)
    data = TensorDataset(x, y, torch.arange(len(y), device=device))
    loader = DataLoader(data, batch_size=share, sampler=sampler, drop_last=True)
    test = list(ss.DistributedDataContainer(backend, range(TRAIN, len(y))))  # this rank's part of the test

    history = []

    def batches():
        for images, labels, indices in loader:
            history.append(indices)
            yield images, labels

    for epoch in (bar := tqdm(range(EPOCHS), disable=backend.rank != 0)):
        sampler.set_epoch(epoch)
        loss = backend.allreduce(train(model, optimizer, batches()), "avg")
        hits = backend.allreduce((model(x[test]).argmax(dim=1) == y[test]).sum())
        accuracy = hits.item() / (len(y) - TRAIN)
        bar.set_postfix_str(f"loss {loss.item():.4f}, test accuracy {accuracy:.4f}")

    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    equal = len(set(backend.allgather_object(weights.cpu().numpy().tobytes()))) == 1
    joined = backend.allgather(torch.stack(history)).transpose(0, 1).flatten(1)  # one row for each step
    if backend.rank == 0:
        train(start, new_optimizer(start), ((x[indices], y[indices]) for indices in joined))
        difference = (nn.utils.parameters_to_vector(start.parameters()) - weights).abs().max().item()
        print(f"ranks {backend.size}, test accuracy {accuracy:.4f}")
        print(f"weights bitwise equal on all ranks: {equal}")
        print(f"largest difference from one process on the joined batches: {difference:.1e}")


parser = argparse.ArgumentParser()
parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
device = parser.parse_args().device
with ss.initialize("nccl" if device == "cuda" else None) as world:
    main(world, device)
