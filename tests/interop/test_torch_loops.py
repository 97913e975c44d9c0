"""torch: training on parts of a batch equals training on the whole, however the loop is written."""

import contextlib
import copy
import fractions
import pickle

import numpy as np
import pytest
import samestep as ss
from samestep.optimizer import no_sync
from torch_training import (
    assert_close,
    assert_equal_everywhere,
    backward,
    batch,
    gradients,
    model,
    nn,
    plain,
    torch,
    whole_gradients,
)

BACKENDS = ["self", "native"]  # the same law on all: what differs between them is for tests/conformance
pytestmark = pytest.mark.ranks(1, 2, 3, timeout=120, backends=BACKENDS)


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


@pytest.mark.parametrize(
    "as_loss",
    [
        torch.Tensor.detach,
        torch.Tensor.item,
        lambda loss: loss.detach().numpy(),
        lambda loss: np.longdouble(loss.item()),
        lambda loss: fractions.Fraction(loss.item()),
    ],
    ids=["tensor", "float", "array", "number of NumPy", "fraction"],
)
def test_lbfgs(group, as_loss):
    """Its line search compares losses: those that all ranks have, though a closure computes that of the rank."""

    def train(net, x, y, wrap):
        opt = wrap(torch.optim.LBFGS(net.parameters(), 0.5, max_iter=6, line_search_fn="strong_wolfe"))

        def closure():
            opt.zero_grad()
            return as_loss(backward(net, x, y))

        return [float(opt.step(closure)), float(opt.step(closure=closure))]

    alone, net = model().double(), model().double()
    expected = train(alone, *(t.double() for t in batch()), lambda opt: opt)
    mine = (t.double() for t in batch(group.rank, group.size))
    found = train(net, *mine, lambda opt: ss.DistributedOptimizer(group, opt))
    assert found == pytest.approx(expected, rel=1e-9)
    assert_close(net.parameters(), alone.parameters(), 1e-6)
    assert_equal_everywhere(group, net.parameters())


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


def test_training_equals_one_process_when_everything_starts_out_different(group):
    torch.manual_seed(group.rank)
    net = nn.Linear(6, 3)
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    ss.synchronize(group, net)
    alone = copy.deepcopy(net)
    plain(alone, torch.optim.SGD(alone.parameters(), 0.1), *batch())
    plain(net, opt, *batch(group.rank, group.size))
    assert_close(net.parameters(), alone.parameters())


def goes_on(group, net, opt, data):
    for _ in range(2):
        opt.zero_grad()
        backward(net, *data)
        opt.step()
    assert_equal_everywhere(group, net.parameters())


def test_a_rank_that_skips_a_step_is_told(group):
    """Before a gradient at other parameters counts. Who has made up for it goes on."""
    net = model()
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    data = batch(group.rank, group.size)
    backward(net, *data)
    backward(net, *data)  # a pass that adds to another is of the same step
    if group.rank > 0:
        opt.step()
    opt.zero_grad()
    if group.size == 1:
        return
    with pytest.raises(ss.MismatchError, match=r"rank 0: .* 0 step\(\) since the last backward\(\)"):
        backward(net, *data)
    ss.synchronize(group, net)
    goes_on(group, net, opt, data)


def test_steps_that_change_nothing_do_not_count(group):
    net = model()
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))
    for _ in range(2):
        opt.zero_grad()
        for _ in range(group.rank):
            opt.step()
        backward(net, *batch(group.rank, group.size))
        opt.step()


def by_one(opt, group):
    opt.param_groups[0]["lr"] /= 2 if group.rank == 0 else 1


def by_each(opt, group):
    opt.param_groups[0]["momentum"] = 0.1 * (1 + group.rank)


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("change", [by_one, by_each])
def test_settings_that_differ_are_told_before_a_step(group, change, first):
    """Those that all change alike are fine, and who has made up for a difference goes on."""
    net = model()
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1, momentum=0.5))
    data = batch(group.rank, group.size)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    for _ in range(0 if first else 3):
        backward(net, *data)
        opt.step()
        scheduler.step()
    if group.size == 1:
        return
    before = [p.detach().clone() for p in net.parameters()]
    change(opt, group)
    with pytest.raises(ss.MismatchError, match=r"settings"):
        backward(net, *data)
    named = "lr" if change is by_one else "momentum"
    with pytest.raises(ss.MismatchError, match=rf"settings .*{named}.* differs"):  # all compare all then
        backward(net, *data)
    assert_close(list(net.parameters()), before, 0.0)
    ss.synchronize(group, opt)
    goes_on(group, net, opt, data)
