"""A state is put into arrays that the program knows, whatever shares memory."""

import itertools

import numpy as np
import pytest
from samestep.trees.fill import fill

SHARED = [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1], [0, 1, 2]]  # which of three leaves are one array


@pytest.mark.parametrize(("before", "after"), [*itertools.product(SHARED, SHARED)])
def test_values_and_sharing_are_those_of_the_new_state(before, after):
    arrays, values = [np.zeros(2) for _ in range(3)], [np.full(2, i + 1.0) for i in range(3)]
    old = {"a": [arrays[before[0]], arrays[before[1]]], "b": arrays[before[2]]}
    new = {"a": [values[after[0]], values[after[1]]], "b": values[after[2]]}
    filled = fill(old, new)
    leaves = [*filled["a"], filled["b"]]
    assert [leaf.tolist() for leaf in leaves] == [[i + 1.0] * 2 for i in after]
    for i, j in itertools.combinations(range(3), 2):
        assert (leaves[i] is leaves[j]) == (after[i] == after[j])
    assert leaves[0] is arrays[before[0]]  # as the program knows it


def test_views_of_one_array():
    flat, other = np.zeros(4), np.zeros(2)
    part, twin = flat[:2], other[:]
    filled = fill({"flat": flat, "part": part}, {"flat": np.arange(4.0), "part": np.arange(2.0)})
    assert filled["flat"] is flat
    assert filled["part"] is part
    assert flat.tolist() == [0, 1, 2, 3]
    filled = fill({"w": other, "before": twin}, {"w": np.ones(2), "before": np.array([2.0, np.nan])})
    assert filled["w"].tolist() == [1, 1]
    assert filled["before"].tolist() == pytest.approx([2, np.nan], nan_ok=True)


def test_what_cannot_be_filled_is_replaced():
    old = {"a": np.zeros(2), "b": np.zeros(2), "c": 1, "d": np.zeros(3), "e": None, "f": np.zeros(2)}
    old["a"].flags.writeable = False
    new = {
        "a": np.ones(2),
        "b": np.ones(2, "f4"),
        "c": np.ones(1),
        "d": np.float32(2),
        "e": np.ones(2),
        "f": None,
    }
    filled = fill(old, new)
    assert all(filled[name] is new[name] for name in new)
    assert not old["b"].any()


def test_torch():
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        flags = {"dtype": dtype, "requires_grad": dtype.is_floating_point}
        w, scalar = torch.zeros(2, 3, dtype=dtype).T, torch.zeros((), **flags)
        filled = fill(
            {"w": [w], "s": scalar}, {"w": [torch.ones(3, 2, dtype=dtype)], "s": torch.ones((), **flags)}
        )
        assert filled["w"][0] is w
        assert filled["s"] is scalar
        assert w.bool().all()
        assert scalar.item() == 1
