"""Gradients of DistributedDataParallel are memory of their process alone, until the program shares them."""

import os

import pytest

torch = pytest.importorskip("torch")

from torch.nn.parallel import DistributedDataParallel  # noqa: E402

pytestmark = [
    pytest.mark.ranks(2, timeout=120, backends=["native"]),
    pytest.mark.parametrize("views", [False, True], ids=["copies", "views of buckets"]),
]

N_RANKS = 2


def model(views, **options):
    return DistributedDataParallel(
        torch.nn.Linear(300, 200, bias=False), gradient_as_bucket_view=views, **options
    )


def gradient(dist, net, scale):
    """After a step in which every element of the gradient is the mean of `scale` times 1 + each rank."""
    net.zero_grad(set_to_none=False)
    net(torch.full((1, 300), scale * (dist.get_rank() + 1.0))).sum().backward()
    return net.module.weight.grad


def expected(scale):
    return torch.full((200, 300), scale * (1 + N_RANKS) / 2)


def in_child(act):
    """What `act` returns in a forked child, as truth."""
    pid = os.fork()
    if pid == 0:
        right = False
        try:
            right = bool(act())
        finally:
            os._exit(0 if right else 1)
    return os.waitpid(pid, 0)[1] == 0


def test_a_forked_child_changes_its_own_copy(over, views):
    def train_in_child():
        seen = torch.equal(grad, expected(1.0))
        net.module.zero_grad(set_to_none=False)
        net.module.weight.grad += 100.0  # torch may refuse backward() in a forked process
        return seen and torch.equal(grad, torch.full((200, 300), 100.0))

    with over("samestep") as dist:
        net = model(views)
        for _ in range(3):
            grad = gradient(dist, net, 1.0)
        assert in_child(train_in_child)
        assert torch.equal(grad, expected(1.0))
        assert torch.equal(gradient(dist, net, 2.0), expected(2.0))


def test_a_child_keeps_what_it_was_forked_with(over, views):
    with over("samestep") as dist:
        net = model(views)
        for _ in range(3):
            grad = gradient(dist, net, 1.0)
        trained, tell = os.pipe()

        def look_later():
            os.read(trained, 1)
            return torch.equal(grad, expected(1.0))

        pid = os.fork()
        if pid == 0:
            right = False
            try:
                right = look_later()
            finally:
                os._exit(0 if right else 1)
        assert torch.equal(gradient(dist, net, 2.0), expected(2.0))
        os.write(tell, b".")
        assert os.waitpid(pid, 0)[1] == 0


def test_a_gradient_that_is_shared_afterwards_keeps_its_values(over, views):
    """As a queue of torch.multiprocessing does with what it sends."""
    with over("samestep") as dist:
        net = model(views)
        for _ in range(3):
            grad = gradient(dist, net, 1.0)
        assert not grad.is_shared()
        grad.share_memory_()
        assert grad.is_shared()
        assert torch.equal(grad, expected(1.0))
        assert in_child(lambda: torch.equal(grad.mul_(2), expected(2.0)))
        assert torch.equal(grad, expected(2.0))  # it was shared
        for scale in (1.0, 3.0):
            assert torch.equal(gradient(dist, net, scale), expected(scale))


def test_a_buffer_that_a_hook_sends_arrives(over, views):
    sent = []

    def hook(_, bucket):
        buffer = bucket.buffer()
        torch.distributed.all_reduce(buffer, async_op=True).wait()
        sent.append(buffer)
        future = torch.futures.Future()
        future.set_result(buffer / N_RANKS)
        return future

    with over("samestep") as dist:
        net = model(views)
        net.register_comm_hook(None, hook)
        for _ in range(3):
            gradient(dist, net, 1.0)
        total = sent[-1].clone()
        sent[-1].share_memory_()
        assert in_child(lambda: torch.equal(sent[-1], total))
        assert torch.equal(gradient(dist, net, 2.0), expected(2.0))
