"""Parts of data: together everything once, read only when asked for."""

import types
from typing import NamedTuple

import numpy as np
import pytest
import samestep as ss
from hypothesis import given
from hypothesis import strategies as st
from samestep.data.container import part_of


def parts(data, size):
    ranks = [types.SimpleNamespace(rank=rank, size=size) for rank in range(size)]
    return [ss.DistributedDataContainer(rank, data) for rank in ranks]


class Columns(NamedTuple):
    x: object
    y: object


class Recorder:
    """A data set that only knows single items, and remembers which were read."""

    def __init__(self, n_items):
        self.n_items, self.read = n_items, []

    def __len__(self):
        return self.n_items

    def __getitem__(self, index):
        if not 0 <= index < self.n_items:
            raise IndexError(index)
        self.read.append(index)
        return index * 10


@pytest.mark.parametrize("size", range(1, 17))
def test_parts_at_any_number_of_items_and_ranks(size):
    for n_items in range(65):
        ranges = [part_of(n_items, rank, size) for rank in range(size)]
        assert [i for part in ranges for i in part] == list(range(n_items))
        lengths = [len(part) for part in ranges]
        assert max(lengths) - min(lengths) <= 1
        assert lengths == sorted(lengths, reverse=True)


@given(st.integers(0, 40), st.integers(1, 9))
def test_the_union_of_all_parts_is_the_data_in_order(n_items, size):
    data = list(range(100, 100 + n_items))
    containers = parts(data, size)
    assert [item for part in containers for item in part] == data
    assert [part[i] for part in containers for i in range(len(part))] == data
    assert [item for part in containers for item in part[:]] == data


@given(st.integers(0, 20), st.integers(1, 4), st.slices(20))
def test_a_slice_is_the_slice_of_the_part(n_items, size, where):
    data = np.arange(n_items)
    for part in parts(data, size):
        np.testing.assert_array_equal(part[where], data[part.indices.start : part.indices.stop][where])


def test_negative_and_outside_indices():
    for part in parts([1, 2, 3, 4, 5], 2):
        assert part[-1] == part[len(part) - 1]
        for outside in (len(part), -len(part) - 1):
            with pytest.raises(IndexError):
                part[outside]


def test_columns_keep_their_container():
    x, y = np.arange(10).reshape(5, 2), list("abcde")
    second = parts({"x": x, "y": y}, 2)[1]
    np.testing.assert_array_equal(second[0]["x"], [6, 7])
    assert second[1]["y"] == "e"
    assert second[:]["y"] == ["d", "e"]
    assert type(parts((x, y), 2)[0][0]) is tuple
    assert parts(Columns(x, y), 2)[1][0].y == "d"


def test_slices_of_arrays_and_memmaps_are_views(tmp_path):
    array = np.arange(12.0)
    assert parts(array, 3)[1][1:].base is array
    np.save(tmp_path / "data.npy", array)
    mapped = np.load(tmp_path / "data.npy", mmap_mode="r")
    part = parts(mapped, 3)[2][:]
    assert isinstance(part, np.memmap)
    np.testing.assert_array_equal(part, array[8:])


def test_lists_of_indices_reach_into_the_part():
    second = parts(np.arange(10) * 10, 2)[1]
    np.testing.assert_array_equal(second[[0, -1, 2]], [50, 90, 70])
    np.testing.assert_array_equal(second[np.array([], int)], [])


def test_nothing_is_read_before_it_is_asked_for():
    data = Recorder(10)
    part = parts(data, 2)[1]
    assert len(part) == 5
    assert data.read == []
    assert part[2] == 70
    assert list(part) == [50, 60, 70, 80, 90]
    assert data.read == [7, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("data", [iter([1, 2]), 3, np.array(1.0), {1, 2}])
def test_data_without_length_or_items(data):
    with pytest.raises(ss.InvalidArgumentError, match=r"no length or no items.*split_dataset_by_node"):
        parts(data, 2)


def test_columns_must_be_of_one_length():
    with pytest.raises(ss.InvalidArgumentError, match="'x': 3, 'y': 2"):
        parts({"x": [1, 2, 3], "y": [1, 2]}, 2)
