"""torch: gradients by shard give the bits of one rank, and weights the gradient of the joined batch."""

import hashlib

import numpy as np
import pytest
import samestep as ss

torch = pytest.importorskip("torch")
nn, functional = torch.nn, torch.nn.functional

pytestmark = pytest.mark.ranks(2, 3, timeout=120, backends=["native"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(6, 40), nn.Linear(40, 3), nn.Linear(2, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def model():
    torch.manual_seed(1)
    net = Net()
    net.first.bias.requires_grad_(False)
    return net


def data(n_items=50):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n_items, 6, generator=generator), torch.randn(n_items, 3, generator=generator)


def bits(net):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()


def train(backend, *, clip=False):
    net, (x, y) = model(), data()
    opt = ss.DistributedOptimizer(backend, torch.optim.AdamW(net.parameters(), 0.01), shards=8)
    sampler = ss.DistributedSampler(
        backend, len(x), batch_size=16, shards=8, seed=2
    )  # a last step of 2 items
    for shards in sampler.steps():
        for shard in shards:
            with opt.shard(shard.index, weight=len(shard)):
                if len(shard):
                    functional.mse_loss(net(x[shard.items]), y[shard.items]).backward()
        if clip:
            opt.average()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        opt.step()
    return net


@pytest.fixture(autouse=True)
def one_thread():
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.mark.parametrize("clip", [pytest.param(False, marks=pytest.mark.slow), True])
def test_training_gives_the_bits_of_one_rank(group, clip):
    mine = bits(train(group, clip=clip))
    assert mine == bits(train(group.group([group.rank]), clip=clip))
    assert group.allgather_object(mine) == [mine] * group.size
    assert bits(train(group, clip=not clip)) != mine


def test_a_parameter_that_no_shard_used_keeps_no_gradient(group):
    net = train(group)
    assert net.unused.weight.grad is None
    assert net.first.bias.grad is None
    assert net.first.weight.grad is not None


def test_bfloat16_gradients_stay_in_bfloat16(group):
    net = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(net.weight)
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 1.0), shards=4)
    for index in opt._samestep_shards._total.indices:
        with opt.shard(index):
            (net.weight * (1 + 2.0**-7 * index)).sum().backward()
    opt.average()
    assert net.weight.grad.dtype == torch.bfloat16
    assert torch.equal(net.weight.grad, torch.full((4, 4), 1 + 1.5 * 2.0**-7, dtype=torch.bfloat16))


def test_weights_without_shards_give_the_gradient_of_the_joined_batch(group):
    net, (x, y) = model(), data(24)
    functional.mse_loss(net(x), y).backward()
    expected = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1), weighted=True)
    edges = [*[0, 5, 24, 24][: group.size], 24]
    start, stop = edges[group.rank], edges[group.rank + 1]
    for at in range(start, stop, 4):
        rows = slice(at, min(at + 4, stop))
        with opt.shard(weight=rows.stop - rows.start):
            functional.mse_loss(net(x[rows]), y[rows]).backward()
    opt.average()
    for got, want in zip((p.grad for p in net.parameters() if p.grad is not None), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_a_shard_that_raises_is_not_added(group):
    net, (x, y) = model(), data(8)
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1), weighted=True)
    with pytest.raises(ZeroDivisionError), opt.shard(weight=2):
        functional.mse_loss(net(x), y).backward()
        _ = 1 / 0
    with pytest.raises(ss.InvalidArgumentError, match="all weights are zero"):
        opt.step()


def test_an_optimizer_is_distributed_once(group):
    net = model()
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1), shards=2)
    with pytest.raises(ss.InvalidArgumentError, match="distributed already"):
        ss.DistributedOptimizer(group, opt, shards=2)
    with pytest.raises(ss.InvalidArgumentError, match="for op AVG"):
        ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1), op=ss.SUM, shards=2)


@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_that_no_shard_holds_are_refused_on_all_ranks(group, sharded):
    def make():
        net = nn.Linear(2, 1)
        wrap = ss.ShardedOptimizer if sharded else ss.DistributedOptimizer
        return net, wrap(group, torch.optim.SGD(net.parameters(), 0.1), shards=group.size)

    net, opt = make()
    with opt.shard(group.rank):
        net(torch.ones(1, 2)).sum().backward()
    if group.rank == 0:
        net(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ss.InvalidArgumentError, match=r"rank 0: the gradient of .* outside of opt.shard\(\)"):
        opt.average()

    net, opt = make()
    for to_none in (True, False):  # zeros are no gradients
        net(torch.ones(1, 2)).sum().backward()
        with opt.shard(group.rank):
            net(torch.ones(1, 2)).sum().backward()
        net(torch.ones(1, 2)).sum().backward()
        opt.zero_grad(set_to_none=to_none)
        opt.average()
        assert torch.equal(net.weight.grad, torch.ones(1, 2))
        opt.step()

    nested = pytest.raises(ss.InvalidArgumentError, match=r"opt.shard\(\) within opt.shard\(\)")
    with nested, opt.shard(group.rank), opt.shard(group.rank):
        pass
    with opt.shard(group.rank):
        net(torch.ones(1, 2)).sum().backward()
    opt.step()


@pytest.mark.parametrize("sharded", [False, True])
def test_what_a_pass_adds_to_the_mean_is_refused(group, sharded):
    net = nn.Linear(2, 1)
    wrap = ss.ShardedOptimizer if sharded else ss.DistributedOptimizer
    opt = wrap(group, torch.optim.SGD(net.parameters(), 0.1), shards=group.size)
    for ends in (opt.zero_grad, opt.step, opt.step):  # what was refused once does not stay refused
        with opt.shard(group.rank):
            net(torch.ones(1, 2)).sum().backward()
        opt.average()
        with pytest.raises(
            ss.InvalidArgumentError, match=r"backward\(\) after opt.average\(\) adds to the mean"
        ):
            net(torch.ones(1, 2)).sum().backward()
        ends()
    net(torch.ones(1, 2)).sum().backward()  # no mean is there


def test_a_closure_is_refused(group):
    net = nn.Linear(2, 1)
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1), weighted=True)
    for step in (opt.step, lambda f: opt.step(closure=f)):
        with pytest.raises(ss.InvalidArgumentError, match=r"step\(closure\) would average before"):
            step(lambda: net(torch.ones(1, 2)).sum().backward())


@pytest.mark.parametrize("change", ["grad", "data", "None"])
def test_a_mean_gradient_that_one_rank_replaces(group, change):
    net = nn.Linear(2, 1)
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1), weighted=True)
    replaces = {
        "grad": lambda p: setattr(p, "grad", p.grad * 0.5),
        "data": lambda p: setattr(p.grad, "data", p.grad * 0.5),
        "None": lambda p: setattr(p, "grad", None),
    }[change]
    for ranks in (range(group.size), [0]):
        with opt.shard():
            net(torch.ones(1, 2)).sum().backward()
        opt.average()
        if group.rank in ranks:
            replaces(net.weight)
        if len(ranks) > 1:
            opt.step()
    with pytest.raises(ss.MismatchError, match=r"DistributedOptimizer: step\(\)|barrier"):
        opt.step() if group.rank == 0 else group.barrier()


def test_settings_that_differ_are_told_before_a_step(group):
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1), weighted=True)
    for rate in (0.3, 0.2, 0.2):
        opt.param_groups[0]["lr"] = rate
        with opt.shard():
            net(torch.ones(1, 2)).sum().backward()
        opt.step()
    before = net.weight.detach().clone()
    opt.param_groups[0]["lr"] = 0.1 * (1 + group.rank) + 0.01
    with opt.shard():
        net(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ss.MismatchError, match=r"settings .*lr.* differs"):
        opt.step()
    assert torch.equal(net.weight, before)
