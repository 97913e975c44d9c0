"""Optimizers whose state is sharded over the ranks: the bits of the whole one, and a part of its memory."""

import numpy as np
import pytest
import samestep as ss
from optimizers import Pair, adamw, each, momentum, sgd
from samestep.optimizer import gather_state, shard_state
from samestep.optimizer.flat_exchange import GRANULE, Partition

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

SHAPES = {"scalar": (), "empty": 0, "few": 3, "matrix": (7, 41), "long": 1001, "double": (130, 2)}
OPTIMIZERS = {"sgd": sgd, "momentum": momentum, "adamw": adamw}


def tree(seed):
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in SHAPES.items():
        made[name] = np.asarray(rng.standard_normal(shape), "f8" if name == "double" else "f4")
    return made


def train(opt, rank, state=None, steps=range(4), params=None, **options):
    params = tree([7]) if params is None else params
    state = opt.init(params) if state is None else state
    for step in steps:
        updates, state = opt.update(tree([step, rank]), state, params, **options)
        params = each(lambda p, u: p + u, params, updates)
    return params, state


def assert_same_bits(got, want):
    for name in want:
        assert got[name].dtype == want[name].dtype
        assert got[name].shape == want[name].shape
        np.testing.assert_array_equal(got[name], want[name], name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_have_the_bits_of_the_undivided_optimizer(group, name):
    want, _ = train(ss.DistributedOptimizer(group, OPTIMIZERS[name]()), group.rank)
    sharded = ss.ShardedOptimizer(group, OPTIMIZERS[name]())
    assert type(sharded) is Pair
    got, _ = train(sharded, group.rank)
    assert_same_bits(got, want)
    assert group.same(got)


def nbytes(state):
    return sum(leaf.nbytes for moment in ("mu", "nu") for leaf in state[moment].values())


def test_each_rank_keeps_its_part_of_the_state(group):
    _, whole = train(ss.DistributedOptimizer(group, adamw()), group.rank)
    _, part = train(ss.ShardedOptimizer(group, adamw()), group.rank)
    held = group.allgather(nbytes(part))
    stand_ins = 2 * 8 * len(SHAPES) * group.size  # one element for a leaf of which a rank has no part
    assert nbytes(whole) <= held.sum() <= nbytes(whole) + stand_ins
    gaps = GRANULE * (len(SHAPES) + group.size)  # at most so many elements between leaves and at the end
    assert held.max() <= nbytes(whole) / group.size + 2 * 8 * gaps


def test_a_checkpoint_goes_on_at_another_number_of_ranks(group):
    opt = ss.ShardedOptimizer(group, adamw(), op=None)
    params, state = train(opt, 0, steps=range(2))
    whole = gather_state(opt, state, params)
    want, want_whole = train(adamw(), 0, steps=range(2))
    assert_same_bits(whole["mu"], want_whole["mu"])
    assert_same_bits(whole["nu"], want_whole["nu"])
    assert whole["count"] == 2
    at_root = gather_state(opt, state, params, root=group.size - 1)
    assert (at_root is None) == (group.rank != group.size - 1)

    want, _ = train(adamw(), 0, want_whole, range(2, 4), want)
    for members in sorted({1, max(1, group.size - 1), group.size}):
        if group.rank < members:
            other = ss.ShardedOptimizer(group.group(range(members)), adamw(), op=None)
            got, _ = train(other, 0, shard_state(other, whole, params), range(2, 4), params)
            assert_same_bits(got, want)


def test_gradients_that_are_equal_already_and_the_bits_of_any_number_of_ranks(group):
    def run(backend):
        opt = ss.ShardedOptimizer(backend, adamw(), op=None)
        params, total = tree([7]), ss.Accumulator(backend, 8)
        state = opt.init(params)
        for step in range(3):
            for shard in total.indices:
                total.add(tree([step, shard]), shard=shard, weight=1 + shard % 3)
            updates, state = opt.update(total.mean(), state, params)
            params = each(lambda p, u: p + u, params, updates)
        return params

    assert_same_bits(run(group), run(group.group([group.rank])))


def test_weights(group):
    want, _ = train(ss.DistributedOptimizer(group, adamw()), group.rank, weight=group.rank + 2)
    got, _ = train(ss.ShardedOptimizer(group, adamw()), group.rank, weight=group.rank + 2)
    assert_same_bits(got, want)
    opt = ss.ShardedOptimizer(group, sgd(), op=None)
    with pytest.raises(ss.InvalidArgumentError, match="weight is for gradients that are averaged here"):
        train(opt, 0, weight=1)


def test_sums_and_dtypes_of_gradients(group):
    params = {"a": np.ones((40, 5), "f4"), "b": np.ones(300, "f4")}
    opt = ss.ShardedOptimizer(group, sgd(), op="sum")
    grads = each(lambda p: np.full(p.shape, group.rank + 1, "f8"), params)
    updates, _ = opt.update(grads, opt.init(params), params)
    total = group.size * (group.size + 1) // 2
    np.testing.assert_array_equal(updates["a"], np.full((40, 5), -0.1 * total))
    if group.size > 1:
        with pytest.raises(ss.InvalidArgumentError, match="are of one dtype; cast the gradients"):
            opt.update({**grads, "a": params["a"]}, opt.init(params), params)


def test_a_gradient_that_some_ranks_lack_counts_as_zeros(group):
    def update(grads, state, params=None):
        return each(lambda g: None if g is None else -g, grads), state

    opt = ss.ShardedOptimizer(group, Pair(lambda params: (), update))
    params = {"a": np.ones((3, 50)), "b": np.ones(200), "c": np.ones(2)}
    last = group.rank == group.size - 1
    grads = {"a": np.full((3, 50), float(group.size)) if last else None, "b": np.ones(200), "c": None}
    updates, _ = opt.update(grads, opt.init(params), params)
    np.testing.assert_array_equal(updates["a"], -np.ones((3, 50)))
    np.testing.assert_array_equal(updates["b"], -np.ones(200))
    assert updates["c"] is None


def test_errors(group):
    with pytest.raises(TypeError, match="neither a torch Optimizer nor"):
        ss.ShardedOptimizer(group, object())
    with pytest.raises(ss.InvalidArgumentError, match="pass its mean"):
        ss.ShardedOptimizer(group, sgd(), shards=8)
    with pytest.raises(ss.InvalidArgumentError, match="is not what ShardedOptimizer returned"):
        gather_state(sgd(), (), {})
    opt = ss.ShardedOptimizer(group, adamw())
    params = {"w": np.ones(300)}
    state = opt.init(params)
    if group.size > 1:
        with pytest.raises(ss.InvalidArgumentError, match="not a state of"):
            gather_state(opt, {"mu": state["mu"]}, params)
        with pytest.raises(ss.InvalidArgumentError, match="pass the whole state"):
            shard_state(opt, state, params)
        wrong = {"w": np.ones(300 + (group.rank == 1))}
        with pytest.raises(ss.MismatchError, match=r"leaf \['w'\] is float64 \(300,\) on rank"):
            opt.update(wrong, opt.init(wrong), wrong)
    assert group.allreduce(1) == group.size


def test_no_ranks_part_of_a_state_takes_the_place_of_anothers(group):
    """Its shapes may be equal on all ranks, so that nothing else would tell."""
    params = {"w": np.ones(GRANULE * group.size)}
    opt = ss.ShardedOptimizer(group, momentum())
    start = opt.init(params)
    updates, stepped = opt.update({"w": np.full(len(params["w"]), float(group.rank))}, start, params)
    refused = "TrainState: opt_state has a part of the state of a ShardedOptimizer"
    for state in (start, stepped, shard_state(opt, gather_state(opt, start, params), params)):
        if group.size == 1:
            assert group.same(ss.synchronize(group, state))
            continue
        before = {"w": state["w"].copy()}
        with pytest.raises(ss.InvalidArgumentError, match=r"leaf \['w'\]: a part of the state of a Sharded"):
            ss.synchronize(group, state)
        with pytest.raises(ss.InvalidArgumentError, match=refused):
            ss.TrainState(group, opt_state={"of this": state})
        kept = ss.TrainState(group, opt_state=None)
        with pytest.raises(ss.InvalidArgumentError, match=refused):
            kept.opt_state = state
        assert_same_bits(state, before)
    whole = gather_state(opt, stepped, params)
    assert group.same(ss.synchronize(group, {"whole": whole, "params": params, "updates": updates}))


def test_what_ranks_do_not_divide_is_no_part(group):
    """The count of a state is in the whole one as well, which may be synchronized, and may be elsewhere."""

    def update(grads, state, params=None):
        updates, of = momentum().update(grads, state["of"], params)
        return updates, {"count": np.asarray(state["count"] + 1), "of": of}

    counted = Pair(lambda params: {"count": np.zeros((), int), "of": momentum().init(params)}, update)
    params = tree([7])
    opt = ss.ShardedOptimizer(group, counted, op=None)
    state = opt.init(params)
    for _ in range(2):
        whole = ss.synchronize(group, gather_state(opt, state, params))
        assert group.allreduce_tree({"n": state["count"]}, "max")["n"] == state["count"]
        state = shard_state(opt, whole, params)
        if group.size > 1:
            with pytest.raises(ss.InvalidArgumentError, match="a part of the state of a Sharded"):
                ss.synchronize(group, state)
        _, state = opt.update(tree([1]), state, params)


def test_parts_are_all_elements_once_and_equally_long():
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 4, 7, 64):
        counts = [int(n) for n in rng.integers(0, 3000, 12)] + [0, 1]
        dtypes = [["f4", "f8", None][i % 3] for i in range(len(counts))]
        partition = Partition(counts, dtypes, size)
        for leaf, (count, dtype) in enumerate(zip(counts, dtypes, strict=True)):
            parts = [partition.part(leaf, rank) for rank in range(size)]
            elements = [i for part in parts for i in part]
            assert elements == (list(range(count)) if dtype else [])
            assert all(part.start % GRANULE == 0 for part in parts if part)
