"""The mean over the shards of a step has the same bits on any number of ranks."""

import contextlib
import gc
import weakref

import numpy as np
import pytest
import samestep as ss
from samestep.step import combine

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

SHARDS = [1, 3, 8, 13, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 5, 12, 32))]


def tree_sum(terms):
    """Pairwise, cut at the largest power of two below their number: written anew, to check the package by."""
    if len(terms) == 1:
        return terms[0]
    cut = 1
    while 2 * cut < len(terms):
        cut *= 2
    return tree_sum(terms[:cut]) + tree_sum(terms[cut:])


def gradient(shard, shape, dtype, seed=0):
    return np.random.default_rng([seed, shard]).standard_normal(shape).astype(dtype)


def weight_of(shard):
    return 1 + shard % 3


def expected(n_shards, shape, dtype, added_as):
    terms = [
        gradient(s, shape, dtype).astype(added_as) * np.dtype(added_as).type(weight_of(s))
        for s in range(n_shards)
    ]
    total = np.dtype(added_as).type(sum(weight_of(s) for s in range(n_shards)))
    return (tree_sum(terms) / total).astype(dtype)


def filled(group, n_shards, make, **options):
    total = ss.Accumulator(group, n_shards, **options)
    for shard in total.indices:
        total.add(make(shard), shard=shard, weight=weight_of(shard))
    return total


@pytest.mark.parametrize("n_shards", SHARDS)
@pytest.mark.parametrize(("dtype", "added_as"), [("f4", "f4"), ("f8", "f8"), ("f2", "f4")])
def test_the_mean_is_that_of_one_tree_over_all_shards(group, n_shards, dtype, added_as):
    shapes = [(), 0, 1, (7, 11), 40_001]
    total = filled(group, n_shards, lambda s: [gradient(s, shape, dtype) for shape in shapes])
    for got, shape in zip(total.mean(), shapes, strict=True):
        want = expected(n_shards, shape, dtype, added_as)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    assert total.weight == sum(weight_of(s) for s in range(n_shards))


@pytest.mark.parametrize("n_shards", [3, 8])
@pytest.mark.parametrize("length", [1, 7, 64])
def test_neither_bits_nor_finiteness_depend_on_the_length_of_a_segment(group, monkeypatch, n_shards, length):
    monkeypatch.setattr(combine, "_SEGMENT", length)
    total = ss.Accumulator(group, n_shards)
    for bad in (None, 0, 63, 64, 128):
        for shard in total.indices:
            values = gradient(shard, 129, "f4")
            if bad is not None and shard == n_shards - 1:
                values[bad] = np.inf
            total.add([values, np.int64(shard)], shard=shard)
        mean, whole = total.mean()
        terms = [gradient(s, 129, "f4") for s in range(n_shards)]
        kept = np.arange(129) != bad
        np.testing.assert_array_equal(mean[kept], (tree_sum(terms) / np.float32(n_shards))[kept])
        assert whole == (n_shards - 1) // 2
        assert total.all_finite is (bad is None)


@pytest.mark.parametrize("n_shards", [3, 8])
def test_bfloat16_is_rounded_once_to_the_nearest(group, n_shards):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    total = filled(group, n_shards, lambda s: {"w": gradient(s, 1000, bfloat16)})
    np.testing.assert_array_equal(total.mean()["w"], expected(n_shards, 1000, bfloat16, "f4"))


@pytest.mark.parametrize("n_shards", [3, 8])
def test_complex_numbers_and_whole_ones(group, n_shards):
    def make(shard):
        pair = gradient(shard, (2, 50), "f4")
        return {"c": (pair[0] + 1j * pair[1]).astype("c8"), "i": np.arange(5) * 7 - shard, "n": float(shard)}

    mean = filled(group, n_shards, make).mean()
    real, imaginary = expected(n_shards, (2, 50), "f4", "f4")
    np.testing.assert_array_equal(mean["c"].real, real)
    np.testing.assert_array_equal(mean["c"].imag, imaginary)
    weights = [weight_of(s) for s in range(n_shards)]
    whole = sum((np.arange(5) * 7 - s) * w for s, w in enumerate(weights))
    np.testing.assert_array_equal(mean["i"], whole // sum(weights))
    assert type(mean["n"]) is float
    assert mean["n"] == sum(s * w for s, w in enumerate(weights)) / sum(weights)


def test_partial_sums_are_at_most_the_logarithm_of_the_shards(group):
    total = ss.Accumulator(group, 32)
    most = 0
    for shard in total.indices:
        total.add([np.ones(3)], shard=shard)
        most = max(most, len(total._partials.nodes))
    assert most <= 5
    total.mean()


def test_shards_may_be_added_in_any_order(group):
    results = []
    for step in (1, -1):
        total = ss.Accumulator(group, 13)
        for shard in total.indices[::step]:
            total.add([gradient(shard, 100, "f4")], shard=shard, weight=weight_of(shard))
        results.append(total.mean()[0])
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("n_shards", [1, 2, 3])
def test_a_rank_without_shards_gets_the_same_tree(group, n_shards):
    mean = filled(group, n_shards, lambda s: {"b": (gradient(s, 3, "f4"), "text", None)}).mean()
    assert mean["b"][1:] == ("text", None)
    np.testing.assert_array_equal(mean["b"][0], expected(n_shards, 3, "f4", "f4"))


def test_what_is_given_is_neither_changed_nor_kept(group):
    total = ss.Accumulator(group, 4)
    grads = np.zeros(10, "f4")
    for shard in total.indices:
        grads[:] = shard
        total.add({"w": grads}, shard=shard)
        assert (grads == shard).all()
        grads[:] = np.nan
    first = total.mean()["w"]
    assert (first == 1.5).all()
    for shard in total.indices:
        total.add({"w": np.full(10, 9, "f4")}, shard=shard)
    assert (total.mean()["w"] == 9).all()
    assert (first == 1.5).all()


@pytest.mark.parametrize("dtype", ["f2", "f4", "i4", "c8"])
def test_sums_without_copies_have_the_same_bits(group, dtype):
    """Arrays of all layouts, with zero weights and None between them, added forwards and backwards."""

    def make(shard, i):
        values = (100 * gradient(shard, (6, 10), "f4", seed=i)).astype(dtype)
        return [values, values.T, values[::-1, ::2], values[:0]][i] if (shard + i) % 5 else None

    results = []
    for copy in (True, False):
        for step in (1, -1):
            total = ss.Accumulator(group, 13)
            for shard in total.indices[::step]:
                weight = 0 if shard in (2, 3, 6, 8) else weight_of(shard)
                total.add([make(shard, i) for i in range(4)], shard=shard, weight=weight, copy=copy)
            results.append(total.mean())
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)


def test_sums_without_copies_change_nothing(group):
    total = ss.Accumulator(group, 8)
    given = {shard: np.full(70_000, shard, "f4") for shard in total.indices}
    for shard, grads in given.items():
        total.add([grads], shard=shard, copy=False)
    mean = total.mean()[0]
    assert (mean == 3.5).all()
    mean[:] = -1
    for shard, grads in given.items():
        assert (grads == shard).all()


def test_none_counts_as_zeros_and_stays_none_where_it_is_so_on_all_shards(group):
    total = ss.Accumulator(group, 8)
    for used in [{6}, set(), {0, 1, 2, 3, 4, 5, 6, 7}]:
        for shard in total.indices:
            total.add({"a": np.ones(2), "b": np.full(3, 8.0) if shard in used else None}, shard=shard)
        b = total.mean()["b"]
        if used:
            np.testing.assert_array_equal(b, np.full(3, len(used)))
        else:
            assert b is None


def test_a_shard_of_no_weight_changes_no_bit_and_is_not_looked_at(group):
    total = ss.Accumulator(group, 8)
    for shard in total.indices:
        empty = shard in (1, 5, 6, 7)
        total.add(
            None if shard == 5 else [np.full(3, np.nan if empty else -0.0)],
            shard=shard,
            weight=0 if empty else 2,
        )
    mean = total.mean()[0]
    assert (mean == 0).all()
    assert np.signbit(mean).all()


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_mean_says_whether_it_is_finite_on_all_ranks_without_a_collective(group, dtype, value):
    total = ss.Accumulator(group, 8)

    def mean(bad=None, at=0, weight=1):
        for shard in total.indices:
            grads = [np.ones(100_000, dtype), np.arange(3), None, 0.5]
            if shard == bad:
                grads[0][at] = value
            total.add(grads, shard=shard, weight=weight if shard == bad else 1)
        return total.mean()

    mean()
    before = group.counters().operations
    assert total.all_finite is True
    assert group.counters().operations == before
    for bad, at in ((0, 0), (7, 99_999), (3, 65_536)):
        assert not np.isfinite(mean(bad, at)[0][at])
        assert total.all_finite is False
    mean(2, weight=0)  # nobody looks at gradients of weight 0
    assert total.all_finite is True


def test_without_shards_it_is_the_weighted_mean_of_whatever_was_added(group):
    total = ss.Accumulator(group)
    for i in range(group.rank):  # none on rank 0
        total.add([np.full(2, float(i))], weight=group.rank)
    if group.rank == 0 and group.size == 1:
        total.add([np.full(2, 7.0)], weight=3)
    added = [(i, rank) for rank in range(group.size) for i in range(rank)] or [(7, 3)]
    np.testing.assert_array_equal(
        total.mean()[0], np.full(2, sum(i * w for i, w in added) / sum(w for _, w in added))
    )


# ---- errors


def test_missing_shards_are_named_on_all_ranks(group):
    total = ss.Accumulator(group, 8)
    for shard in total.indices:
        if shard not in (1, 6):
            total.add([np.ones(2)], shard=shard)
    with pytest.raises(
        ss.InvalidArgumentError, match=r"not added: shards? 1.* of rank 0.*weight=0"
    ) as caught:
        total.mean()
    assert "6" in str(caught.value)
    assert (filled(group, 8, lambda s: [np.ones(2)]).mean()[0] == 1).all()


def test_a_shard_is_added_once_and_by_its_rank(group):
    total = ss.Accumulator(group, 8)
    first = total.indices[0]
    total.add([np.ones(2)], shard=first)
    with pytest.raises(ss.InvalidArgumentError, match=f"shard {first} has been added"):
        total.add([np.ones(2)], shard=first)
    with pytest.raises(ss.InvalidArgumentError, match=f"rank {group.rank} adds shards .* of 8, not 8"):
        total.add([np.ones(2)], shard=8)
    with pytest.raises(ss.InvalidArgumentError, match="names its shard"):
        total.add([np.ones(2)])


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_a_weight_is_finite_and_not_negative(group, weight):
    with pytest.raises(ss.InvalidArgumentError, match="weight must be"):
        ss.Accumulator(group).add([np.ones(2)], weight=weight)


def test_all_weights_zero_is_an_error_on_all_ranks(group):
    total = ss.Accumulator(group, 4)
    for shard in total.indices:
        total.add(None, shard=shard, weight=0)
    with pytest.raises(ss.InvalidArgumentError, match="all weights are zero"):
        total.mean()


def test_another_number_of_shards_is_an_error_on_all_ranks(group):
    if group.size == 1:
        return
    total = ss.Accumulator(group, 4 + group.rank)
    with pytest.raises(ss.MismatchError, match="shards is 4 on rank 0 and 5 on rank 1"):
        total.mean()


def test_other_trees_are_an_error_on_all_ranks(group):
    shape = 3 if group.rank == group.size - 1 else 2
    total = filled(group, 8, lambda s: {"w": np.ones(shape)})
    if group.size == 1:
        assert total.mean()["w"].shape == (3,)
        return
    with pytest.raises(ss.MismatchError, match=r"leaf \['w'\] is float64 \(2,\) on rank"):
        total.mean()


def test_the_tree_stays_the_same(group):
    total = ss.Accumulator(group)
    total.add({"w": np.ones(2)})
    with pytest.raises(ss.InvalidArgumentError, match=r"leaf \['w'\] is float32 \(2,\) and was float64"):
        total.add({"w": np.ones(2, "f4")})
    with pytest.raises(ss.InvalidArgumentError, match="leaf"):
        total.add({"v": np.ones(2)})
    with pytest.raises(ss.InvalidArgumentError, match="bool"):
        ss.Accumulator(group).add([np.ones(2, bool)])
    with pytest.raises(ss.InvalidArgumentError, match="not a tree of arrays"):
        ss.Accumulator(group).add(x for x in [np.ones(2)])


def test_an_exception_in_a_block_resets_what_began_in_it(group):
    """A step that an exception ends early is forgotten on all ranks, also by one that had added nothing."""
    before, within = ss.Accumulator(group), ss.Accumulator(group, 8)
    before.add([np.full(2, 3.0)])
    for nested in (False, True):
        with pytest.raises(ss.StepError), group.together():
            with group.together() if nested else contextlib.nullcontext():
                before.add([np.full(2, 5.0)])
                for shard in within.indices:
                    if group.rank == 0 and shard == within.indices[-1]:
                        raise ValueError("bad shard")
                    within.add([np.ones(2)], shard=shard)
            if nested:
                raise ValueError("after the inner block")
            group.barrier()
        assert (filled_again(within) == 1).all()
    assert (before.mean()[0] == (3 + 5 + 5) / 3).all()  # began before the blocks


def filled_again(total):
    for shard in total.indices:
        total.add([np.ones(2)], shard=shard)
    return total.mean()[0]


def test_a_step_that_has_ended_in_a_block_is_not_undone(group):
    total = ss.Accumulator(group, 8)
    with group.together():
        assert (filled_again(total) == 1).all()
        with group.together():
            total.add([np.ones(2)], shard=total.indices[0]) if total.indices else None
    for shard in total.indices[1:]:
        total.add([np.ones(2)], shard=shard)
    assert (total.mean()[0] == 1).all()


def test_the_number_of_shards_is_part_of_a_checkpoint(group):
    total = ss.Accumulator(group, 8)
    assert total.state_dict() == {"shards": 8}
    with pytest.raises(ss.InvalidArgumentError, match="shards=8, not 4"):
        ss.Accumulator(group, 4).load_state_dict(total.state_dict())
    total.add([np.ones(2)], shard=total.indices[0])
    with pytest.raises(ss.InvalidArgumentError, match="middle of a step"):
        total.state_dict()


def test_weights_whose_sum_is_too_large_for_whole_numbers(group):
    for leaf, is_whole in ((np.ones(3), False), (np.ones(3, "i4"), True)):
        total = ss.Accumulator(group, 8)
        for shard in total.indices:
            total.add([leaf], shard=shard, weight=2.0**60)
        if is_whole:
            with pytest.raises(ss.InvalidArgumentError, match=r"sum up to 9.2\S+; where leaves are whole"):
                total.mean()
        else:
            np.testing.assert_array_equal(total.mean()[0], 1)


def test_gradients_are_dropped_once_the_mean_is_there(group):
    total, seen = ss.Accumulator(group, 8), []
    for _ in range(2):
        for shard in total.indices:
            grads = {"a": np.ones(5), "b": [np.ones(3), (np.ones(2),)]}
            seen += [weakref.ref(grads["a"]), weakref.ref(grads["b"][0]), weakref.ref(grads["b"][1][0])]
            total.add(grads, shard=shard, copy=False)
            del grads
        total.mean()
    assert not any(ref() is not None for ref in seen)


# ---- a training run


def loss_gradient(params, x, y):
    hidden = np.tanh(x @ params["w"])
    # Not by @: OpenBLAS 0.3.31 reads unset stack memory for it, and warns if that holds a signalling NaN.
    error = ((hidden * params["v"]).sum(1) - y) / np.float32(max(1, len(y)))
    return {"w": x.T @ (np.outer(error, params["v"]) * (1 - hidden**2)), "v": hidden.T @ error}


def train(backend, epochs=2):
    rng = np.random.default_rng(7)
    x, y = rng.standard_normal((101, 6)).astype("f4"), rng.standard_normal(101).astype("f4")
    params = {"w": rng.standard_normal((6, 5)).astype("f4"), "v": rng.standard_normal(5).astype("f4")}
    sampler = ss.DistributedSampler(
        backend, 101, batch_size=16, shards=8, seed=3
    )  # the last step has 5 items
    total = ss.Accumulator(backend, 8)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for shards in sampler.steps():
            for shard in shards:
                grads = loss_gradient(params, x[shard.items], y[shard.items])
                noise = np.random.default_rng(shard.seed).standard_normal(5).astype("f4")
                grads["v"] += np.float32(0.01) * noise
                total.add(grads, shard=shard.index, weight=len(shard))
            mean = total.mean()
            params = {name: params[name] - np.float32(0.1) * mean[name] for name in params}
    return b"".join(p.tobytes() for p in params.values())


def test_training_gives_the_bits_of_one_rank(group):
    assert train(group) == train(group.group([group.rank]))


def test_what_was_added_is_freed_with_the_accumulator(group):
    """At once: gradients may be most of a device's memory."""

    class Gradient(np.ndarray):
        """An array that can be watched."""

    def added():
        total = ss.Accumulator(group, shards=group.size)
        gradient = np.ones(3).view(Gradient)
        total.add({"x": gradient}, shard=group.rank, copy=False)
        total.mean()
        total.add({"x": gradient}, shard=group.rank, copy=False)
        return weakref.ref(gradient), weakref.ref(total)

    gc.disable()
    try:
        gradient, total = added()
        assert total() is None
        assert gradient() is None
    finally:
        gc.enable()
