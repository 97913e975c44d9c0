"""torch: training on parts of a batch equals training on the whole, however the loop is written."""

import contextlib
import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import samestep as ss
from samestep.optimizer import no_sync

torch = pytest.importorskip("torch")
nn, functional = torch.nn, torch.nn.functional

BACKENDS = ["self", "mpi"]  # the same law on all: what differs between them is for tests/conformance
pytestmark = pytest.mark.ranks(1, 2, 3, timeout=120, backends=BACKENDS)

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


# ---- loops: each takes (model, optimizer, x, y) and trains a few steps


def plain(net, opt, x, y):
    for _ in range(4):
        opt.zero_grad()
        backward(net, x, y)
        opt.step()


def keeping_gradients(net, opt, x, y):
    for _ in range(4):
        opt.zero_grad(set_to_none=False)
        backward(net, x, y)
        opt.step()


def clipping(net, opt, x, y):
    for _ in range(4):
        opt.zero_grad()
        backward(net, x, y)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        opt.step()


def with_closure(net, opt, x, y):
    def closure():
        opt.zero_grad()
        return backward(net, x, y)

    for _ in range(4):
        opt.step(closure)


def scheduled(net, opt, x, y):
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=5)
    for _ in range(4):
        opt.zero_grad()
        backward(net, x, y)
        opt.step()
        scheduler.step()


def changing_the_rate(net, opt, x, y):
    for rate in (0.1, 0.05, 0.2):
        opt.param_groups[0]["lr"] = rate
        opt.zero_grad()
        backward(net, x, y)
        opt.step()


def accumulating(net, opt, x, y):
    half = len(x) // 2
    for _ in range(3):
        opt.zero_grad()
        with no_sync(opt) if hasattr(opt, "_samestep_averager") else contextlib.nullcontext():
            backward(net, x[:half], y[:half], 0.5)
        backward(net, x[half:], y[half:], 0.5)
        opt.step()


def accumulating_without_no_sync(net, opt, x, y):
    half = len(x) // 2
    for _ in range(3):
        opt.zero_grad()
        backward(net, x[:half], y[:half], 0.5)
        backward(net, x[half:], y[half:], 0.5)
        opt.step()


LOOPS = {
    "plain": (plain, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "adamw": (plain, lambda p: torch.optim.AdamW(p, 0.01, eps=1e-3)),
    "fused": (plain, lambda p: torch.optim.AdamW(p, 0.01, eps=1e-3, fused=True)),
    "foreach": (plain, lambda p: torch.optim.AdamW(p, 0.01, eps=1e-3, foreach=True)),
    "keeping": (keeping_gradients, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "clipping": (clipping, lambda p: torch.optim.SGD(p, 0.1)),
    "closure": (with_closure, lambda p: torch.optim.SGD(p, 0.1)),
    "scheduled": (scheduled, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "rate": (changing_the_rate, lambda p: torch.optim.SGD(p, 0.1)),
    "accumulating": (accumulating, lambda p: torch.optim.SGD(p, 0.1)),
    "accumulating, averaged each time": (accumulating_without_no_sync, lambda p: torch.optim.SGD(p, 0.1)),
}


@pytest.mark.parametrize("name", LOOPS)
def test_the_loop_gives_what_one_process_gives(group, name):
    loop, make = LOOPS[name]
    alone = model()
    loop(alone, make(alone.parameters()), *batch())
    net = model()
    opt = make(net.parameters())
    assert ss.DistributedOptimizer(group, opt) is opt
    loop(net, opt, *batch(group.rank, group.size))
    assert_close(net.parameters(), alone.parameters())
    assert_equal_everywhere(group, net.parameters())


def test_lbfgs(group):
    """Its line search compares losses, so the closure returns their mean."""

    def train(net, opt, x, y, mean):
        def closure():
            opt.zero_grad()
            return mean(backward(net, x, y).detach())

        for _ in range(2):
            opt.step(closure)

    def make(net):
        return torch.optim.LBFGS(net.parameters(), 0.5, max_iter=4)

    alone, net = model(), model()
    train(alone, make(alone), *batch(), lambda loss: loss)
    opt = ss.DistributedOptimizer(group, make(net))
    train(net, opt, *batch(group.rank, group.size), lambda loss: group.allreduce(loss, "avg"))
    assert_close(net.parameters(), alone.parameters(), 1e-4)
    assert_equal_everywhere(group, net.parameters())


def test_sums_and_weights_on_request(group):
    for op, factor in ((ss.SUM, group.size), ("sum", group.size), (ss.premul(0.25), 0.25 * group.size)):
        net = model()
        _opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1), op=op)
        backward(net, *batch(group.rank, group.size))
        assert_close(gradients(net), [g * factor for g in whole_gradients()], 1e-5)
    with pytest.raises(ss.InvalidArgumentError, match="AVG, SUM or premul"):
        ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1), op="max")


def test_messages_of_one_step(group):
    net = model()
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    before = group.counters().operations
    plain(net, opt, *batch(group.rank, group.size))
    assert group.counters().operations - before == 4 * 2  # one bucket, one large gradient
    with no_sync(opt):
        backward(net, *batch(group.rank, group.size))
    assert group.counters().operations - before == 4 * 2


def test_small_gradients_become_views_of_one_buffer(group):
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    _opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    backward(net, *batch(group.rank, group.size))
    assert len({grad.untyped_storage().data_ptr() for grad in gradients(net)}) == 1
    first = [grad.data_ptr() for grad in gradients(net)]
    net.zero_grad()
    backward(net, *batch(group.rank, group.size))
    assert [grad.data_ptr() for grad in gradients(net)] == first


def test_a_parameter_used_on_one_rank_only_and_one_never_used(group):
    used, never = nn.Linear(2, 2), nn.Linear(2, 2)
    net = model()
    params = [*net.parameters(), *used.parameters(), *never.parameters()]
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(params, 0.1))
    for _ in range(2):
        opt.zero_grad()
        loss = functional.mse_loss(net(batch()[0]), batch()[1])
        if group.rank == 0:
            loss = loss + used(torch.ones(1, 2)).sum()
        loss.backward()
        assert never.weight.grad is None
        assert_close([used.weight.grad], [torch.ones(2, 2) / group.size])
        assert_close(gradients(net), whole_gradients())


def test_a_large_parameter_used_on_one_rank_only(group):
    large, never = nn.Linear(400, 400), nn.Linear(400, 400)
    opt = ss.DistributedOptimizer(
        group,
        torch.optim.SGD(
            [*large.parameters(), *never.parameters(), anchor := nn.Parameter(torch.ones(1))], 0.1
        ),
    )
    (anchor.sum() + (large(torch.ones(1, 400)).sum() if group.rank == 0 else 0)).backward()
    assert_close([large.weight.grad], [torch.full((400, 400), 1 / group.size)])
    assert never.weight.grad is None
    opt.step()
    assert_equal_everywhere(group, large.parameters())


def test_a_gradient_that_nobody_touched_stays_as_it_was(group):
    a, b = nn.Linear(2, 1), nn.Linear(2, 1)
    _opt = ss.DistributedOptimizer(group, torch.optim.SGD([*a.parameters(), *b.parameters()], 0.1), op="sum")
    (a(torch.ones(1, 2)) + b(torch.ones(1, 2))).sum().backward()
    before = b.weight.grad.clone()
    a.zero_grad()
    a(torch.ones(1, 2)).sum().backward()
    assert_close([b.weight.grad], [before], 0)


def test_a_gradient_from_before_the_wrapping_is_averaged_with_the_next(group):
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    (a.sum() * (group.rank + 1)).backward()
    _opt = ss.DistributedOptimizer(group, torch.optim.SGD([a, b], 0.1))
    b.sum().backward()
    assert_close([a.grad, b.grad], [torch.full((2,), (group.size + 1) / 2), torch.ones(2)])


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_a_large_gradient_that_lies_otherwise_on_one_rank(group):
    p = nn.Parameter(torch.ones(400, 600))
    _opt = ss.DistributedOptimizer(group, torch.optim.SGD([p], 0.1))
    if group.rank == 0:
        p.grad = torch.zeros(600, 400).T
    rows = torch.arange(400.0).reshape(400, 1)
    (p * rows).sum().backward()
    assert_close([p.grad], [rows.expand(400, 600)])


class Raises(torch.autograd.Function):
    """Passes gradients on, or raises in the middle of the backward pass."""

    broken = True

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Raises.broken:
            raise RuntimeError("broken on purpose")
        return grad


def test_averaging_goes_on_after_a_backward_that_raised(group):
    net = model()
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    x, y = batch(group.rank, group.size)
    broken = nn.Sequential(*net[:2], Lambda(Raises.apply), *net[2:])
    Raises.broken = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken on purpose"):
            backward(broken, x, y)
        opt.zero_grad()
    Raises.broken = False
    backward(broken, x, y)
    assert_close(gradients(net), whole_gradients())


class Lambda(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "other"])
@pytest.mark.parametrize("last_outside", [True, False])
def test_checkpointed_layers(group, reentrant, last_outside):
    from torch.utils.checkpoint import checkpoint

    net = model()
    _opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    x, y = batch(group.rank, group.size)
    before = group.counters().operations
    hidden = checkpoint(net[2:4], net[:2](x), use_reentrant=reentrant)
    out = net[4](hidden) if last_outside else checkpoint(net[4], hidden, use_reentrant=reentrant)
    functional.mse_loss(out, y).backward()
    assert_close(gradients(net), whole_gradients())
    if last_outside or not reentrant:
        assert group.counters().operations - before == 2


def test_a_layer_used_outside_and_inside_a_reentrant_checkpoint(group):
    """Its gradient is complete only at the end: the pass inside the pass adds the first part."""
    from torch.utils.checkpoint import checkpoint

    def build():
        torch.manual_seed(2)
        return nn.Linear(400, 400, bias=False), nn.Linear(400, 3)

    def run(layer, head, x, inner):
        hidden = inner(layer, layer(x.repeat(1, 67)[:, :400]))
        functional.mse_loss(head(hidden), torch.ones(len(x), 3)).backward()
        return [layer.weight.grad, head.weight.grad, head.bias.grad]

    want = run(*build(), batch()[0], lambda function, x: function(x))
    layer, head = build()
    _opt = ss.DistributedOptimizer(group, torch.optim.SGD([*layer.parameters(), *head.parameters()], 0.1))
    x, _ = batch(group.rank, group.size)
    assert_close(run(layer, head, x, lambda f, x: checkpoint(f, x, use_reentrant=True)), want)


def test_groups_added_later(group):
    net = model()
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net[:3].parameters(), 0.1))
    opt.add_param_group(param_group={"params": net[4].parameters(), "lr": 0.01})
    plain(net, opt, *batch(group.rank, group.size))
    assert_equal_everywhere(group, net.parameters())


def test_groups_added_and_layers_unfrozen_later(group):
    net = model()
    net[0].requires_grad_(False)
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net[:3].parameters(), 0.1))
    x, y = batch(group.rank, group.size)
    backward(net, x, y)
    assert net[0].weight.grad is None
    opt.add_param_group({"params": net[4].parameters(), "lr": 0.01})
    net[0].requires_grad_(True)
    net.zero_grad()
    backward(net, x, y)
    assert_close(gradients(net), whole_gradients())
    opt.step()
    assert_equal_everywhere(group, net.parameters())


def test_layers_unfrozen_while_accumulating(group):
    net = model()
    net[0].requires_grad_(False)
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    x, y = batch(group.rank, group.size)
    net[0].requires_grad_(True)
    with no_sync(opt):
        backward(net, x, y, 0.5)
    backward(net, x, y, 0.5)
    assert_close(gradients(net), whole_gradients())


def test_channels_last_and_tied_weights(group):
    conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    layer = nn.Linear(8, 8, bias=False)
    nn.init.eye_(layer.weight)
    opt = torch.optim.SGD([*conv.parameters(), *layer.parameters()], 0.1)
    ss.synchronize(group, conv)
    _opt = ss.DistributedOptimizer(group, opt)
    image = torch.full((1, 3, 3, 3), group.rank + 1.0).to(memory_format=torch.channels_last)
    nn.Sequential(conv, nn.Flatten(), layer, layer)(image).sum().backward()
    assert conv.weight.grad.is_contiguous(memory_format=torch.channels_last)
    assert_close([conv.weight.grad], [torch.full((8, 3, 3, 3), (group.size + 1) / 2)], 1e-5)
    assert_equal_everywhere(group, [layer.weight.grad])


def test_several_dtypes(group):
    """bfloat16 needs no other package, since its buckets are tensors too."""

    def mixed():
        net = model()
        return nn.Sequential(
            net[0], Lambda(torch.tanh), Lambda(lambda x: x.double()), net[2].double(), net[4].double()
        )

    alone, net = mixed(), mixed()
    _opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    functional.mse_loss(alone(batch()[0]), batch()[1].double()).backward()
    x, y = batch(group.rank, group.size)
    functional.mse_loss(net(x), y.double()).backward()
    assert_close(gradients(net), gradients(alone))

    half = nn.Linear(4, 4).to(torch.bfloat16)
    _opt = ss.DistributedOptimizer(group, torch.optim.SGD(half.parameters(), 0.1))
    half(torch.full((1, 4), group.rank + 1.0, dtype=torch.bfloat16)).sum().backward()
    assert_close([half.weight.grad], [torch.full((4, 4), (group.size + 1) / 2)])


def test_copies_are_plain_optimizers(group):
    net = model()
    opt = ss.DistributedOptimizer(group, torch.optim.Adam(net.parameters()))
    plain(net, opt, *batch(group.rank, group.size))
    for copied in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert type(copied) is torch.optim.Adam
        with pytest.raises(ss.InvalidArgumentError, match="averages nothing"):
            no_sync(copied).__enter__()
    copy.deepcopy(net)
    pickle.dumps(net)
    before = group.counters().operations
    other = copy.deepcopy(net)
    other.zero_grad()
    backward(other, *batch(group.rank, group.size))
    assert group.counters().operations == before


def test_a_state_dict_is_loaded_as_ever(group):
    x, y = batch(group.rank, group.size)
    first, second = model(), model()
    opts = [
        ss.DistributedOptimizer(group, torch.optim.Adam(net.parameters(), 0.01)) for net in (first, second)
    ]
    plain(first, opts[0], x, y)
    second.load_state_dict(first.state_dict())
    opts[1].load_state_dict(copy.deepcopy(opts[0].state_dict()))
    plain(first, opts[0], x, y)
    plain(second, opts[1], x, y)
    assert_close(second.parameters(), first.parameters(), 0)


def test_averaging_goes_on_without_the_optimizer_and_ends_with_the_parameters(group):
    """Nothing may depend on when a rank's garbage collector runs."""
    net = model()
    averager = weakref.ref(
        ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))._samestep_averager
    )
    gc.collect()
    backward(net, *batch(group.rank, group.size))
    assert_close(gradients(net), whole_gradients())
    del net
    gc.collect()
    assert averager() is None


def test_an_optimizer_that_takes_over_some_parameters(group):
    net = model()
    _all = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1), op="sum")
    _some = ss.DistributedOptimizer(group, torch.optim.SGD(net[2].parameters(), 0.1), op="sum")
    backward(net, *batch(group.rank, group.size))
    assert_close(gradients(net), [g * group.size for g in whole_gradients()])


def test_the_newest_optimizer_owns_the_parameters_and_old_ones_are_freed(group):
    net = model()
    old = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1), op="sum")
    _opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1), op="sum")
    backward(net, *batch(group.rank, group.size))
    assert_close(gradients(net), [g * group.size for g in whole_gradients()])
    gone = weakref.ref(old._samestep_averager)
    del old
    gc.collect()
    assert gone() is None


def test_a_sparse_gradient_is_refused(group):
    table = nn.Embedding(5, 2, sparse=True)
    _opt = ss.DistributedOptimizer(group, torch.optim.SGD(table.parameters(), 0.1))
    with pytest.raises(ss.InvalidArgumentError, match=r"\['params'\]\[0\] is sparse.*sparse=False"):
        table(torch.tensor([1])).sum().backward()


def test_autograd_notices_that_gradients_were_written(group):
    """A graph over a gradient must not be used once the gradient has been overwritten."""
    p = nn.Parameter(torch.ones(2))
    q = nn.Parameter(torch.ones(3))
    _opt = ss.DistributedOptimizer(group, torch.optim.SGD([p, q], 0.1))
    (p.sum() + q.sum()).backward()
    w = torch.ones(2, requires_grad=True)
    product = (p.grad * w).sum()
    (p.sum() + q.sum()).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("verb", ["allreduce_tree", "synchronize"])
def test_autograd_notices_that_leaves_were_written(group, verb):
    if verb == "synchronize" and group.size == 1:
        return  # nothing is written
    tensors = [torch.ones(3), torch.ones(2)]
    weights = torch.ones(3, requires_grad=True)
    product = (tensors[0] * weights).sum()
    getattr(group, verb)(tensors, **({"root": group.size - 1} if verb == "synchronize" else {}))
    if verb == "allreduce_tree" or group.rank != group.size - 1:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


@pytest.mark.ranks(2, 3, backends=BACKENDS)
def test_other_parameters_raise_everywhere(group):
    net = nn.Linear(2 + (group.rank == 1), 1)
    text = r"DistributedOptimizer\(SGD, op=AVG\).*\['params'\]\[0\] is float32 \(1, 2\).* on rank"
    with pytest.raises(ss.MismatchError, match=text):
        _opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))


# ---- synchronize on torch


def test_modules_and_optimizers_are_written_in_place(group):
    torch.manual_seed(group.rank)
    net = nn.Sequential(nn.Linear(3, 400), nn.BatchNorm1d(400), nn.Linear(400, 400), nn.Linear(400, 1))
    opt = torch.optim.AdamW(net.parameters(), lr=0.1 * (group.rank + 1))
    net(torch.randn(4, 3)).sum().backward()
    opt.step()
    root = group.size - 1
    got = ss.synchronize(group, {"net": net, "opt": opt, "epoch": group.rank}, root=root)
    assert got["net"] is net
    assert got["opt"] is opt
    assert got["epoch"] == root
    assert opt.param_groups[0]["lr"] == 0.1 * (root + 1)
    assert_equal_everywhere(group, [*net.parameters(), *net.buffers()])
    assert_equal_everywhere(group, [s["exp_avg"] for s in opt.state.values()])
    assert_equal_everywhere(group, [s["step"] for s in opt.state.values()])


def test_state_dicts(group):
    torch.manual_seed(group.rank)
    net = nn.Linear(3, 3)
    got = ss.synchronize(group, net.state_dict())
    assert_equal_everywhere(group, net.parameters())
    assert got._metadata == net.state_dict()._metadata


def test_gradients_of_a_module_by_hand(group):
    net = model()
    backward(net, *batch(group.rank, group.size))
    net[4].bias.grad = None
    assert ss.allreduce_gradients(group, net) is net
    assert net[4].bias.grad is None
    assert_close(gradients(net)[:-1], whole_gradients()[:-1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int64", "complex64"])
def test_trees_of_tensors(group, dtype):
    kind = getattr(torch, dtype)
    tree = [torch.full((3,), group.rank + 1, dtype=kind), torch.ones(2, 2, dtype=kind).T]
    got = group.allreduce_tree(tree, "sum")
    assert got[0] is tree[0]
    assert torch.equal(got[0], torch.full((3,), sum(range(group.size + 1)), dtype=kind))
    missing = ss.allreduce_gradients(
        group, [None if group.rank else torch.ones(3, dtype=kind), tree[1]], ss.SUM
    )
    assert torch.equal(missing[0], torch.ones(3, dtype=kind))


def test_training_equals_one_process_when_everything_starts_out_different(group):
    torch.manual_seed(group.rank)
    net = nn.Linear(6, 3)
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    ss.synchronize(group, net)
    alone = copy.deepcopy(net)
    plain(alone, torch.optim.SGD(alone.parameters(), 0.1), *batch())
    plain(net, opt, *batch(group.rank, group.size))
    assert_close(net.parameters(), alone.parameters())
