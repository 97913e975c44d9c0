"""Containers and samplers over a real group."""

import numpy as np
import pytest
import samestep as ss

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


@pytest.mark.parametrize("n_items", [0, 1, 2, 3, 10, 64])
def test_every_item_is_in_one_part(group, n_items):
    data = np.arange(n_items, dtype="f8") ** 2
    part = ss.DistributedDataContainer(group, data)
    lengths = group.allgather_object(len(part))
    assert sum(lengths) == n_items
    assert max(lengths) - min(lengths) <= 1
    total = group.allreduce(np.array(sum(part, 0.0)), "sum")
    np.testing.assert_allclose(total, data.sum())


@pytest.mark.parametrize("mode", ["exact", "pad", "drop"])
def test_all_ranks_draw_the_same_order(group, mode):
    sampler = ss.DistributedSampler(group, 11, seed=5, mode=mode)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        orders = group.allgather_object(sampler.order().tolist())
        assert all(order == orders[0] for order in orders)
        seen = [i for share in group.allgather_object(list(sampler)) for i in share]
        if mode == "exact":
            assert sorted(seen) == list(range(11))


def test_a_mean_over_uneven_parts_equals_that_of_one_process(group):
    data = np.arange(11.0)
    part = ss.DistributedDataContainer(group, data)[:]
    total = group.allreduce_tree({"sum": part.sum(), "n": len(part)}, "sum")
    np.testing.assert_allclose(total["sum"] / total["n"], data.mean())


def test_all_ranks_refuse_what_has_no_rows(group):
    for call in (ss.DistributedDataContainer, ss.DistributedSampler):
        for data in ((1, 2, 3), {"x": [1, 2], "y": [1]}, "text"):
            with pytest.raises(ss.InvalidArgumentError):
                call(group, data)
    group.barrier()


def test_ranks_that_resume_behind_what_the_loop_received_visit_the_rest(group):
    sampler = ss.DistributedSampler(group, {"x": np.arange(11)}, seed=5, mode="exact")
    seen = list(sampler)[:2]  # read ahead
    state = group.bcast_object(sampler.state_dict(consumed=2))
    sampler.load_state_dict(state)
    everyone = [i for share in group.allgather_object(seen + list(sampler)) for i in share]
    assert sorted(everyone) == list(range(11))


DIFFERENT = {
    "data": lambda rank: {"data": 10 + rank},
    "seed": lambda rank: {"seed": rank},
    "shuffle": lambda rank: {"shuffle": rank == 0},
    "mode": lambda rank: {"mode": "pad" if rank == 0 else "drop"},
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_the_first_mean_compares_how_ranks_draw(group, what):
    if group.size == 1:
        pytest.skip("one rank agrees with itself")
    sampler = ss.DistributedSampler(group, **{"data": 10, **DIFFERENT[what](group.rank)})
    total = ss.Accumulator(group)
    for i in sampler:
        total.add(np.array(float(i)))
    with pytest.raises(ss.MismatchError, match=r"DistributedSampler: .* rank 0: 10 items, seed=0"):
        total.mean()


@pytest.mark.parametrize("seeds_differ", [False, True])
def test_what_one_rank_draws_in_addition_is_no_other_order(group, seeds_differ):
    """Such as a batch of the validation data, which rank 0 alone shows, or an epoch whose sampler it still has."""
    shown, both = ss.DistributedSampler(group, 3), ss.DistributedSampler(group, 4, shuffle=False)
    sampler = ss.DistributedSampler(group, 10, seed=group.rank * seeds_differ)
    if group.rank == 0:
        next(iter(shown))
    next(iter(both))
    total = ss.Accumulator(group)
    for i in sampler:
        total.add(np.array(float(i)))
    if seeds_differ and group.size > 1:
        with pytest.raises(
            ss.MismatchError, match=r"rank 0: 10 items, seed=0.*and 3 items.*rank 1: 10 items, seed=1"
        ):
            total.mean()
    else:
        total.mean()


def test_a_rank_that_draws_nothing_is_no_other_order(group):
    sampler = ss.DistributedSampler(group, 10, seed=3)
    total = ss.Accumulator(group)
    for i in sampler if group.rank == 0 else [1, 2]:
        total.add(np.array(float(i)))
    assert total.mean() > 0
    sampler.set_epoch(1)
    again = ss.Accumulator(group)
    for i in sampler:
        again.add(np.array(float(i)))
    again.mean()


@pytest.mark.parametrize("divide", [ss.DistributedDataContainer, ss.DistributedSampler])
def test_a_part_is_not_divided_again_by_the_same_group(group, divide):
    part = ss.DistributedDataContainer(group, np.arange(12))
    with pytest.raises(ss.InvalidArgumentError, match="a part once more"):
        divide(group, part)
    other = group.split(group.rank)
    assert len(divide(other, part)) == len(part)
    other.close()
