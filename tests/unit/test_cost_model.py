"""The formulas of benchmarks/cost_model.py: their limits, and what the engine counts."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from samestep import _core

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
if not BENCHMARKS.exists():
    pytest.skip("the benchmarks are not part of this tree", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))
import cost_model as cost  # noqa: E402

FREE = cost.Network(latency_s=0, message_s=0, bandwidth=math.inf, copy_s=0, reduce_s=0)
LONG = 64 * cost.MIB


def only(**price):
    return cost.Network(**{**FREE.__dict__, **price})


@pytest.mark.parametrize("name", cost.ALGORITHMS)
def test_one_rank_costs_nothing_but_its_own_elements(name):
    load = cost.ALGORITHMS[name](1, LONG)
    assert (load.rounds, load.messages, load.card_bytes) == (0, 0, 0)


@pytest.mark.parametrize("n", [2, 3, 8, 64, 4096])
def test_long_buffers_cross_the_card_once_each_way_and_phase(n):
    for name in ("two_shot", "recursive_halving", "ring"):
        assert cost.ALGORITHMS[name](n, LONG).card_bytes == pytest.approx(2 * (n - 1) / n * LONG)


def test_steps_that_follow_one_another():
    assert [cost.two_shot(n, LONG).rounds for n in (2, 64)] == [2, 2]
    assert [cost.recursive_halving(n, LONG).rounds for n in (2, 3, 64)] == [2, 2, 12]
    assert [cost.recursive_doubling(n, LONG).rounds for n in (2, 3, 64)] == [1, 2, 6]
    assert [cost.header_exchange(n).rounds for n in (2, 16, 17, 1024)] == [1, 1, 5, 10]
    assert [cost.ring(n, LONG).rounds for n in (2, 64)] == [2, 126]


def test_each_price_is_paid_for_what_it_is_for():
    load = cost.Load(rounds=3, messages=5, rank_bytes=7, card_bytes=11, reduced=13)
    assert cost.seconds(load, FREE) == 0
    assert cost.seconds(load, only(latency_s=1)) == 3
    assert cost.seconds(load, only(message_s=1)) == 10
    assert cost.seconds(load, only(copy_s=1)) == 14
    assert cost.seconds(load, only(bandwidth=1)) == 11
    assert cost.seconds(load, only(reduce_s=1)) == 13
    assert cost.seconds(load, only(message_s=1, processors=2), ranks=3) == 15
    assert cost.seconds(load, only(message_s=1, bandwidth=1)) == 11  # the longer one
    assert cost.seconds(cost.Load(shared=7), only(node_s=1)) == 7
    assert cost.seconds(load, only(wake_s=1, wait_s=1)) == 0  # nobody sleeps where each rank has a processor
    assert cost.seconds(load, only(wake_s=1, processors=2), ranks=3) == 15
    assert cost.seconds(load, only(wait_s=1, processors=2), ranks=3) == 3
    one_by_one = cost.replace(load, overlaps=False)
    assert cost.seconds(one_by_one, only(message_s=1, bandwidth=1)) == 21
    assert (load + one_by_one).messages == 10 and not (load + one_by_one).overlaps


def test_levels_send_what_leaves_a_host_once_and_flat_once_for_each_rank():
    card = only(bandwidth=1)
    assert cost.levels(card, 2, 8, LONG, "two_shot") == pytest.approx(LONG, rel=1e-3)
    assert cost.flat(card, 2, 8, LONG, "two_shot") == pytest.approx(8 * LONG)
    assert cost.flat(card, 1, 8, LONG, "two_shot") == 0


def test_the_choice():
    def cheapest(network, nbytes):
        names = (cost.SHORT, *cost.ALGORITHMS)
        return min(names, key=lambda name: cost.levels(network, 64, 1, nbytes, name))

    slow_start = only(latency_s=1, message_s=1e-9, bandwidth=1e9)
    assert cheapest(slow_start, 8) == "short"
    assert cheapest(cost.REFERENCE, 512 * cost.KIB) == "recursive_halving"
    assert cheapest(only(message_s=1e-9, latency_s=1, bandwidth=1e9), LONG) == "two_shot"


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 16, 17, 33, 64, 96, 128, 1000, 4096])
def test_the_engine_chooses_as_the_formulas_say(n):
    for exponent in range(7, 31):
        for nbytes in (2**exponent, 2**exponent + 1000):
            assert _core.select_algorithm(n, nbytes) == cost.select_algorithm(n, nbytes), nbytes


def test_a_step_hides_what_it_may():
    network = only(bandwidth=1e9)
    reduction = cost.levels(network, 8, 8, LONG)
    assert cost.step(network, 8, 8, [LONG], compute_s=1.0) == pytest.approx(1 + reduction)
    assert cost.step(network, 8, 8, [LONG, LONG], compute_s=1.0) == pytest.approx(1 + 2 * reduction)
    assert cost.step(network, 8, 8, [LONG], compute_s=1.0, overlap=0.5) == 1.0


@pytest.mark.ranks(2, 3, 4, backends=["tcp"])
@pytest.mark.parametrize("count", [10, 1000, 10_000, 600_001])
def test_the_engine_sends_what_the_formulas_say(group, count):
    n, nbytes = group.size, 4 * count
    group.barrier()
    before = group.counters()
    group.allreduce(np.ones(count, "f4"))
    after = group.counters()
    name = cost.chosen(n, nbytes)
    load = (
        cost.short(n, nbytes)
        if name == cost.SHORT
        else cost.header_exchange(n) + cost.ALGORITHMS[name](n, nbytes)
    )
    busiest, most = group.allgather_object((after.messages - before.messages, after.bytes - before.bytes)), 0
    assert max(messages for messages, _ in busiest) == load.messages
    most = max(sent for _, sent in busiest)
    grain = 64 * n  # parts begin at multiples of 16 elements
    if name != "recursive_halving":  # with which some ranks send more than others where n is no power of two
        assert abs(most - load.rank_bytes) <= 24 * load.messages + 2 * grain * cost.windows(n, nbytes)
    assert load.rank_bytes - grain <= most + 24 * load.messages
    assert most <= 2 * nbytes + 24 * load.messages or name != "recursive_halving"
