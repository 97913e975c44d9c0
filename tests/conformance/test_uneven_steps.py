"""Ranks with different numbers of batches make the same number of steps, and metrics over their parts are exact."""

import math
import re

import numpy as np
import pytest
import samestep as ss

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def batches_of(rank):
    return [f"{rank}.{i}" for i in range([2, 0, 3, 1][rank])]


def test_ranks_that_have_run_out_get_none_until_all_have(group):
    mine = batches_of(group.rank)
    longest = max(len(batches_of(rank)) for rank in range(group.size))
    seen = []
    for batch in ss.steps(group, iter(mine)):
        seen.append(batch)
        assert group.allreduce(np.ones(1))[0] == group.size
    assert seen == mine + [None] * (longest - len(mine))


def test_until_any_ends_with_the_first(group):
    mine = batches_of(group.rank)
    shortest = min(len(batches_of(rank)) for rank in range(group.size))
    assert list(ss.steps(group, mine, until="any")) == mine[:shortest]
    with pytest.raises(ss.InvalidArgumentError, match="'all' or 'any', got 'most'"):
        ss.steps(group, mine, until="most")


def test_a_step_costs_one_reduction_of_eight_bytes(group):
    for _ in ss.steps(group, range(3)):
        pass  # what is made once
    before = group.counters().operations
    for _ in ss.steps(group, range(100)):
        pass
    assert group.counters().operations - before <= 101


def test_the_mean_over_uneven_steps_is_that_of_all_items(group):
    lengths = [5, 0, 12, 3][: group.size]
    mine = np.arange(lengths[group.rank]) + 10.0 * group.rank
    everyone = np.concatenate([np.arange(n) + 10.0 * rank for rank, n in enumerate(lengths)])
    total, means, counts = ss.Accumulator(group), [], []
    for batch in ss.steps(group, [mine[i : i + 4] for i in range(0, len(mine), 4)]):
        total.add(None if batch is None else [batch.mean()], weight=0 if batch is None else len(batch))
        means.append(total.mean()[0])
        counts.append(total.weight)
    assert sum(counts) == len(everyone)
    np.testing.assert_allclose(np.dot(means, counts) / len(everyone), everyone.mean(), rtol=1e-15)


def test_all_ranks_may_leave_the_loop_early_and_loop_again(group):
    for _ in range(3):
        for i, _batch in enumerate(ss.steps(group, range(5 + group.rank))):
            if i == 2:
                break
    assert group.allreduce(np.ones(1))[0] == group.size


def test_a_rank_that_leaves_early_is_named(group):
    if group.size == 1:
        return
    with pytest.raises(ss.MismatchError, match=r"steps\(\).*; rank 1: barrier"):
        for _ in ss.steps(group, range(5)):
            if group.rank == 1:
                break
        group.barrier()
    assert group.allreduce(np.ones(1))[0] == group.size


@pytest.mark.parametrize("until", ["all", "any"])
def test_a_rank_in_another_loop_is_named_on_all_ranks(group, until):
    if group.size == 1:
        return
    others = {2: "rank 0", 3: "ranks 0, 2", 4: "ranks 0, 2, 3"}[group.size]
    why = rf"before step 2 of loop (\d+) on {others} and before step 0 of loop (\d+) on rank 1 "
    with pytest.raises(ss.MismatchError, match=why) as caught:
        for _ in ss.steps(group, range(5), until=until):
            if group.rank == 1:
                break
        for _ in ss.steps(group, range(5), until=until):
            pass
    first, second = map(int, re.search(why, str(caught.value)).groups())
    assert second == first + 1
    assert group.allreduce(np.ones(1))[0] == group.size


def test_loops_go_on_after_a_block_that_some_ranks_began_a_loop_in(group):
    with pytest.raises(ss.StepError), group.together():
        if group.rank == 0:
            raise ValueError("before the loop")
        for _ in ss.steps(group, range(2)):
            group.barrier()
    assert list(ss.steps(group, range(2))) == [0, 1]


# ---- metrics


def test_metric_means_are_exact_over_ragged_parts(group):
    rows = [(0.1, 3), (0.2, 0), (1e300, 5), (-1e300, 1)][: group.size]
    mean = ss.metric_mean(group, {"loss": rows[group.rank], "hits": (np.int64(2), np.int32(4))})
    exact = [0.1 / 3, math.fsum([0.1, 0.2]) / 3, 1e300 / 8, math.fsum([0.1, 0.2]) / 9][group.size - 1]
    assert math.isclose(mean["loss"], exact, rel_tol=1e-15)
    assert mean["hits"] == 0.5


def test_metrics_may_be_missing_on_some_ranks(group):
    mine = {"x": (6.0, 2)} if group.rank == group.size - 1 else {}
    assert ss.metric_mean(group, mine) == {"x": 3.0}


def test_metrics_of_no_items_and_of_no_numbers(group):
    with pytest.raises(ss.InvalidArgumentError, match="'x' are zero on all ranks"):
        ss.metric_mean(group, {"x": (0.0, 0)})
    with pytest.raises(ss.InvalidArgumentError, match="'x' must be a sum and a count"):
        ss.metric_mean(group, {"x": ("1", 1)})
    with pytest.raises(ss.InvalidArgumentError, match="count of 'x' is -1"):
        ss.metric_mean(group, {"x": (1.0, -1)})
    assert math.isnan(ss.metric_mean(group, {"x": (math.nan, 1)})["x"])


@pytest.mark.parametrize(
    "masked", [np.ma.masked, np.ma.array([2.0], mask=[True])], ids=["constant", "of one element"]
)
@pytest.mark.parametrize("place", [0, 1], ids=["sum", "count"])
def test_masked_sums_and_counts_are_refused_on_all_ranks(group, masked, place):
    pair = [2.0, 1]
    if group.rank == group.size - 1:
        pair[place] = masked
    with pytest.raises(
        ss.InvalidArgumentError, match="leave 'x' out where a rank has no items; its sum or count"
    ):
        ss.metric_mean(group, {"x": pair})
    assert ss.metric_mean(group, {"x": (np.ma.array([2.0], mask=[False]), 1)}) == {"x": 2.0}


@pytest.mark.parametrize(
    "leaf",
    [np.ma.array([1.0, 2.0], mask=[True, False]), np.ma.masked, np.array(["text"]), np.array(1.0, ">f8")],
    ids=["masked", "masked constant", "texts", "other byte order"],
)
def test_arrays_that_cannot_be_sent_are_no_gathered_metrics_on_any_rank(group, leaf):
    """One rank alone has such an array. The others must not wait for it."""
    mine = leaf if group.rank == group.size - 1 else np.ones(2)
    where = f" on rank {group.size - 1}" if group.size > 1 else ""
    with pytest.raises(ss.InvalidArgumentError, match=rf"leaf \['x'\]{where}: "):
        ss.gather_metrics(group, {"x": mine})
    assert len(ss.gather_metrics(group, {"x": np.ones(2)})["x"]) == 2 * group.size


def test_gathered_metrics_are_joined_in_order_of_rank(group):
    mine = {
        "rows": np.full((group.rank, 2), group.rank, "f4"),
        "number": float(group.rank),
        "some": np.array([7, 8]) if group.rank == group.size - 1 else None,
        "none": None,
    }
    joined = ss.gather_metrics(group, mine)
    expected = np.concatenate([np.full((rank, 2), rank, "f4") for rank in range(group.size)])
    np.testing.assert_array_equal(joined["rows"], expected)
    assert joined["rows"].dtype == np.float32
    assert joined["number"].tolist() == list(map(float, range(group.size)))
    assert joined["some"].tolist() == [7, 8]
    assert joined["none"] is None


def test_metrics_that_cannot_be_joined(group):
    if group.size == 1:
        return
    with pytest.raises(ss.MismatchError, match=r"float32 rows of \(2,\) on rank 0"):
        ss.gather_metrics(group, [np.zeros((3, 2 + group.rank), "f4")])
