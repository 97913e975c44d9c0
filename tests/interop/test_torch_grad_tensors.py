"""torch: gradients stay those of one process, whatever a script does with `p.grad` and the parameters."""

import re

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
    torch,
    whole_gradients,
)

BACKENDS = ["self", "native"]
pytestmark = pytest.mark.ranks(1, 2, 3, timeout=120, backends=BACKENDS)


def halve(change):
    """Applies a function of a parameter and its halved gradient to all of a model."""

    def act(net, opt):
        for p in net.parameters():
            change(p, p.grad * 0.5)

    return act


def unscale(net, opt):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(opt)


def replace_data(p, half):
    p.grad.data = half


def replace_in_two_steps(p, half):
    p.grad = None
    p.grad = half


def replace_by_noncontiguous(p, half):
    p.grad = half.t().contiguous().t() if half.dim() == 2 else half


def replace_by_expanded(p, half):
    wide = half.unsqueeze(0).expand(2, *half.shape)
    p.grad = wide[1]


WAYS = {
    "p.grad.data = ...": halve(replace_data),
    "p.grad = ...": halve(lambda p, half: setattr(p, "grad", half)),
    "None, then ...": halve(replace_in_two_steps),
    "p.grad.mul_": halve(lambda p, half: p.grad.mul_(0.5)),
    "p.grad.set_": halve(lambda p, half: p.grad.set_(half)),
    "detach_": halve(lambda p, half: p.grad.detach_().mul_(0.5)),
    "p.grad.data.copy_": halve(lambda p, half: p.grad.data.copy_(half)),
    "other strides": halve(replace_by_noncontiguous),
    "a view": halve(replace_by_expanded),
    "share_memory_": halve(lambda p, half: p.grad.share_memory_().mul_(0.5)),
    "unscale_": unscale,
}


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("reset", ["none", "zero"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_a_script_exchanges(group, way, reset):
    """They are used in this step, and later passes average as ever."""
    net, alone = model(), model()
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.5))
    other = torch.optim.SGD(alone.parameters(), 0.5)
    for _ in range(3):
        for one, optimizer, data in ((net, opt, batch(group.rank, group.size)), (alone, other, batch())):
            optimizer.zero_grad(set_to_none=reset == "none")
            backward(one, *data)
        assert_close(gradients(net), gradients(alone), 1e-5)
        WAYS[way](net, opt)
        halve(lambda p, half: p.grad.mul_(0.5))(alone, other)
        assert_close(gradients(net), gradients(alone), 1e-5)
        opt.step()
        other.step()
    assert_equal_everywhere(group, net.parameters())


def test_a_gradient_that_is_another_s_is_refused(group):
    """It would be overwritten before it is read."""
    p, q = (nn.Parameter(torch.full((3,), float(i))) for i in (1, 2))
    _opt = ss.DistributedOptimizer(group, torch.optim.SGD([p, q], 0.1))
    (p * p + q * q).sum().backward()
    p.grad, q.grad = q.grad, p.grad
    with pytest.raises(
        ss.InvalidArgumentError, match=r"the gradient of .* a view of memory .*; assign a copy"
    ):
        (p + q).sum().backward()
    p.grad, q.grad = torch.full((3,), 4.0), torch.full((3,), 2.0)
    (p + q).sum().backward()
    assert_close([p.grad, q.grad], [torch.full((3,), 5.0), torch.full((3,), 3.0)])


def test_a_gradient_transposed_in_its_place_is_refused(group):
    p = nn.Parameter(torch.ones(2, 2))
    _opt = ss.DistributedOptimizer(group, torch.optim.SGD([p, nn.Parameter(torch.ones(1))], 0.1))
    p.sum().backward()
    p.grad.data = p.grad.data.t()
    with pytest.raises(ss.InvalidArgumentError, match="assign a copy"):
        p.sum().backward()


def own_gradients(net, group):
    loss = functional.mse_loss(net(batch(group.rank, group.size)[0]), batch(group.rank, group.size)[1])
    return torch.autograd.grad(loss, list(net.parameters()))


def assigned(group, net, opt):
    for p, g in zip(net.parameters(), own_gradients(net, group), strict=True):
        p.grad = g


def added_to_zeros(group, net, opt):
    backward(net, *batch(group.rank, group.size))
    opt.step()
    opt.zero_grad(set_to_none=False)
    for p, g in zip(net.parameters(), own_gradients(net, group), strict=True):
        p.grad.add_(g)


def passes_without_sync(group, net, opt):
    with no_sync(opt):
        backward(net, *batch(group.rank, group.size))


def one_layer_assigned(group, net, opt):
    net[0](batch(group.rank, group.size)[0]).sum().backward()
    for p, g in zip(net[4].parameters(), own_gradients(net, group)[-2:], strict=True):
        p.grad = g


@pytest.mark.parametrize("way", [assigned, added_to_zeros, passes_without_sync, one_layer_assigned])
def test_gradients_that_no_pass_has_averaged_are_refused_where_they_differ(group, way):
    net = model()
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    way(group, net, opt)
    if group.size == 1:
        opt.step()
        return
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(ss.MismatchError, match=r"DistributedOptimizer: step\(\) .* allreduce_gradients"):
        opt.step()
    assert_close(list(net.parameters()), before)
    ss.allreduce_gradients(group, net)  # the mean of gradients that are means already has other last bits
    opt.step()
    assert_equal_everywhere(group, net.parameters())


def drop_it(p, half):
    p.grad = None


@pytest.mark.parametrize("change", [replace_data, replace_in_two_steps, drop_it])
def test_a_mean_gradient_that_one_rank_replaces(group, change):
    """The others are at their next operation then."""
    net = model()
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    for ranks in (range(group.size), [group.size - 1]):
        opt.zero_grad()
        backward(net, *batch(group.rank, group.size))
        if group.rank in ranks:
            change(net[0].weight, net[0].weight.grad * 0.5)
        if group.size == len(ranks):
            opt.step()
    if group.size == 1:
        return
    with pytest.raises(ss.MismatchError, match=r"DistributedOptimizer: step\(\)"):
        opt.step() if group.rank == group.size - 1 else group.barrier()
    if change is not drop_it:
        change(net[0].weight, torch.full_like(net[0].weight, group.rank))
        with pytest.raises(ss.MismatchError, match=r"step\(\) .*'parameter 0'.* replaced by hand"):
            opt.step()


def test_parameters_that_were_put_into_a_group_by_hand(group):
    first, second = nn.Linear(3, 1), nn.Linear(3, 1)
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(first.parameters(), 0.1))
    opt.param_groups[0]["params"] += second.parameters()
    (first(torch.ones(3)) + second(torch.full((3,), group.rank + 1.0))).sum().backward()
    if group.size == 1:
        return
    with pytest.raises(ss.MismatchError, match=r"'parameter 2'.* add_param_group"):
        opt.step()


class Wrapper(torch.optim.Optimizer):
    """As some libraries write one around another optimizer."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state


@pytest.mark.parametrize("wrap", [ss.DistributedOptimizer, ss.ShardedOptimizer])
def test_an_optimizer_that_takes_no_hooks(group, wrap):
    inner = torch.optim.SGD(model().parameters(), 0.1)
    with pytest.raises(ss.InvalidArgumentError, match=r"Wrapper has not called Optimizer.__init__"):
        wrap(group, Wrapper(inner))


def test_a_step_may_use_a_mean_gradient_again_or_zeros(group):
    net, alone = model(), model()
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    other = torch.optim.SGD(alone.parameters(), 0.1)
    backward(net, *batch(group.rank, group.size))
    backward(alone, *batch())
    for step in (opt.step, opt.step, other.step, other.step):
        step()
    opt.zero_grad(set_to_none=False)
    opt.step()
    assert_close(list(net.parameters()), list(alone.parameters()), 1e-5)


@pytest.mark.parametrize("late", [True, False], ids=["after", "before"])
def test_hooks_of_parameters_that_change_gradients(group, late):
    """Registered before the wrapping or after it: they see this rank's gradient, and what they leave is averaged."""
    net, alone = model(), model()

    def change(p):
        if p.dim() == 1:
            p.grad = p.grad * 2
        elif len(p) == 400:
            p.grad.data = p.grad.data * 3
        else:
            p.grad.mul_(5)

    if late:
        _opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    for p in [*net.parameters(), *alone.parameters()]:
        p.register_post_accumulate_grad_hook(change)
    if not late:
        _opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    for _ in range(2):
        net.zero_grad()
        alone.zero_grad()
        backward(net, *batch(group.rank, group.size))
        backward(alone, *batch())
        assert_close(gradients(net), gradients(alone), 1e-5)


def convolution():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Linear(16 * 36, 300), nn.Linear(300, 2))


CONVERSIONS = {
    "double": lambda net: net.double(),
    "bfloat16": lambda net: net.bfloat16(),
    "channels_last": lambda net: net.to(memory_format=torch.channels_last),
    "one layer, other addresses": lambda net: [
        setattr(p, "data", p.data.clone()) for p in net[2].parameters()
    ],
    "share_memory": lambda net: net.share_memory(),
    "mixed": lambda net: [net[0].double(), net[2].double(), net[3].double(), net[3].float(), net[3].double()],
}


@pytest.mark.parametrize("first", ["converted", "trained"])
@pytest.mark.parametrize("how", CONVERSIONS)
def test_conversions_after_wrapping(group, how, first):
    net, alone = convolution(), convolution()
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.0))

    def train(one, sizes):
        dtype = next(one.parameters()).dtype
        for rank in sizes:
            image = torch.full((2, 3, 8, 8), rank + 1.0, dtype=dtype)
            (one(image).square().mean() * (1 if one is net else 1 / group.size)).backward()

    if first == "trained":
        train(net, [group.rank])
        opt.step()
        opt.zero_grad()
    CONVERSIONS[how](net)
    CONVERSIONS[how](alone)
    for _ in range(2):
        opt.zero_grad()
        alone.zero_grad()
        train(net, [group.rank])
        train(alone, range(group.size))
        opt.step()
        for got, want in zip(gradients(net), gradients(alone), strict=True):
            assert got.dtype == want.dtype
            tolerance = 5e-2 if got.dtype == torch.bfloat16 else 1e-4
            assert_close([got], [want], tolerance * float(want.abs().max()))


@pytest.mark.ranks(2, 3, backends=BACKENDS)
def test_a_conversion_on_one_rank_raises_everywhere(group):
    net = nn.Linear(2, 1)
    _opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    if group.rank == 1:
        net.double()
    with pytest.raises(ss.MismatchError, match="DistributedOptimizer"):
        net(torch.ones(1, 2, dtype=net.weight.dtype)).sum().backward()


def test_parameters_that_want_small_gradients_of_another_dtype(group):
    net = model()
    if not hasattr(net[0].weight, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    for p in net.parameters():
        p.grad_dtype = torch.float64
    _opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    backward(net, *batch(group.rank, group.size))
    assert {g.dtype for g in gradients(net)} == {torch.float64}
    assert_close(gradients(net), whole_gradients())


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_graph_over_mean_gradients_is_refused(group):
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    x, y = batch(group.rank, group.size)
    text = r"DistributedOptimizer: backward\(create_graph=True\).*torch.autograd.grad"
    before = group.counters().operations
    with pytest.raises(ss.UnavailableError, match=text):
        functional.mse_loss(net(x), y).backward(create_graph=True)
    assert group.counters().operations == before
    opt.zero_grad()
    backward(net, x, y)
    assert_equal_everywhere(group, gradients(net))


def test_penalties_on_gradients_of_autograd_grad(group):
    def penalty(net, x, y):
        loss = functional.mse_loss(net(x), y)
        grads = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        (loss + sum(g.square().sum() for g in grads)).backward()

    alone, net = model(), model()
    _opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    penalty(net, *batch(group.rank, group.size))
    for rank in range(group.size):
        penalty(alone, *batch(rank, group.size))
    assert_close(gradients(net), [g / group.size for g in gradients(alone)], 1e-4)


def test_closures(group):
    def train(net, opt, data):
        def closure():
            opt.zero_grad()
            return backward(net, *data)

        for _ in range(2):
            opt.step(closure)

    net = model()
    opt = torch.optim.SGD(net.parameters(), 0.1)
    train(net, ss.DistributedOptimizer(group, opt), batch(group.rank, group.size))
    alone = model()
    train(alone, torch.optim.SGD(alone.parameters(), 0.1), batch())
    assert_close(net.parameters(), alone.parameters(), 1e-5)


def test_exchanged_gradients_while_they_accumulate(group):
    """Half of the first mean stays in the sum, and half of this rank's gradients from `no_sync`."""
    net = model()
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    x, y = batch(group.rank, group.size)
    backward(net, x, y)
    halve(replace_data)(net, opt)
    with no_sync(opt):
        backward(net, x, y)
    halve(replace_data)(net, opt)
    backward(net, x, y)
    assert_close(gradients(net), [g * 1.75 for g in whole_gradients()], 1e-5)
    assert_equal_everywhere(group, gradients(net))


def test_a_group_added_later_of_a_converted_model(group):
    net, more = nn.Linear(6, 3), nn.Linear(3, 3)
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    net.double()
    more.double()
    opt.add_param_group({"params": list(more.parameters())})
    x = torch.full((2, 6), group.rank + 1.0, dtype=torch.float64)
    for _ in range(2):
        opt.zero_grad()
        more(net(x)).sum().backward()
        assert_equal_everywhere(group, [*gradients(net), *gradients(more)])
        assert re.match("torch.float64", str(net.weight.grad.dtype))


def test_a_step_after_a_backward_that_raised_is_refused(group):
    """The gradients are this rank's own."""
    net = nn.Linear(2, 1)
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    hidden = torch.ones(1, 2, requires_grad=True) * 1.0

    def broken(_):
        raise RuntimeError("broken on purpose")

    hidden.register_hook(broken)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        net(hidden).sum().backward()
    with pytest.raises(ss.UnavailableError, match=r"DistributedOptimizer: step.*did not average"):
        opt.step()
    opt.zero_grad()
    net(torch.full((1, 2), group.rank + 1.0)).sum().backward()
    opt.step()
    assert_close([net.weight.grad], [torch.full((1, 2), (group.size + 1) / 2)])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch compiling itself
@pytest.mark.ranks(2, timeout=300, backends=["native"])
def test_compiled_autograd_is_refused_and_compiled_models_are_not(group):
    net = model()
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    compiled = torch.compile(net, backend="eager")
    backward(compiled, *batch(group.rank, group.size))
    assert_close(gradients(net), whole_gradients())
    opt.step()
    opt.zero_grad()
    with torch._dynamo.config.patch(compiled_autograd=True):

        @torch.compile(backend="eager")
        def train():
            backward(net, *batch(group.rank, group.size))

        train()
    with pytest.raises(ss.UnavailableError, match="compiled autograd"):
        opt.step()


@pytest.mark.parametrize("kind", ["meta", "conjugated", "lazy"])
def test_parameters_that_cannot_be_sent_are_refused_by_name(group, kind):
    p = {
        "meta": lambda: nn.Parameter(torch.ones(3, device="meta")),
        "conjugated": lambda: nn.Parameter(torch.ones(3, dtype=torch.complex64).conj()),
        "lazy": lambda: nn.LazyLinear(3).weight,
    }[kind]()
    with pytest.raises(
        ss.InvalidArgumentError, match=r"DistributedOptimizer: param_groups\[0\]\['params'\]\[1\]"
    ):
        ss.DistributedOptimizer(group, torch.optim.SGD([nn.Parameter(torch.ones(2)), p], 0.1))


@pytest.mark.parametrize("covered", ["by nobody", "by another optimizer", "frozen"])
def test_the_first_step_warns_of_parameters_that_nobody_averages(group, covered):
    """Clipping over all parameters of the model would use another norm on each rank."""
    net = ss.synchronize(group, model())
    first, last = net[:3], net[-1]
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(last.parameters(), 0.1))
    others = []
    if covered == "by another optimizer":
        others.append(ss.DistributedOptimizer(group, torch.optim.SGD(first.parameters(), 0.1)))
    elif covered == "frozen":
        first.requires_grad_(False)
    backward(net, *batch(group.rank))
    if covered == "by nobody":
        with pytest.warns(UserWarning, match=r"0\.weight.* are in no distributed optimizer"):
            opt.step()
    opt.step()


def test_a_parameter_that_gets_another_shape_of_its_memory(group):
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    opt = ss.DistributedOptimizer(group, torch.optim.SGD([parameter], 1.0))
    for shape in [(2, 3), (6,), (3, 2)]:
        parameter.data = parameter.data.view(shape)
        opt.zero_grad()
        (parameter.sum() * (group.rank + 1)).backward()
        assert torch.equal(parameter.grad, torch.full(shape, (group.size + 1) / 2))
        opt.step()


@pytest.mark.ranks(1, backends=BACKENDS)  # of more, the next pass waits for what that pass had started
def test_what_a_pass_that_raised_has_left_is_not_taken_for_a_gradient(group):
    """An unused parameter keeps the gradient that it has now, not the one that it had in that pass."""
    unused, used = nn.Parameter(torch.ones(200_000)), nn.Parameter(torch.ones(3))
    opt = ss.DistributedOptimizer(group, torch.optim.SGD([used, unused], 0.1))
    (unused.sum() + used.sum()).backward()
    handle = used.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.to_sparse()))
    opt.zero_grad(set_to_none=False)
    unused.grad += 5
    with pytest.raises(ss.InvalidArgumentError, match="sparse"):
        used.sum().backward()
    handle.remove()
    used.grad = None
    opt.zero_grad(set_to_none=False)
    used.sum().backward()
    assert unused.grad.eq(0).all()
    assert used.grad.tolist() == [1.0] * 3
