"""Containers and samplers over the tables and arrays of other libraries: rows by position, or a refusal."""

import types

import numpy as np
import pytest
import samestep as ss

VALUES = np.arange(12) * 10
ORDER = np.random.default_rng(0).permutation(12)


def ranks(size):
    return [types.SimpleNamespace(rank=rank, size=size) for rank in range(size)]


def series():
    return pytest.importorskip("pandas").Series(VALUES)


DATA = {
    "a shuffled Series": lambda: series().iloc[ORDER],
    "a filtered Series": lambda: series()[series() % 20 == 0],
    "a shuffled Index": lambda: pytest.importorskip("pandas").Index(VALUES[ORDER]),
    "a Series of polars": lambda: pytest.importorskip("polars").Series(VALUES),
    "an Array of pyarrow": lambda: pytest.importorskip("pyarrow").array(VALUES),
    "a DataArray": lambda: pytest.importorskip("xarray").DataArray(VALUES, coords={"row": ORDER}, dims="row"),
    "jax": lambda: pytest.importorskip("jax").numpy.array(VALUES),
    "memoryview": lambda: memoryview(VALUES),
}


def numbers(rows):
    return [getattr(row, "as_py", lambda row=row: int(row))() for row in rows]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("make", DATA.values(), ids=DATA)
def test_item_i_is_row_i_beside_an_array(make, size):
    x = make()
    y = np.array(x) + 1
    for backend in ranks(size):
        part = ss.DistributedDataContainer(backend, {"x": x, "y": y})
        assert [value + 1 for value in numbers(item["x"] for item in part)] == [item["y"] for item in part]
        for index in (slice(None), slice(1, 4), [0, -1], np.arange(len(part)) % 2 == 0):
            if isinstance(x, memoryview) and not isinstance(index, slice):
                continue  # it takes slices alone, and says so
            rows = part[index]
            assert [value + 1 for value in numbers(rows["x"])] == list(rows["y"])
        assert ss.DistributedSampler(backend, {"x": x, "y": y}).n_items == len(y)


def test_rows_of_a_data_frame():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": VALUES, "b": VALUES + 1}).iloc[ORDER]
    part = ss.DistributedDataContainer(ranks(2)[1], frame)
    assert [(row["a"], row["b"]) for row in part] == [(v, v + 1) for v in VALUES[ORDER][6:]]
    assert part[2:4]["a"].tolist() == VALUES[ORDER][8:10].tolist()
    assert part[[0, -1]]["b"].tolist() == (VALUES[ORDER][[6, 11]] + 1).tolist()
    assert ss.DistributedSampler(ranks(1)[0], frame).n_items == 12


@pytest.mark.parametrize("layout", ["csr_array", "csc_array", "csr_matrix", "lil_array"])
def test_rows_of_a_sparse_matrix(layout):
    dense = np.diag(np.arange(1, 6))
    data = getattr(pytest.importorskip("scipy.sparse"), layout)(dense)
    part = ss.DistributedDataContainer(ranks(2)[1], data)
    assert len(part) == 2
    np.testing.assert_array_equal(np.ravel(part[0].toarray()), dense[3])
    np.testing.assert_array_equal(part[:].toarray(), dense[3:])
    np.testing.assert_array_equal(part[[1, 0]].toarray(), dense[[4, 3]])


def test_rows_of_a_file(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = VALUES
        part = ss.DistributedDataContainer(ranks(2)[1], file["x"])
        assert list(part) == part[:].tolist() == VALUES[6:].tolist()
        assert part[[0, 2]].tolist() == [60, 80]
        with pytest.raises(TypeError, match="increasing order"):
            part[[2, 0]]
        with pytest.raises(ss.InvalidArgumentError, match=r"dict\(data\)"):
            ss.DistributedDataContainer(ranks(2)[1], file)
        assert ss.DistributedDataContainer(ranks(2)[1], dict(file))[0]["x"] == 60


TABLES = {
    "pyarrow": lambda: pytest.importorskip("pyarrow").table({"a": VALUES, "b": VALUES}),
    "record batch": lambda: pytest.importorskip("pyarrow").record_batch({"a": VALUES}),
    "polars": lambda: pytest.importorskip("polars").DataFrame({"a": VALUES}),
    "xarray": lambda: pytest.importorskip("xarray").Dataset({"a": ("row", VALUES), "b": ("row", VALUES)}),
}


@pytest.mark.parametrize("call", [ss.DistributedDataContainer, ss.DistributedSampler])
@pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)
def test_tables_that_give_columns_are_refused(make, call):
    for data in (make(), {"x": VALUES, "table": make()}):
        with pytest.raises(ss.InvalidArgumentError, match=r"to_pydict\(\)|dict\(data\)"):
            call(ranks(1)[0], data)
