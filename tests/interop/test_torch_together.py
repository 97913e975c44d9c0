"""Steps of torch that all ranks leave together, and loss scalers that decide the same."""

import contextlib

import numpy as np
import pytest
import samestep as ss

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.ranks(2, 3, timeout=120, backends=["native"])


def net_and_optimizer(group):
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(4, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))
    return net, ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), lr=0.1))


class Breaks(torch.autograd.Function):
    """Raises an exception in its backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        raise ValueError("in the backward pass")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_training_goes_on_after_a_bad_step(group, where):
    net, optimizer = net_and_optimizer(group)
    n_bad = 0
    for step in range(6):
        bad = step % 2 == 1 and group.rank == step % group.size
        with contextlib.suppress(ss.StepError):
            n_bad += 1
            with group.together():
                optimizer.zero_grad()
                hidden = net[1](net[0](torch.full((5, 4), 1.0 + group.rank)))
                if bad and where == "forward":
                    raise ValueError("in the forward pass")
                net[2](Breaks.apply(hidden) if bad else hidden).sum().backward()
                group.barrier()
            optimizer.step()
            n_bad -= 1
    assert n_bad == 3
    group.same(net)


def test_a_loss_scaler_skips_the_same_steps_on_all_ranks(group):
    net, optimizer = net_and_optimizer(group)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scales = []
    for step in range(4):
        overflows = step == 2 and group.rank == group.size - 1
        optimizer.zero_grad()
        scaler.scale(net(torch.full((5, 4), np.inf if overflows else 1.0)).sum()).backward()  # averages
        assert group.all_finite(net) is (step != 2)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [8.0, 8.0, 4.0, 4.0]
    group.same(net)


SHARDED = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.5),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "fused adam": lambda parameters: torch.optim.Adam(
        parameters, lr=0.1, fused=True
    ),  # has scaling of its own
}


@pytest.mark.ranks(1, 2, 3, timeout=120, backends=["native"])
@pytest.mark.parametrize("kind", list(SHARDED))
def test_a_loss_scaler_and_a_sharded_optimizer_do_what_they_do_without_shards(group, kind):
    ends, scales = [], []
    for distribute in (ss.ShardedOptimizer, ss.DistributedOptimizer):
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Linear(4, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))
        optimizer = distribute(group, SHARDED[kind](net.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(6):
            overflows = step == 2 and group.rank == group.size - 1
            optimizer.zero_grad()
            scaler.scale(net(torch.full((5, 4), np.inf if overflows else 1.0 + group.rank)).sum()).backward()
            if distribute is ss.ShardedOptimizer:
                optimizer.average()
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        ends.append([p.detach().clone() for p in net.parameters()])
        scales.append(scaler.get_scale())
        group.same(net)
    assert scales == [4.0, 4.0]
    for sharded, whole in zip(*ends, strict=True):
        assert torch.equal(sharded, whole)


@pytest.mark.parametrize("unscaled_first", [False, True])
def test_a_loss_scaler_that_looks_before_the_average_is_an_error_on_all_ranks(group, unscaled_first):
    net = torch.nn.Linear(4, 300)
    group.synchronize(net)
    optimizer = ss.ShardedOptimizer(group, torch.optim.SGD(net.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(net(torch.full((5, 4), np.inf if group.rank == 1 else 1.0)).sum()).backward()
    if unscaled_first:
        scaler.unscale_(optimizer)
        optimizer.average()
    why = "infinities on some ranks only; call" if unscaled_first else "by a GradScaler: call opt.average"
    with pytest.raises(ss.InvalidArgumentError, match=why):
        scaler.step(optimizer)
    group.same(net)
