"""torch: when gradients are averaged, in how many messages, and what becomes of parameters and gradients."""

import contextlib
import gc
import weakref

import pytest
import samestep as ss
from samestep.optimizer import no_sync
from torch_training import (
    assert_close,
    assert_equal_everywhere,
    backward,
    batch,
    functional,
    gradients,
    model,
    nn,
    plain,
    torch,
    whole_gradients,
)

BACKENDS = ["self", "native"]  # the same law on all: what differs between them is for tests/conformance
pytestmark = pytest.mark.ranks(1, 2, 3, timeout=120, backends=BACKENDS)


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
    first = 4 * (group.size > 1)  # settings and values are compared then, and how ranks draw their data
    assert group.counters().operations - before == first + 4 * 2  # one bucket, one large gradient
    with no_sync(opt):
        backward(net, *batch(group.rank, group.size))
    assert group.counters().operations - before == first + 4 * 2


def test_small_gradients_become_views_of_one_buffer(group):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    _opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    backward(net, *batch(group.rank, group.size))
    assert len({grad.untyped_storage().data_ptr() for grad in gradients(net)}) == 1
    first = [grad.data_ptr() for grad in gradients(net)]
    net.zero_grad()
    backward(net, *batch(group.rank, group.size))
    assert [grad.data_ptr() for grad in gradients(net)] == first


def test_a_parameter_used_on_one_rank_only_and_one_never_used(group):
    torch.manual_seed(0)
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
    torch.manual_seed(0)
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
    torch.manual_seed(0)
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
        assert group.counters().operations - before == 2 + 4 * (group.size > 1)  # as above


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


@pytest.mark.ranks(2, 3, backends=BACKENDS)
def test_other_parameters_raise_everywhere(group):
    net = nn.Linear(2 + (group.rank == 1), 1)
    text = r"DistributedOptimizer\(SGD, op=AVG\).*\['params'\]\[0\] is float32 \(1, 2\).* on rank"
    with pytest.raises(ss.MismatchError, match=text):
        _opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))


def test_a_rank_that_has_all_gradients_reads_no_flags(group, monkeypatch):
    """Which on a device would wait for it."""
    net = model()
    _opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))

    def tolist(_):
        raise AssertionError("the flags are read")

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    backward(net, *batch(group.rank, group.size))
    monkeypatch.undo()
    assert_close(gradients(net), whole_gradients())


def test_a_factor_of_zero_hides_no_gradient_from_other_ranks(group):
    a, b = nn.Linear(2, 1), nn.Linear(2, 1)
    factor = 0.0 if group.rank == 0 else 1.0
    _opt = ss.DistributedOptimizer(
        group, torch.optim.SGD([*a.parameters(), *b.parameters()], 0.1), op=ss.premul(factor)
    )
    loss = a(torch.ones(1, 2)).sum()
    if group.rank == 0:
        loss = loss + b(torch.ones(1, 2)).sum()
    loss.backward()
    assert b.weight.grad is not None
    assert_close([b.weight.grad], [torch.zeros(1, 2)])


def test_large_gradients_of_another_dtype_than_their_parameters(group):
    params = [nn.Parameter(torch.ones(400, 400)) for _ in range(2)]
    if not hasattr(params[0], "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    for p in params:
        p.grad_dtype = torch.bfloat16
    _opt = ss.DistributedOptimizer(group, torch.optim.SGD(params, 0.1), op="sum")
    (params[0].sum() + params[1].sum()).backward()
    for p in params:
        assert p.grad.dtype == torch.bfloat16
        assert_close([p.grad], [torch.full((400, 400), float(group.size))])


@pytest.mark.parametrize("op", [ss.SUM, ss.premul(0.5)])
@pytest.mark.parametrize("width", [4, 400])  # in a bucket, and reduced where it lies
def test_a_sum_is_not_summed_again(group, op, width):
    net = nn.Linear(width, width)
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.0), op=op)
    factor = (0.5 if op is not ss.SUM else 1.0) * group.size

    def run(times=1.0):
        (net(torch.ones(1, width)).sum() * times).backward()

    for to_none in (True, False):  # emptied gradients are no sums
        run()
        opt.step()
        opt.zero_grad(set_to_none=to_none)
        run(2.0)
        assert_close(gradients(net), [torch.full_like(p, 2 * factor) for p in net.parameters()])
        torch.autograd.grad(net(torch.ones(1, width)).sum(), list(net.parameters()))  # adds to nothing
        opt.zero_grad(set_to_none=to_none)
        with no_sync(opt):
            run(3.0)
        run()
        assert_close(gradients(net), [torch.full_like(p, 4 * factor) for p in net.parameters()])
        for within in (lambda: no_sync(opt), contextlib.nullcontext):
            with within(), pytest.raises(ss.InvalidArgumentError, match=r"weight|params.*no_sync"):
                run()
            opt.zero_grad()
            run()
        opt.zero_grad()


def test_means_add_up_over_passes(group):
    net = nn.Linear(4, 4)
    _opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.0))
    for _ in range(3):
        (net(torch.ones(1, 4)).sum() * (group.rank + 1)).backward()
    assert_close(gradients(net), [torch.full_like(p, 3 * (group.size + 1) / 2) for p in net.parameters()])


def test_a_sum_of_a_layer_in_several_reentrant_checkpoints_is_refused(group):
    from torch.utils.checkpoint import checkpoint

    layer, last = nn.Linear(3, 3), nn.Linear(3, 1)
    _opt = ss.DistributedOptimizer(
        group, torch.optim.SGD([*layer.parameters(), *last.parameters()]), op="sum"
    )
    x = torch.ones(1, 3, requires_grad=True)
    with pytest.raises(ss.InvalidArgumentError, match="use_reentrant=False"):
        sum(last(checkpoint(layer, x * k, use_reentrant=True)).sum() for k in (1, 2)).backward()
    layer.zero_grad()
    last.zero_grad()
    sum(last(checkpoint(layer, x * k, use_reentrant=False)).sum() for k in (1, 2)).backward()
    assert_close([last.bias.grad], [torch.full((1,), 2.0 * group.size)])


def test_the_first_step_compares_how_ranks_draw_their_data(group):
    for seed, is_right in ((7, True), (group.rank, group.size == 1)):
        sampler = ss.DistributedSampler(group, 12, seed=seed)
        net = model()
        opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
        x, y = batch(group.rank, group.size)
        next(iter(sampler))
        with (
            contextlib.nullcontext() if is_right else pytest.raises(ss.MismatchError, match="seed=1, shuffle")
        ):
            plain(net, opt, x, y)
        del sampler


def test_parameters_that_begin_with_other_values(group):
    net = model()
    with torch.no_grad():
        next(iter(net.parameters())).flatten()[-1] += group.rank
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    x, y = batch(group.rank, group.size)
    if group.size > 1:
        with pytest.raises(
            ss.MismatchError, match=r"parameters and state .*param_groups\[0\]\['params'\]\[0\]"
        ):
            plain(net, opt, x, y)
        opt.zero_grad()
    ss.synchronize(group, net)
    plain(net, opt, x, y)
    assert_equal_everywhere(group, net.parameters())


@pytest.mark.parametrize("on", ["one", "all, of other values", "all"])
def test_a_state_that_is_loaded_on_the_way(group, on):
    net = model()
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))
    x, y = batch(group.rank, group.size)
    plain(net, opt, x, y)
    state = opt.state_dict()
    if on == "all, of other values":
        state["state"][0]["momentum_buffer"] = state["state"][0]["momentum_buffer"] + group.rank
    if on != "one" or group.rank == 0:
        opt.load_state_dict(state)
    text = "settings" if on == "one" else "momentum_buffer"
    is_right = on == "all" or group.size == 1
    with contextlib.nullcontext() if is_right else pytest.raises(ss.MismatchError, match=text):
        plain(net, opt, x, y)


@pytest.mark.parametrize("together", [False, True])
def test_what_one_rank_has_loaded_and_synchronize_has_sent(group, together):
    net = model()
    opt = ss.DistributedOptimizer(group, torch.optim.AdamW(net.parameters(), 0.1))
    x, y = batch(group.rank, group.size)
    plain(net, opt, x, y)
    saved = {name: value.clone() for name, value in net.state_dict().items()}, opt.state_dict()
    plain(net, opt, x, y)
    if group.rank == 0:
        net.load_state_dict(saved[0])
        opt.load_state_dict(saved[1])
    for tree in [{"net": net, "opt": opt}] if together else [net, opt]:
        ss.synchronize(group, tree)
    plain(net, opt, x, y)
    assert_equal_everywhere(group, net.parameters())


def test_a_state_that_one_rank_has_loaded_before_the_first_step(group):
    """The others have none, so it cannot be written in place; the error says what sends it."""
    net = model()
    opt = ss.DistributedOptimizer(group, torch.optim.AdamW(net.parameters(), 0.1))
    x, y = batch(group.rank, group.size)
    if group.rank == 0:
        other = model()
        saved = torch.optim.AdamW(other.parameters(), 0.1)
        plain(other, saved, x, y)
        opt.load_state_dict(saved.state_dict())
    if group.size > 1:
        with pytest.raises(ss.MismatchError, match=r"missing on .*load_state_dict\(backend\.bcast_object\("):
            plain(net, opt, x, y)
        opt.zero_grad()
    opt.load_state_dict(group.bcast_object(opt.state_dict()))
    plain(net, opt, x, y)
    assert_equal_everywhere(group, net.parameters())


def test_learning_rates_in_tensors(group):
    net = model()
    rate = torch.tensor(0.1)
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), rate))
    x, y = batch(group.rank, group.size)
    plain(net, opt, x, y)
    rate.mul_(0.5)
    plain(net, opt, x, y)
    rate.mul_(group.rank + 2)
    with contextlib.nullcontext() if group.size == 1 else pytest.raises(ss.MismatchError, match="'lr'"):
        plain(net, opt, x, y)
