"""Leaves that share memory: views of the same elements count once, others that are written are refused by all ranks."""

import numpy as np
import pytest
import samestep as ss

pytestmark = pytest.mark.ranks(1, 2, 3)

SIDES = [1, 5, 300]  # in a bucket; the last one is so long that it is sent as it lies


def square(rank, side):
    return (np.arange(side * side, dtype=float).reshape(side, side) + 1) * (rank + 1)


def total(group, side):
    return sum(square(rank, side) for rank in range(group.size))


def frozen(x):
    view = x.view()
    view.flags.writeable = False
    return view


SAME = {
    "transposed": lambda w: [w, w.T],
    "first the transposed": lambda w: [w.T, w],
    "reshaped": lambda w: [w, w.reshape(-1), w],
    "reversed": lambda w: [w, w[::-1], w[:, ::-1]],
    "strided": lambda w: [w[:, ::2], w.T[::2], w[::-1, ::2]],
    "twice": lambda w: [w, w[:]],
}
DISJOINT = {
    "slices": lambda w: [w.reshape(-1)[:7], w.reshape(-1)[7:]],
    "interleaved": lambda w: [w.reshape(-1)[::2], w.reshape(-1)[1::2]],
    "columns": lambda w: [w[:, :2], w[:, 3:], w[:, 2:3]],
    "only read": lambda w: [frozen(w), frozen(w.T), frozen(w)[:1], np.broadcast_to(w, (2, *w.shape))],
    "empty": lambda w: [w, w[:0]],
}
PART = {
    "slices": lambda w: [w.reshape(-1)[:4], w.reshape(-1)[3:]],
    "the whole and a row": lambda w: [w[1], w],
    "columns": lambda w: [w[:, :3], w[:, 4:], w[:, 2:4]],
    "another type": lambda w: [w, w.view("i8")],
    "halves of numbers": lambda w: [w.view("c16"), w.view("c16").real] if w.size % 2 == 0 else [w, w[0]],
    "crossed": lambda w: [w[::2], w[:, ::2]],
}
READ = {
    "a frozen view": lambda w: [w, frozen(w)],
    "a frozen transposed view": lambda w: [frozen(w.T), w],
    "a repeated view": lambda w: [w, np.broadcast_to(w, (2, *w.shape))],
}


def reduced(group, make, side, **options):
    """Of views of a square: what the reduction makes of them, and of those of the sum."""
    mine = make(square(group.rank, side))
    got = group.allreduce_tree({str(i): leaf for i, leaf in enumerate(mine)}, **options)
    return mine, list(got.values()), [np.array(leaf) for leaf in make(total(group, side))]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", SAME)
def test_views_of_the_same_elements_are_reduced_once(group, name, side):
    mine, got, expected = reduced(group, SAME[name], side)
    for before, after, want in zip(mine, got, expected, strict=True):
        np.testing.assert_array_equal(after, want)
        assert np.shares_memory(before, after)
    mine, got, expected = reduced(group, SAME[name], side, op="avg", weight=2)
    for after, want in zip(got, expected, strict=True):
        np.testing.assert_array_equal(after, want / group.size)


@pytest.mark.parametrize("side", SIDES[1:])
@pytest.mark.parametrize("name", DISJOINT)
def test_leaves_without_a_common_element_that_is_written_are_as_any(group, name, side):
    _, got, expected = reduced(group, DISJOINT[name], side)
    for after, want in zip(got, expected, strict=True):
        np.testing.assert_array_equal(after, want)


@pytest.mark.parametrize("side", SIDES[1:])
@pytest.mark.parametrize("name", [*PART, *READ])
def test_leaves_that_share_some_elements_are_refused(group, name, side):
    """Before anything is written, and the group can be used afterwards."""
    whole = square(group.rank, side)
    leaves = {**PART, **READ}[name](whole)
    with pytest.raises(ss.InvalidArgumentError, match=r"leaf \[\d\] and leaf \[\d\] share memory"):
        group.allreduce_tree(leaves)
    np.testing.assert_array_equal(whole, square(group.rank, side))
    if name in PART:
        with pytest.raises(ss.InvalidArgumentError, match=r"leaf \[\d\] and leaf \[\d\] share memory"):
            group.allreduce_gradients(leaves, weight=1)
        np.testing.assert_array_equal(whole, square(group.rank, side))
    assert group.allreduce(np.ones(1))[0] == group.size


@pytest.mark.parametrize("side", SIDES[1:])
@pytest.mark.parametrize("call", ["allreduce_tree", "synchronize"])
@pytest.mark.parametrize("name", [*PART, "transposed", "folded"])
def test_ranks_that_share_memory_differently_all_get_an_error(group, name, side, call):
    make = {**PART, **SAME, "folded": lambda w: [np.lib.stride_tricks.as_strided(w, w.shape, (0, 8))]}[name]
    if group.size == 1:
        return
    mine = make(square(group.rank, side))
    if group.rank == group.size - 1:
        mine = [leaf.copy() for leaf in mine]
    with pytest.raises(ss.MismatchError, match=r"leaf \[\d\] is "):
        group.allreduce_tree(mine) if call == "allreduce_tree" else ss.synchronize(group, mine)
    assert group.allreduce(np.ones(1))[0] == group.size


@pytest.mark.parametrize("name", ["slices", "transposed", "folded"])
def test_where_a_rank_has_none_all_get_the_error(group, name):
    make = {
        **PART,
        **SAME,
        "folded": lambda w: [w, np.lib.stride_tricks.as_strided(w.copy(), w.shape, (0, 8))],
    }[name]
    mine = make(square(group.rank, 5))
    if group.size > 1 and group.rank == 0:
        mine = [None] * len(mine)
    if group.size == 1 and name == "transposed":
        return
    with pytest.raises(ss.InvalidArgumentError, match="pass a copy"):
        group.allreduce_tree(mine)
    assert group.allreduce(np.ones(1))[0] == group.size


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", [*SAME, *PART])
def test_synchronize_makes_leaves_that_share_memory_equal_to_roots(group, name, side):
    """Where all ranks share the same elements: each gets root's value, however often it is written."""
    if side == 1 and name in PART:
        return
    mine = {**SAME, **PART}[name](square(group.rank, side))
    root = {**SAME, **PART}[name](square(group.size - 1, side))
    got = ss.synchronize(group, list(mine), root=group.size - 1)
    for before, after, want in zip(mine, got, root, strict=True):
        np.testing.assert_array_equal(after, want)
        assert np.shares_memory(before, after)


@pytest.mark.parametrize("call", ["sum", "weight", "synchronize"])
@pytest.mark.parametrize("side", SIDES[1:])
def test_an_array_whose_own_elements_share_memory_is_refused(group, side, call):
    first, base = np.ones(3), np.ones(side)
    tree = [first, np.lib.stride_tricks.as_strided(base, (side, side), (0, 8))]
    calls = {
        "sum": lambda: group.allreduce_tree(tree),
        "weight": lambda: group.allreduce_tree(tree, "avg", weight=1),
        "synchronize": lambda: ss.synchronize(group, tree),
    }
    with pytest.raises(ss.InvalidArgumentError, match=r"elements of leaf \[1\] share memory"):
        calls[call]()
    np.testing.assert_array_equal(first, 1)
    assert group.allreduce(np.ones(1))[0] == group.size


def test_a_weighted_mean_where_one_rank_has_one_array_and_another_two(group):
    """Each leaf gets its own mean: a new array if the array of the tree holds another one."""
    one, other = np.full(3, float(group.rank)), np.full(3, 10.0)
    tree = [one, one] if group.rank == 0 else [one, other]
    got = group.allreduce_tree(tree, "avg", weight=1)
    np.testing.assert_array_equal(got[0], sum(range(group.size)) / group.size)
    np.testing.assert_array_equal(got[1], 10.0 * (group.size - 1) / group.size)


def test_tensors_of_torch(group):
    torch = pytest.importorskip("torch")
    for side in SIDES:
        weight = torch.from_numpy(square(group.rank, side))
        got = group.allreduce_gradients({"dec": weight.t(), "enc": weight}, "sum")
        np.testing.assert_array_equal(got["enc"], total(group, side))
        np.testing.assert_array_equal(got["dec"], total(group, side).T)
    for leaf in (torch.ones(1).expand(5), torch.ones(1).expand(300_000)):
        with pytest.raises(ss.InvalidArgumentError, match=r"elements of leaf \['x'\] share memory"):
            group.allreduce_gradients({"a": torch.ones(2), "x": leaf})


def test_many_columns_of_one_matrix(group):
    matrix = np.arange(40.0 * 3).reshape(3, 40) * (group.rank + 1)
    columns = [matrix[:, i] for i in range(40)]
    got = group.allreduce_tree(columns)
    scale = group.size * (group.size + 1) / 2
    np.testing.assert_array_equal(np.stack(got, 1), np.arange(120.0).reshape(3, 40) * scale)
