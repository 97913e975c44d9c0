"""Models and loops that are trained over several backends."""

import torch
from torch import nn
from torch.nn import functional

N_SAMPLES = 12  # a multiple of all numbers of ranks


class Sometimes(nn.Module):
    """A part of it is not used by every rank in every step."""

    def __init__(self):
        super().__init__()
        self.always, self.seldom = nn.Linear(6, 40), nn.Linear(40, 40)
        self.last = nn.Linear(40, 3)

    def forward(self, x, use=True):
        x = torch.tanh(self.always(x))
        return self.last(self.seldom(x) if use else x)


class Language(nn.Module):
    """A small causal language model: embedding, two blocks of attention, output tied to the embedding."""

    def __init__(self, n_tokens=17, width=24, length=10):
        super().__init__()
        self.tokens, self.places = nn.Embedding(n_tokens, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        length = x.shape[1]
        hidden = self.tokens(x) + self.places(torch.arange(length))
        later = torch.full((length, length), float("-inf"), dtype=hidden.dtype).triu(1)
        for block in self.blocks:
            hidden = block(hidden, src_mask=later)
        return self.norm(hidden) @ self.tokens.weight.T


def mlp():
    """Layers of very different sizes, so that there are several buckets."""
    return nn.Sequential(
        nn.Linear(6, 150), nn.Tanh(), nn.Linear(150, 150), nn.BatchNorm1d(150), nn.Linear(150, 3)
    )


def seeded(make, dtype=torch.float64):
    torch.manual_seed(3)
    return make().to(dtype)


def batch(rank, size, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N_SAMPLES, 6, generator=generator).to(dtype)
    y = torch.randn(N_SAMPLES, 3, generator=generator).to(dtype)
    mine = slice(rank * N_SAMPLES // size, (rank + 1) * N_SAMPLES // size)
    return x[mine], y[mine]


def sentences(rank, size):
    """Arithmetic progressions modulo 17: what comes next can be learnt."""
    start, stride = torch.arange(N_SAMPLES), 1 + torch.arange(N_SAMPLES) % 4
    words = (start[:, None] + stride[:, None] * torch.arange(10)) % 17
    return words[rank * N_SAMPLES // size : (rank + 1) * N_SAMPLES // size]


def loss_of(net, x, y, **options):
    return functional.mse_loss(net(x, **options), y)
