"""optax and torch: dividing the state among ranks changes no bit, and what would is refused."""

import copy
import pickle

import numpy as np
import pytest
import samestep as ss
from samestep.optimizer import gather_state, shard_state

pytestmark = pytest.mark.ranks(1, 2, 3, timeout=180, backends=["native"])

# ---- optax

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy


def by_dimension(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


OPTAX = {
    "adamw of matrices": lambda: optax.adamw(0.05, mask=by_dimension),
    "chain": lambda: optax.chain(optax.clip(0.5), optax.trace(0.9), optax.scale_by_learning_rate(0.1)),
    "schedule": lambda: optax.inject_hyperparams(optax.adam)(optax.cosine_decay_schedule(0.1, 10)),
    "by name": lambda: optax.multi_transform(
        {"w": optax.lion(0.1), "b": optax.rmsprop(0.1)}, {"w": "w", "b": "b"}
    ),
    "accumulated": lambda: optax.MultiSteps(optax.adam(0.05), 2),
}


def initial():
    return {"w": jnp.linspace(-1, 1, 900, dtype="float32").reshape(30, 30), "b": jnp.zeros(30)}


def train_optax(opt, rank, *, compiled=False, steps=range(4), start=None):
    def step(params, state, grads):
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if compiled else step
    params, state = start or (initial(), opt.init(initial()))
    for i in steps:
        grads = jax.tree.map(lambda p: jnp.cos(p * (i + 1) + rank).astype(p.dtype), initial())  # noqa: B023
        params, state = step(params, state, grads)
    return params, state


def assert_same_bits(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert isinstance(a, jax.Array)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


# ---- what takes one rank's part for all


@pytest.mark.ranks(2, timeout=180, backends=["native"])
@pytest.mark.parametrize("around", [None, optax.MultiSteps], ids=["alone", "within"])
def test_parts_are_known_after_programs_copies_and_pickling(group, around):
    params = {"w": jnp.ones((64, 2 * group.size)), "v": jnp.ones(128 * group.size)}  # parts of one shape
    opt = ss.ShardedOptimizer(group, optax.adam(0.1))
    opt = around(opt, 1) if around else opt
    _, state = jax.jit(opt.update)(params, opt.init(params), params)
    assert state is not None
    for part in (
        {"state": [state]},
        pickle.loads(pickle.dumps(state)),
        jax.tree.map(np.asarray, state),
        jax.tree.map(lambda x: x + 0, state),
    ):
        for take in (
            lambda tree: ss.synchronize(group, tree),
            group.allreduce_tree,
            lambda tree: ss.allreduce_gradients(group, tree, weight=1.0),
            jax.jit(lambda tree: ss.synchronize(group, tree)),
            jax.jit(group.allreduce_tree),
        ):
            with pytest.raises(ss.InvalidArgumentError, match="a part of the state of a ShardedOptimizer"):
                jax.block_until_ready(take(part))
    with pytest.raises(ss.InvalidArgumentError, match="a part of the state of a ShardedOptimizer"):
        ss.TrainState(group, state=state)


@pytest.mark.ranks(1, 2, timeout=180, backends=["native"])
def test_a_training_state_takes_what_a_program_has_returned(group):
    params = {"w": jnp.ones((64, 2 * group.size)), "b": jnp.ones(1)}
    opt = ss.ShardedOptimizer(group, optax.adam(0.1), copies=2)
    _, state = jax.jit(opt.update)(params, opt.init(params), params)
    whole = gather_state(opt, state, params)
    kept = ss.TrainState(group, state=state).state_dict()["parts"]["state"]
    assert_same_bits(jax.tree.leaves(kept), jax.tree.leaves(whole))


@pytest.mark.ranks(2, timeout=180, backends=["native"])
def test_a_state_without_arrays_is_no_part(group):
    opt = ss.ShardedOptimizer(group, optax.sgd(optax.constant_schedule(0.1)))
    params = {"w": jnp.full(200, group.rank + 1.0)}
    _, state = jax.jit(opt.update)(params, opt.init(params), params)
    ss.synchronize(group, {"params": params, "state": state, "none": ()})


@pytest.mark.parametrize("extents", [(64, 2), (5, 2), (1,)], ids=str)
def test_whole_states_of_the_same_optimizer_are_no_parts(group, extents):
    params = {"w": jnp.ones((*extents[:-1], extents[-1] * group.size)), "v": jnp.ones(64)}
    opt = ss.ShardedOptimizer(group, optax.adam(0.1))
    state = opt.init(params)
    whole = optax.adam(0.1).init(params)
    like_parts = jax.tree.map(jnp.ones_like, state[0].mu)
    assert opt.update(params, state, params)[0].keys() == params.keys()
    ss.synchronize(group, whole)
    group.allreduce_tree(whole)
    gather_state(opt, state, params)
    if group.size == 1:
        group.allreduce_tree(state)
    if jax.tree.map(jnp.shape, like_parts) == jax.tree.map(jnp.shape, params):
        ss.synchronize(group, like_parts)


# ---- optax and torch


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTAX)
def test_optax_updates_have_the_bits_of_the_undivided_one(group, name):
    make = OPTAX[name]
    want, want_state = train_optax(ss.DistributedOptimizer(group, make()), group.rank)
    opt = ss.ShardedOptimizer(group, make())
    got, state = train_optax(opt, group.rank)
    assert_same_bits(got, want)
    whole = gather_state(opt, state, got)
    assert jax.tree.structure(whole) == jax.tree.structure(want_state)
    assert_same_bits(whole, want_state)
    again, _ = train_optax(opt, group.rank, steps=range(4, 6), start=(got, shard_state(opt, whole, got)))
    onward, _ = train_optax(opt, group.rank, steps=range(4, 6), start=(got, state))
    assert_same_bits(again, onward)


@pytest.mark.slow
def test_optax_updates_can_be_compiled(group):
    want, _ = train_optax(ss.DistributedOptimizer(group, optax.adam(0.05)), group.rank, compiled=True)
    opt = ss.ShardedOptimizer(group, optax.adam(0.05))
    got, state = train_optax(opt, group.rank, compiled=True)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)  # XLA may compile other shapes to other roundings
    assert group.same(got)
    held = sum(leaf.size for leaf in jax.tree.leaves(state))
    assert held <= 2 * (930 / group.size + 2 * 64) + 1


REFUSED = {
    "clipping by a global norm": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "lamb": lambda: optax.lamb(0.1),
    "lars": lambda: optax.lars(0.1),
    "novograd": lambda: optax.novograd(0.1),
    "adafactor": lambda: optax.adafactor(0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_optax_transformations_over_several_elements_are_refused(group, name):
    params = {"w": jnp.ones((200, 300)), "b": jnp.ones(30)}
    with pytest.raises(ss.InvalidArgumentError, match="does not update element by element"):
        ss.ShardedOptimizer(group, REFUSED[name]()).init(params)


# ---- torch

torch = pytest.importorskip("torch")

TORCH = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
}


@pytest.fixture(autouse=True)
def one_thread():
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


def network():
    torch.manual_seed(1)
    nn = torch.nn
    net = nn.Sequential(nn.Linear(13, 101), nn.Tanh(), nn.Linear(101, 57), nn.LayerNorm(57), nn.Linear(57, 3))
    net[0].bias.requires_grad_(False)
    net.unused = nn.Parameter(torch.ones(3))
    net.scale = nn.Parameter(torch.tensor(1.0))
    return net


def train_torch(net, opt, rank, *, steps=range(5), clip=None):
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    for i in steps:
        generator = torch.Generator().manual_seed(100 * i + rank)
        opt.zero_grad()
        x, y = torch.randn(4, 13, generator=generator), torch.randn(4, 3, generator=generator)
        (torch.nn.functional.mse_loss(net(x), y) * net.scale).backward()
        if clip is not None:
            clip()
        opt.step()
        schedule.step()
    return net


def assert_equal_tensors(got, want):
    for p, q in zip(got.parameters(), want.parameters(), strict=True):
        assert torch.equal(p, q)


def assert_equal_states(got, want):
    assert got["param_groups"] == want["param_groups"]
    assert got["state"].keys() == want["state"].keys()
    for i, entries in want["state"].items():
        assert got["state"][i].keys() == entries.keys()
        for key, value in entries.items():
            other = got["state"][i][key]
            assert torch.equal(other, value) if isinstance(value, torch.Tensor) else other == value


@pytest.mark.parametrize("name", TORCH)
def test_torch_steps_have_the_bits_of_the_undivided_optimizer(group, name):
    one, two = network(), network()
    plain = ss.DistributedOptimizer(group, TORCH[name](one.parameters()))
    opt = TORCH[name](two.parameters())
    assert ss.ShardedOptimizer(group, opt) is opt
    train_torch(one, plain, group.rank)
    train_torch(two, opt, group.rank)
    assert_equal_tensors(two, one)
    assert_equal_states(opt.state_dict(), plain.state_dict())
    assert (opt.state_dict(root=0) is None) == (group.rank != 0)


def test_torch_state_is_divided_and_goes_on_at_another_number_of_ranks(group):
    net, reference = network(), network()
    opt = ss.ShardedOptimizer(group, torch.optim.AdamW(net.parameters(), 0.01), op=None)
    train_torch(net, opt, 0, steps=range(2))
    held = sum(v.numel() for entries in opt.state.values() for k, v in entries.items() if k != "step")
    n_trained = sum(p.numel() for p in net.parameters() if p.requires_grad) - 3
    assert group.allreduce(held) == 2 * n_trained
    assert held <= 2 * (n_trained / group.size + 64 * 12)
    saved = copy.deepcopy(opt.state_dict())
    weights = copy.deepcopy(net.state_dict())
    plain = torch.optim.AdamW(reference.parameters(), 0.01)
    train_torch(reference, plain, 0, steps=range(2))
    train_torch(reference, plain, 0, steps=range(2, 4))
    for members in sorted({1, max(1, group.size - 1), group.size}):
        if group.rank < members:
            other = network()
            other.load_state_dict(weights)
            new = torch.optim.AdamW(other.parameters(), 0.5)
            ss.ShardedOptimizer(group.group(range(members)), new, op=None)
            new.load_state_dict(saved)
            assert new.param_groups[0]["lr"] == saved["param_groups"][0]["lr"]
            train_torch(other, new, 0, steps=range(2, 4))
            assert_equal_tensors(other, reference)


def test_torch_gradients_are_averaged_before_clipping_on_request(group):
    one, two = network(), network()
    plain = ss.DistributedOptimizer(group, torch.optim.Adam(one.parameters(), 0.01))
    train_torch(one, plain, group.rank, clip=lambda: torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1))
    opt = ss.ShardedOptimizer(group, torch.optim.Adam(two.parameters(), 0.01))

    def clip():
        opt.average()
        torch.nn.utils.clip_grad_norm_(two.parameters(), 0.1)

    train_torch(two, opt, group.rank, clip=clip)
    assert_equal_tensors(two, one)


@pytest.mark.parametrize("op", ["avg", "sum"])
@pytest.mark.parametrize("between", ["set to None", "set to zeros", "kept"])
def test_torch_gradients_computed_after_the_average_are_averaged_too(group, between, op):
    def gradient(rank, i):
        return torch.full((4, 4), (rank + 1.0) * 10**i)

    def run(i):
        (net(torch.ones(1, 4)).sum() * (group.rank + 1) * 10**i).backward()

    net = torch.nn.Linear(4, 4, bias=False)
    opt = ss.ShardedOptimizer(group, torch.optim.SGD(net.parameters(), 1.0), op=op)
    before = net.weight.detach().clone()
    want = sum(gradient(rank, 1) for rank in range(group.size))
    run(0)
    opt.average()
    torch.autograd.grad(net(torch.ones(1, 4)).sum(), list(net.parameters()))  # adds to nothing
    if between == "kept":
        want = want + sum(gradient(rank, 0) for rank in range(group.size))
    else:
        opt.zero_grad(set_to_none=between == "set to None")
    if op == "sum" and between == "kept":
        with pytest.raises(ss.InvalidArgumentError, match=r"backward\(\) after opt.average\(\)"):
            run(1)
        return
    run(1)
    opt.step()
    torch.testing.assert_close(net.weight.detach(), before - want / (group.size if op == "avg" else 1))
    opt.zero_grad()
    run(1)  # no longer watched
    opt.average()
    opt.step()


def test_torch_shards_give_the_bits_of_any_number_of_ranks(group):
    def run(backend):
        net = network()
        opt = ss.ShardedOptimizer(backend, torch.optim.AdamW(net.parameters(), 0.01), shards=4)
        sampler = ss.DistributedSampler(backend, 30, batch_size=8, shards=4, seed=2)
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(30, 13, generator=generator), torch.randn(30, 3, generator=generator)
        for shards in sampler.steps():
            for shard in shards:
                with opt.shard(shard.index, weight=len(shard)):
                    if len(shard):
                        torch.nn.functional.mse_loss(net(x[shard.items]), y[shard.items]).backward()
            opt.step()
        return net

    assert_equal_tensors(run(group), run(group.group([group.rank])))


def test_torch_parameters_may_be_added_and_unfrozen(group):
    one, two = network(), network()
    plain = ss.DistributedOptimizer(group, torch.optim.Adam(one.parameters(), 0.01))
    opt = ss.ShardedOptimizer(group, torch.optim.Adam(two.parameters(), 0.01))
    for net, optimizer in ((one, plain), (two, opt)):
        train_torch(net, optimizer, group.rank, steps=range(2))
        net[0].bias.requires_grad_(True)
        net.more = torch.nn.Parameter(torch.ones(70))
        optimizer.add_param_group({"params": [net.more], "lr": 0.1})
        train_torch(net, optimizer, group.rank, steps=range(2, 4))
    assert_equal_tensors(two, one)
    assert_equal_states(opt.state_dict(), plain.state_dict())


@pytest.mark.parametrize("late", [True, False], ids=["after backward", "before it"])
@pytest.mark.parametrize("to_none", [True, False])
def test_torch_parameters_are_updated_while_they_have_a_gradient(group, late, to_none):
    """As in torch, where freezing a parameter keeps its gradient, and momentum goes on with one of zeros."""
    one, two = network(), network()
    plain = ss.DistributedOptimizer(group, torch.optim.SGD(one.parameters(), 0.1, momentum=0.9))
    opt = ss.ShardedOptimizer(group, torch.optim.SGD(two.parameters(), 0.1, momentum=0.9))
    for net, optimizer in ((one, plain), (two, opt)):
        for i in range(4):
            optimizer.zero_grad(set_to_none=to_none)
            if not late:
                net[2].requires_grad_(i % 2 == 0)
            net(torch.full((2, 13), group.rank + i + 1.0)).square().sum().backward()
            if late:
                net[2].requires_grad_(i % 2 == 1)
            optimizer.step()
    assert_equal_tensors(two, one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_torch_dtypes_and_layouts(group, dtype):
    def run(wrap):
        torch.manual_seed(0)
        net = torch.nn.Conv2d(3, 5, 3, dtype=dtype).to(memory_format=torch.channels_last)
        net.other = torch.nn.Parameter(torch.ones(100))
        opt = wrap(torch.optim.AdamW(net.parameters(), 0.01))
        for i in range(3):
            opt.zero_grad()
            x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(i + 9 * group.rank)).to(dtype)
            (net(x).square().mean() + net.other.sum()).backward()
            opt.step()
        return net

    got = run(lambda opt: ss.ShardedOptimizer(group, opt))
    assert_equal_tensors(got, run(lambda opt: ss.DistributedOptimizer(group, opt)))


@pytest.mark.parametrize("gradients", ["reduced", "averaged", "of no rank", "by shard"])
def test_torch_layouts_that_differ_between_ranks_are_told(group, gradients):
    """Also where the layout changes after the first step. Nothing is updated then."""
    net = torch.nn.Conv2d(3, 5, 3)
    shards = {"shards": group.size} if gradients == "by shard" else {}
    opt = ss.ShardedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1), **shards)

    def step():
        opt.zero_grad()
        if gradients == "by shard":
            with opt.shard(group.rank):
                net(torch.ones(1, 3, 3, 3)).sum().backward()
        elif gradients != "of no rank":
            net(torch.ones(1, 3, 3, 3)).sum().backward()
        if gradients == "averaged":
            opt.average()
        opt.step()

    step()
    if group.rank == 0:
        net.to(memory_format=torch.channels_last)
    if group.size == 1:
        step()
        return
    before = net.weight.detach().clone()
    with pytest.raises(ss.MismatchError, match=r"in memory is with strides \(27, 1, 9, 3\) on rank 0"):
        step()
    assert torch.equal(net.weight, before)
    net.to(memory_format=torch.channels_last)
    step()


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Muon", "SparseAdam"])
def test_torch_optimizers_over_several_elements_are_refused(group, name):
    parameters = [
        p for p in network().parameters() if name != "Muon" or p.ndim == 2
    ]  # it takes matrices only
    with pytest.raises(ss.InvalidArgumentError, match="element by element"):
        ss.ShardedOptimizer(group, getattr(torch.optim, name)(parameters))


class Estimating(torch.optim.SGD):
    """As the Prodigy of `prodigyopt`: the group holds a norm over all gradients, which rules the updates only later."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            norm = sum(float(p.grad.abs().sum()) for p in group["params"])
            group["norm"] = group.get("norm", 0.0) + norm
            group["lr"] = 0.1 if norm < 1e6 else 0.01


class FiniteOnly(torch.optim.SGD):
    """Steps only where all gradients are finite."""

    def step(self, closure=None):
        if all(p.grad.isfinite().all() for group in self.param_groups for p in group["params"]):
            super().step(closure)


@pytest.mark.parametrize("kind", [Estimating, FiniteOnly])
def test_torch_optimizers_with_a_state_of_all_elements_are_refused(group, kind):
    with pytest.raises(ss.InvalidArgumentError, match="does not update element by element"):
        ss.ShardedOptimizer(group, kind(network().parameters(), lr=0.1))


def test_torch_closures_and_copies(group):
    net = network()
    opt = ss.ShardedOptimizer(group, torch.optim.SGD(net.parameters(), 0.1))

    def closure():
        opt.zero_grad()
        loss = net(torch.ones(1, 13)).sum()
        loss.backward()
        return loss

    assert opt.step(closure).requires_grad
    with pytest.raises(ss.InvalidArgumentError, match="cannot be copied"):
        copy.deepcopy(opt)
    with pytest.raises(ss.InvalidArgumentError, match="distributed already"):
        ss.DistributedOptimizer(group, opt)


@pytest.mark.parametrize("op", ["avg", None])
def test_settings_that_differ_are_told_before_a_step(group, op):
    """Each rank would update its part in its own way. Those that all change alike are fine."""
    parameter = torch.nn.Parameter(torch.ones(300))
    opt = ss.ShardedOptimizer(group, torch.optim.SGD([parameter], 0.1), op=op)
    for rate in (0.1, 0.2, 0.2):
        opt.param_groups[0]["lr"] = rate
        parameter.grad = torch.ones(300)
        opt.step()
    before = parameter.detach().clone()
    torch.testing.assert_close(before, torch.full((300,), 0.5))
    if group.size == 1:
        return
    opt.param_groups[0]["lr"] = 0.1 * (2 + (group.rank == 1))
    with pytest.raises(ss.MismatchError, match="settings"):
        opt.step()
    opt.param_groups[0]["lr"] = 0.1 * (2 + group.rank) + 0.01
    with pytest.raises(ss.MismatchError, match=r"ShardedOptimizer: settings .*lr.* differs"):
        opt.step()
    assert torch.equal(parameter, before)
