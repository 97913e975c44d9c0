"""All ranks hold the same bits, or the leaf and the ranks that differ are named."""

import functools
from typing import NamedTuple

import numpy as np
import pytest
import samestep as ss

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def tree():
    return {
        "w": np.arange(70_001, dtype="f4"),
        "b": [np.arange(12.0).reshape(3, 4).T, np.zeros((0, 3)), None],
        "rate": 0.5,
        "name": "sgd",
        "flag": np.array(True),
    }


def changed(rank, group, change):
    mine = tree()
    if group.rank == rank:
        change(mine)
    return mine


def test_equal_trees_have_one_hash_at_any_size(group):
    alone = group.group([group.rank])
    assert group.same(tree()) == alone.same(tree())
    assert len(group.same(tree())) == 32
    assert ss.same(group, {}) == ss.same(alone, {})


def test_every_change_gives_another_hash(group):
    alone = group.group([group.rank])
    seen = {alone.same(tree())}

    def add(change):
        mine = tree()
        change(mine)
        seen.add(alone.same(mine))

    add(lambda t: t["w"].__setitem__(slice(0, 2), [1, 0]))  # exchanged
    add(lambda t: t["w"].__setitem__(0, -0.0))
    add(lambda t: t.update(w=t["w"].astype("f8")))
    add(lambda t: t.update(w=t["w"].reshape(1, -1)))
    add(lambda t: t.update(v=t.pop("w")))
    add(lambda t: t["b"].__setitem__(1, np.zeros((3, 0))))
    add(lambda t: t["b"].__setitem__(0, t["b"][0][::-1]))
    add(lambda t: t.update(rate=0.25))
    add(lambda t: t.update(name="adam"))
    add(lambda t: t.update(flag=np.array(False)))
    assert len(seen) == 11


def test_layout_in_memory_does_not_matter(group):
    plain = np.arange(12.0).reshape(3, 4)
    assert group.same([plain]) == group.same([np.asfortranarray(plain)])
    assert group.same([plain]) == group.same([np.repeat(plain, 2, axis=1)[:, ::2]])


def test_the_differing_leaf_and_ranks_are_named_on_all_ranks(group):
    if group.size == 1:
        return
    last = group.size - 1
    mine = changed(last, group, lambda t: t["w"].__setitem__(70_000, 0))
    names = {
        2: r"leaf \['w'\] differs between ranks 0-1$",
        3: r"leaf \['w'\] of rank 2 differs from that of ranks 0-1$",
        4: r"leaf \['w'\] of rank 3 differs from that of ranks 0-2$",
    }
    with pytest.raises(ss.MismatchError, match=names[group.size]):
        group.same(mine)
    assert group.same(tree())


def test_differing_structure_is_named(group):
    if group.size == 1:
        return
    with pytest.raises(ss.MismatchError, match=r"leaf \['w'\] is float32 \(70001,\) on rank"):
        group.same(changed(1, group, lambda t: t.update(w=np.zeros(3))))
    with pytest.raises(ss.MismatchError, match=r"leaf \['b'\]\[0\].*; so do leaf \['name'\].*, of 7 leaves"):
        group.same(
            changed(1, group, lambda t: (t["b"][0].__setitem__((0, 0), 9), t.update(rate=1.5, name="x")))
        )


class SGD(NamedTuple):
    """A pair of functions as in optax."""

    init: object = lambda params: ()
    update: object = lambda grads, state, params=None: ([-0.1 * g for g in grads], state)


def test_verify_names_the_steps_between_which_ranks_began_to_differ(group, monkeypatch):
    monkeypatch.setenv("SAMESTEP_VERIFY", "2")
    opt = ss.DistributedOptimizer(group, SGD())
    params = [np.zeros(3)]

    def step():
        opt.update([np.ones(3)], (), params)

    for _ in range(3):
        step()
    if group.rank == group.size - 1:
        params[0][1] = 1e-300
    step()  # the third: not compared
    if group.size == 1:
        step()
        return
    with pytest.raises(ss.MismatchError, match=r"before step 4 of DistributedOptimizer; equal before step 2"):
        step()


def test_verify_has_to_be_a_number_of_steps(group, monkeypatch):
    monkeypatch.setenv("SAMESTEP_VERIFY", "often")
    if group.size > 1:
        with pytest.raises(
            ss.InvalidArgumentError, match="SAMESTEP_VERIFY must be a number of steps, got 'often'"
        ):
            ss.DistributedOptimizer(group, SGD())


def schedule(*captured, default=None, keyword=None):
    def rate(step, scale=default, *, least=keyword):
        return captured, step, scale, least

    return rate


FUNCTIONS = {
    "what they have captured": (schedule(0.1), schedule(0.2)),
    "functions that they have captured": (schedule(schedule(1)), schedule(schedule(2))),
    "arrays that they have captured": (schedule(np.ones(2)), schedule(np.zeros(2))),
    "defaults": (schedule(default=0.1), schedule(default=0.2)),
    "defaults of keywords": (schedule(keyword="a"), schedule(keyword="b")),
    "in a partial": (functools.partial(schedule(1), 2), functools.partial(schedule(2), 2)),
}


@pytest.mark.parametrize("what", FUNCTIONS)
def test_functions_differ_by_what_they_hold(group, what):
    one, other = FUNCTIONS[what]
    assert len({*group.allgather_object(group.same({"k": one}))}) == 1
    alone = group.group([group.rank])
    assert alone.same({"k": one}) != alone.same({"k": other})
    if group.size > 1:
        with pytest.raises(ss.MismatchError, match=r"leaf \['k'\]"):
            group.same({"k": one if group.rank else other})


def test_functions_that_hold_what_cannot_be_compared_are_refused(group):
    def itself():
        return itself

    for leaf in (schedule(object()), itself):
        with pytest.raises(ss.InvalidArgumentError, match=r"same\(\).*leaf \['k'\].* ranks cannot compare"):
            group.same({"k": leaf})


@pytest.mark.ranks(2)
def test_a_comparison_that_one_rank_alone_was_told_to_make_is_named(group, monkeypatch):
    if group.rank == 1:
        monkeypatch.setenv("SAMESTEP_VERIFY", "1")
    opt = ss.DistributedOptimizer(group, SGD())
    with pytest.raises(ss.MismatchError, match=r"rank 1: same\(\) of SAMESTEP_VERIFY"):
        opt.update([np.ones(3)], (), [np.ones(3)])
