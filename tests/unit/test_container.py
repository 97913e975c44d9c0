"""Parts of data: together everything once, read only when asked for."""

import dataclasses
import types
from typing import NamedTuple

import numpy as np
import pytest
import samestep as ss
from hypothesis import given
from hypothesis import strategies as st
from samestep.data.rows import part_of


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
            for index in (outside, np.int8(outside), [0, outside], np.array([outside], np.int8)):
                with pytest.raises(IndexError, match=f"{outside} is out of range .* {len(part)} items"):
                    part[index]


INDICES = {
    "mask": lambda n: np.arange(n) % 2 == 1,
    "list of bools": lambda n: [i == n - 1 for i in range(n)],
    "all False": lambda n: np.zeros(n, bool),
    "uint8": lambda n: np.array([1, 0, 1], np.uint8)[:n],
    "uint64": lambda n: np.arange(n, dtype=np.uint64)[::-1],
    "negative int8": lambda n: -np.arange(1, n + 1, dtype=np.int8),
    "list": lambda n: list(range(-n, n)),
    "range": lambda n: range(n - 1, -1, -2),
    "empty list": lambda n: [],
    "NumPy int": lambda n: np.int16(-1),
    "array without dimensions": lambda n: np.array(0),
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_an_index_gives_what_numpy_gives_for_the_part(index, size):
    data = np.arange(600).reshape(300, 2)
    for part in parts(data, size):
        where = index(len(part))
        np.testing.assert_array_equal(part[where], data[part.indices.start : part.indices.stop][where])


@pytest.mark.parametrize(
    "index",
    [0.0, [0.0], np.array([0.9]), (0, 1), (), [[0]], np.array([[0, 1]]), ["0"], "0", None, ..., True, [None]],
    ids=str,
)
def test_other_indices_are_refused(index):
    for part in parts(np.arange(8).reshape(4, 2), 2):
        with pytest.raises(TypeError, match="an int, a slice, a list or array of ints, or a boolean mask"):
            part[index]


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(IndexError, match="a mask of 4 for this rank's part of 2 items"):
        parts(np.arange(4), 2)[1][np.ones(4, bool)]


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


class Echo(Recorder):
    """A data set that gives an item for anything, also for what is no position."""

    def __getitem__(self, index):
        return index


def test_single_items_are_asked_for_where_lists_and_slices_need_not_mean_several():
    second = parts({"x": Echo(10), "y": list("abcdefghij")}, 2)[1]
    assert second[1:3] == {"x": [6, 7], "y": ["g", "h"]}
    assert second[[-1, 0]] == {"x": [9, 5], "y": ["j", "f"]}


def test_columns_in_columns():
    x, y = np.arange(10), np.arange(20).reshape(10, 2)
    second = parts(({"x": x, "pair": (x, y)}, y), 2)[1]
    item = second[0]
    assert item[0]["x"] == 5
    np.testing.assert_array_equal(item[0]["pair"][1], item[1])
    inputs, outputs = second[:]
    np.testing.assert_array_equal(inputs["pair"][1], outputs)


@dataclasses.dataclass
class Record:
    x: object


@pytest.mark.parametrize(
    ("data", "cure"),
    [
        ("abc", r"data of type str .*list\(data\)"),
        (("a.png", "b.png"), r"data\[0\] of type str"),
        ({"x": [1, 2], "name": "ab"}, r"data\['name'\] of type str"),
        ((1, 2, 3), r"data\[0\] of type int .*a list of items"),
        (types.MappingProxyType({"x": [1, 2]}), r"dict\(data\)"),
        (Record([1, 2]), r"vars\(data\)"),
        ({"x": [1, 2], "y": {"a": [1, 2], "b": [3]}}, r"columns of data\['y'\] differ .*'a': 2, 'b': 1"),
    ],
    ids=["text", "names", "text beside", "numbers", "mapping", "dataclass", "ragged inside"],
)
def test_what_has_no_rows_by_position_is_refused(data, cure):
    backend = types.SimpleNamespace(rank=0, size=1)
    for call in (ss.DistributedDataContainer, ss.DistributedSampler):
        if isinstance(data, Record) and call is ss.DistributedSampler:
            continue  # it has no length
        with pytest.raises(ss.InvalidArgumentError, match=f"{call.__name__}: .*{cure}"):
            call(backend, data)


def test_a_list_of_long_columns_is_warned_about_and_of_rows_is_not():
    x, y = np.arange(40).reshape(20, 2), np.arange(20)
    with pytest.warns(UserWarning, match="these 2 arrays of equal length are 2 items; .*a tuple or a dict"):
        (part,) = parts([x, y], 1)
    assert len(part) == 2
    parts([x, y[:-1]], 1)
    parts(list(x), 1)
    parts((x, y), 1)


@pytest.mark.parametrize("call", [ss.DistributedDataContainer, ss.DistributedSampler])
def test_the_backend_is_missing(call):
    for arguments in ([[1, 2, 3]], [np.arange(3)], [5, types.SimpleNamespace(rank=0, size=1)]):
        with pytest.raises(TypeError, match=rf"{call.__name__}\(backend, data\) with backend = samestep"):
            call(*arguments)


@pytest.mark.parametrize("data", [iter([1, 2]), 3, np.array(1.0), {1, 2}])
def test_data_without_length_or_items(data):
    with pytest.raises(ss.InvalidArgumentError, match=r"no length or no items.*split_dataset_by_node"):
        parts(data, 2)


def test_columns_must_be_of_one_length():
    with pytest.raises(ss.InvalidArgumentError, match="'x': 3, 'y': 2"):
        parts({"x": [1, 2, 3], "y": [1, 2]}, 2)
