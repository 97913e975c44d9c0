"""Every memory layout gives the right answer, and no byte outside the array is written."""

import layouts
import numpy as np
import pytest
from reference import assert_same, reduced, values

pytestmark = pytest.mark.ranks(1, 2, 3)

NAMES = ["float32", "bfloat16", "complex128", "int8"]
SHAPES = [(4, 3), (1, 5), (0, 4), (120, 130)]


def inputs_of(group, shape, name):
    return [values(rank, shape, name) for rank in range(group.size)]


@pytest.fixture(params=layouts.WRITABLE, ids=lambda f: f.__name__)
def lay(request, tmp_path):
    return lambda array: request.param(array, tmp_path)


@pytest.fixture(params=layouts.READ_ONLY, ids=lambda f: f.__name__)
def lay_read_only(request, tmp_path):
    return lambda array: request.param(array, tmp_path)


def cases():
    return [(name, shape) for name in NAMES for shape in SHAPES]


def test_allreduce_in_place(group, lay):
    for name, shape in cases():
        inputs = inputs_of(group, shape, name)
        x = lay(inputs[group.rank])
        assert group.allreduce(x.array) is x.array
        assert_same(np.asarray(x.array), reduced(inputs, "sum"), f"{name} {shape}")
        x.untouched()


def test_allreduce_into_out(group, lay):
    for name, shape in cases():
        inputs = inputs_of(group, shape, name)
        x, out = inputs[group.rank].copy(), lay(np.zeros_like(inputs[0]))
        assert group.allreduce(x, out=out.array) is out.array
        assert_same(np.asarray(out.array), reduced(inputs, "sum"), f"{name} {shape}")
        assert_same(x, inputs[group.rank], "the input")
        out.untouched()


def test_read_only_arrays_are_left_and_a_new_one_is_returned(group, lay_read_only):
    for name, shape in cases():
        if 0 in shape:
            continue
        inputs = [np.broadcast_to(a[:1], shape) for a in inputs_of(group, shape, name)]
        x = lay_read_only(inputs[group.rank]).array
        got = group.allreduce(x)
        assert got is not x
        assert_same(np.asarray(got), reduced(inputs, "sum"), f"{name} {shape}")
        assert_same(np.asarray(x), inputs[group.rank], "the input")


def test_bcast(group, lay):
    root = group.size - 1
    for name, shape in cases():
        inputs = inputs_of(group, shape, name)
        x = lay(inputs[group.rank])
        assert group.bcast(x.array, root=root) is x.array
        assert_same(np.asarray(x.array), inputs[root], f"{name} {shape}")
        x.untouched()


def test_reduce_writes_at_root_only(group, lay):
    root = group.size - 1
    for name, shape in cases():
        inputs = inputs_of(group, shape, name)
        x = lay(inputs[group.rank])
        group.reduce(x.array, root=root)
        expected = reduced(inputs, "sum") if group.rank == root else inputs[group.rank]
        assert_same(np.asarray(x.array), expected, f"{name} {shape}")
        x.untouched()


def test_as_input_of_what_returns_new_arrays(group, lay):
    n = group.size
    for name in NAMES:
        inputs = inputs_of(group, (n, 6), name)
        x = lay(inputs[group.rank]).array
        assert_same(group.allgather(x), np.stack(inputs), "allgather")
        assert_same(group.reduce_scatter(x), reduced(inputs, "sum")[group.rank], "reduce_scatter")
        assert_same(group.alltoall(x), np.stack([a[group.rank] for a in inputs]), "alltoall")
        got = group.gather(x, root=0)
        assert got is None if group.rank else np.array_equal(got, np.stack(inputs))


def test_as_out(group, lay):
    n, rank = group.size, group.rank
    for name in NAMES:
        inputs = inputs_of(group, (n, 6), name)
        out = lay(np.zeros_like(inputs[0]))
        assert group.alltoall(inputs[rank], out=out.array) is out.array
        assert_same(np.asarray(out.array), np.stack([a[rank] for a in inputs]), "alltoall")
        out.untouched()
        out = lay(np.zeros_like(inputs[0]))
        assert group.allgather(inputs[rank][0], out=out.array) is out.array
        assert_same(np.asarray(out.array), np.stack([a[0] for a in inputs]), "allgather")
        out.untouched()


def test_send_and_recv(group, lay):
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for name, shape in cases():
        inputs = inputs_of(group, shape, name)
        sent, out = lay(inputs[group.rank]), lay(np.zeros_like(inputs[0]))
        work = group.isend(sent.array, right)
        group.recv(out.array, left)
        assert_same(np.asarray(out.array), inputs[left], f"{name} {shape}")
        out.untouched()
        work.wait()


@pytest.mark.parametrize("order", ["C", "F"])
def test_ranks_may_use_different_layouts(group, order):
    inputs = inputs_of(group, (5, 7), "float64")
    x = np.asarray(inputs[group.rank], order=order if group.rank == 0 else "C")
    x = np.array(x, order=order if group.rank == 0 else "C")
    group.allreduce(x)
    assert_same(x, reduced(inputs, "sum"))


def test_0d_arrays(group):
    x = np.array(group.rank + 1.0)
    assert group.allreduce(x) is x
    assert x == group.size * (group.size + 1) / 2
    assert_same(group.allgather(np.array(group.rank)), np.arange(group.size))
    y = np.array(group.rank)
    assert group.bcast(y, root=group.size - 1) is y
    assert y == group.size - 1


def test_a_part_of_an_array_that_overlaps_another_operation_before(group):
    x = np.arange(10.0)
    group.allreduce(x[:5])
    group.allreduce(x[3:8])
    n = group.size
    assert_same(x, np.array([0, n, 2 * n, 3 * n * n, 4 * n * n, 5 * n, 6 * n, 7 * n, 8, 9.0]))
