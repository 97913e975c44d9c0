"""Every rank visits its share, in an order all ranks know, and can go on where it was."""

import itertools
import pickle
import types

import numpy as np
import pytest
import samestep as ss
from hypothesis import given
from hypothesis import strategies as st

MODES = ["exact", "pad", "drop"]


def samplers(n_items, size, **options):
    ranks = [types.SimpleNamespace(rank=rank, size=size) for rank in range(size)]
    return [ss.DistributedSampler(rank, n_items, **options) for rank in ranks]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "size", [pytest.param(n, marks=[pytest.mark.slow] * (n not in (1, 2, 3, 8, 13))) for n in range(1, 17)]
)
def test_shares_at_any_number_of_items_and_ranks(mode, size):
    for n_items in range(65):
        shares = [list(sampler) for sampler in samplers(n_items, size, mode=mode)]
        lengths = [len(share) for share in shares]
        assert lengths == [len(sampler) for sampler in samplers(n_items, size, mode=mode)]
        visits = np.bincount([i for share in shares for i in share], minlength=n_items)
        assert visits.size == n_items
        if mode == "exact":
            assert (visits == 1).all()
            assert max(lengths) - min(lengths) <= 1
        else:
            assert len(set(lengths)) == 1
            assert lengths[0] == (-(-n_items // size) if mode == "pad" else n_items // size)
            assert (visits >= 1).all() if mode == "pad" else (visits <= 1).all()
            if n_items and mode == "pad":
                assert visits.max() - visits.min() <= 1


@given(st.integers(1, 200), st.integers(1, 9), st.integers(0, 5), st.integers(0, 1000))
def test_all_ranks_follow_one_order_that_depends_on_seed_and_epoch(n_items, size, epoch, seed):
    group = samplers(n_items, size, mode="exact", seed=seed)
    for sampler in group:
        sampler.set_epoch(epoch)
    order = group[0].order()
    assert sorted(order) == list(range(n_items))
    for rank, sampler in enumerate(group):
        assert list(sampler) == list(order[rank::size])


def test_the_order_is_pinned():
    """A resumed run needs the order of the version that started it."""
    (sampler,) = samplers(10, 1, seed=7)
    sampler.set_epoch(3)
    assert list(sampler) == [5, 4, 9, 2, 7, 1, 0, 8, 3, 6]


def test_each_epoch_has_an_order_of_its_own():
    (sampler,) = samplers(50, 1)
    orders = []
    for epoch in range(5):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
        assert list(sampler.order()) == orders[-1]
    assert all(a != b for a, b in itertools.combinations(orders, 2))
    assert list(samplers(50, 1, seed=1)[0]) != orders[0]


@pytest.mark.parametrize("options", [{}, {"batch_size": 4, "shards": 2}])
def test_the_same_epoch_again_has_the_same_order_and_one_warning(options):
    (sampler,) = samplers(10, 1, **options)
    passes = sampler.steps if options else sampler.__iter__
    list(passes())
    with pytest.warns(UserWarning, match=r"epoch 0 begins again, .*set_epoch\(epoch\)") as caught:
        assert [str(item) for item in passes()] == [str(item) for item in passes()]
    assert len(caught) == 1


def test_no_warning_where_no_epoch_is_repeated():
    (sampler,) = samplers(10, 1)
    next(iter(sampler))
    list(sampler)
    sampler.set_epoch(0)
    list(sampler)
    for same in (samplers(10, 1, shuffle=False), samplers(1, 1)):
        assert list(same[0]) == list(same[0])


def test_without_shuffling_the_order_is_that_of_the_data():
    assert [list(sampler) for sampler in samplers(5, 2, shuffle=False)] == [[0, 2, 4], [1, 3, 0]]


@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 7), st.integers(0, 30), st.sampled_from(MODES))
def test_a_run_resumed_at_another_number_of_ranks_visits_the_rest(n_items, before, after, steps, mode):
    visited, states = [], []
    for sampler in samplers(n_items, before, mode=mode, seed=3):
        sampler.set_epoch(2)
        steps_here = min(steps, n_items // before)
        visited += list(itertools.islice(sampler, steps_here))
        states.append(sampler.state_dict())
    assert all(state == states[0] for state in states)

    resumed = samplers(n_items, after, mode=mode)
    for sampler in resumed:
        sampler.load_state_dict(states[0])
        sampler.set_epoch(2)
    left = [list(sampler) for sampler in resumed]
    unvisited = set(range(n_items)) - set(visited)
    seen = [i for share in left for i in share]
    if mode == "exact":
        assert sorted(seen) == sorted(unvisited)
    elif mode == "pad":
        assert set(seen) == unvisited
    else:
        assert set(seen) <= unvisited
        assert len(seen) == len(unvisited) // after * after


def test_the_epoch_after_a_resumed_one_is_whole():
    (sampler,) = samplers(10, 1)
    iterator = iter(sampler)
    first_items = [next(iterator) for _ in range(4)]
    (resumed,) = samplers(10, 1)
    resumed.load_state_dict(sampler.state_dict())
    assert len(resumed) == 6
    assert first_items + list(resumed) == list(samplers(10, 1)[0])
    assert len(resumed) == 10
    resumed.set_epoch(1)
    assert sorted(resumed) == list(range(10))


def test_a_state_saved_at_the_end_of_an_epoch_leaves_nothing_of_it():
    (sampler,) = samplers(10, 1)
    list(sampler)
    (resumed,) = samplers(10, 1)
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == []
    resumed.set_epoch(1)
    assert sorted(resumed) == list(range(10))


def test_a_pass_that_was_broken_off_starts_anew():
    (sampler,) = samplers(10, 1)
    next(iter(sampler))
    assert len(list(sampler)) == 10


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.data())
def test_a_loop_behind_the_sampler_says_how_many_items_it_has_received(n_items, before, after, data):
    """Each rank reads all of its items ahead; the loops have received `consumed` of them."""
    consumed = data.draw(st.integers(0, n_items // before))
    seen, states = [], []
    for sampler in samplers(n_items, before, mode="exact"):
        seen += list(sampler)[:consumed]
        states.append(sampler.state_dict(consumed))
    assert all(state == states[0] for state in states)
    for sampler in samplers(n_items, after, mode="exact"):
        sampler.load_state_dict(states[0])
        seen += list(sampler)
    assert sorted(seen) == list(range(n_items))


def test_steps_are_consumed_as_steps():
    options = {"batch_size": 4, "shards": 2, "shuffle": False}
    (sampler,) = samplers(10, 1, **options)
    list(sampler.steps())
    assert sampler.state_dict(consumed=1)["visited"] == 4
    assert sampler.state_dict(consumed=3)["visited"] == 10
    with pytest.raises(ss.InvalidArgumentError, match=r"consumed=4, but .* handed out 3 steps"):
        sampler.state_dict(consumed=4)


def test_an_index_that_is_sent_to_another_process_may_be_ahead_of_the_loop():
    (sampler,) = samplers(10, 1)
    sent = pickle.loads(pickle.dumps(list(sampler)))
    assert [type(index) for index in sent] == [int] * 10
    with pytest.raises(ss.InvalidArgumentError, match="consumed="):
        sampler.state_dict()
    assert sampler.state_dict(consumed=3)["visited"] == 3
    sampler.set_epoch(1)
    assert sampler.state_dict()["visited"] == 0


@pytest.mark.parametrize("consumed", [-1, 4])
def test_consumed_is_what_was_handed_out_at_most(consumed):
    (sampler,) = samplers(10, 1)
    list(itertools.islice(sampler, 3))
    with pytest.raises(ss.InvalidArgumentError, match=f"consumed={consumed}, but .* handed out 3 items"):
        sampler.state_dict(consumed)


@pytest.mark.parametrize(
    "data", [{"x": np.arange(7), "y": list("abcdefg")}, (np.arange(7), {"z": np.arange(7)}), np.arange(7)]
)
def test_rows_are_counted_as_the_container_counts_them(data):
    backend = types.SimpleNamespace(rank=0, size=1)
    assert (
        ss.DistributedSampler(backend, data).n_items == len(ss.DistributedDataContainer(backend, data)) == 7
    )


def test_bad_arguments():
    backend = types.SimpleNamespace(rank=0, size=2)
    with pytest.raises(ss.InvalidArgumentError, match="'exact', 'pad' or 'drop'"):
        ss.DistributedSampler(backend, 3, mode="other")
    with pytest.raises(ss.InvalidArgumentError, match=">= 0"):
        ss.DistributedSampler(backend, 3, seed=-1)
    with pytest.raises(ss.InvalidArgumentError, match=">= 0"):
        ss.DistributedSampler(backend, -3)
    with pytest.raises(ss.InvalidArgumentError, match=r"10 items.*have 3"):
        ss.DistributedSampler(backend, 3).load_state_dict(ss.DistributedSampler(backend, 10).state_dict())


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_state_from_within_an_epoch_of_another_order_is_refused(shuffle):
    saved = ss.DistributedSampler(types.SimpleNamespace(rank=0, size=2), 10, shuffle=shuffle)
    other = ss.DistributedSampler(types.SimpleNamespace(rank=0, size=3), 10, shuffle=not shuffle)
    other.load_state_dict(saved.state_dict())  # nothing has been visited
    next(iter(saved))
    with pytest.raises(ss.InvalidArgumentError, match=f"within an epoch with shuffle={shuffle}"):
        other.load_state_dict(saved.state_dict())
    old = saved.state_dict()
    del old["shuffle"]  # of version 0.1
    other.load_state_dict(old)
