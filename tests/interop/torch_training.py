"""A small model, its batch, and the gradients of one process: what tests of training with torch share."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
nn, functional = torch.nn, torch.nn.functional

N_SAMPLES = 12  # a multiple of all numbers of ranks, so that the mean of means is the mean


def model():
    """Small and large parameters: the weight in the middle is reduced where it lies."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 3))


def batch(rank=0, size=1):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(N_SAMPLES, 6, generator=generator), torch.randn(N_SAMPLES, 3, generator=generator)
    mine = slice(rank * N_SAMPLES // size, (rank + 1) * N_SAMPLES // size)
    return x[mine], y[mine]


def backward(net, x, y, scale=1.0):
    loss = functional.mse_loss(net(x), y) * scale
    loss.backward()
    return loss


def whole_gradients(make=model):
    net = make()
    backward(net, *batch())
    return [p.grad for p in net.parameters()]


def assert_close(got, want, tolerance=1e-6):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.detach().float(), b.detach().float(), rtol=0, atol=tolerance)


def assert_equal_everywhere(group, tensors):
    mine = [t.detach().numpy().tobytes() for t in tensors]
    assert all(other == mine for other in group.allgather_object(mine))


def gradients(net):
    return [p.grad for p in net.parameters()]


def plain(net, opt, x, y):
    for _ in range(4):
        opt.zero_grad()
        backward(net, x, y)
        opt.step()
