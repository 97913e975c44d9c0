"""Collectives in functions that torch.compile cuts into parts: what runs between the parts is not traced into."""

import warnings

import pytest

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.ranks(2, timeout=120, backends=["native"]), pytest.mark.slow]


def step(dist, rank, size, x):
    doubled = x * 2
    dist.all_reduce(doubled, async_op=True).wait()
    gathered = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(gathered, doubled)
    if rank == 0:
        dist.send(doubled, 1)
    elif rank == 1:
        got = torch.empty_like(x)
        dist.recv(got, 0)
        gathered.append(got)
    root = x.clone()
    dist.broadcast(root, 0)
    dist.barrier()
    return sum(gathered) + root


def test_operations_between_compiled_parts(over):
    with over("samestep") as dist, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about its own functions
        rank, size = dist.get_rank(), dist.get_world_size()
        torch._dynamo.reset()
        compiled = torch.compile(step, backend="eager")
        for i in range(3):
            x = torch.arange(5.0) + rank + i
            expected = step(dist, rank, size, x)
            assert torch.equal(compiled(dist, rank, size, x), expected)
