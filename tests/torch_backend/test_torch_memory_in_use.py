"""Asynchronous operations on one tensor before the first is waited for: they act in the order of the calls."""

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.ranks(1, 3, timeout=120, backends=["native"])

COUNTS = [1, 5, 100_000]


@pytest.fixture
def world(over):
    with over("samestep") as opened:
        yield opened


def contiguous(count):
    return torch.empty(count)


def with_gaps(count):
    return torch.empty(count, 2)[:, 0]


def transposed(count):
    return torch.empty(count, 2).t()


LAYOUTS = [contiguous, with_gaps, transposed]


def of_rank(world, layout, count):
    return layout(count).fill_(world.get_rank() + 1)


def total(world):
    return world.get_world_size() * (world.get_world_size() + 1) // 2


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_twice(world, layout, count):
    x = of_rank(world, layout, count)
    works = [world.all_reduce(x, async_op=True) for _ in range(3)]
    for work in reversed(works):
        work.wait()
    assert torch.equal(x, torch.full_like(x, total(world) * world.get_world_size() ** 2))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_verb_behind_another(world, layout, count):
    n = world.get_world_size()
    x = of_rank(world, layout, count)
    first = world.broadcast(x, n - 1, async_op=True)
    blocks = [layout(count) for _ in range(n)]
    second = world.all_gather(blocks, x, async_op=True)
    third = world.all_reduce(blocks[0], async_op=True)
    rows = layout(count)
    fourth = world.reduce_scatter(rows, blocks, async_op=True)
    for work in (fourth, third, second, first):
        work.wait()
    assert torch.equal(x, torch.full_like(x, n))
    assert torch.equal(blocks[0], torch.full_like(x, n * n))
    assert torch.equal(rows, torch.full_like(x, n**3 if world.get_rank() == 0 else n**2))


def test_a_future_of_the_first(world):
    x = of_rank(world, with_gaps, 5)
    future = world.all_reduce(x, async_op=True).get_future()
    world.all_reduce(x)
    assert torch.equal(x, torch.full_like(x, total(world) * world.get_world_size()))
    assert future.wait()[0] is x


def test_messages(world):
    n, rank = world.get_world_size(), world.get_rank()
    x, y = torch.zeros(1_000_000), torch.full((1_000_000,), float(rank))
    received = world.irecv(x, (rank - 1) % n)
    with pytest.raises(RuntimeError, match=r"^send: .* a receive in progress; wait"):
        world.isend(x, (rank + 1) % n)
    world.barrier()  # until here nobody sends
    sent = world.isend(y, (rank + 1) % n)
    received.wait()
    sent.wait()
    assert torch.equal(x, torch.full_like(x, (rank - 1) % n))
