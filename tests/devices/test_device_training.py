"""Trees, lists and helpers for training, on device memory."""

import fake_arrays
import numpy as np
import pytest
import samestep as ss
from samestep import _core

pytestmark = pytest.mark.ranks(1, 2, 3, backends=["fakes", "staged"])

SHAPES = [(3,), (2, 5), (), (1000,), (7, 1, 3), (300_000,)]


@pytest.fixture
def stream(group):
    return fake_arrays.Stream()  # on the device of this rank, which the group has chosen


def leaves_of(rank, dtype="float32"):
    return [np.full(shape, rank + i + 1, dtype) for i, shape in enumerate(SHAPES)]


def test_a_tree_is_reduced_in_place_and_fused(group, stream):
    tree = {f"leaf{i}": fake_arrays.Array.of(x, stream) for i, x in enumerate(leaves_of(group.rank))}
    tree |= {"whole": fake_arrays.Array.of(np.full(4, group.rank, "int64"), stream), "host": np.full(3, 2.0)}
    got = group.allreduce_tree(tree, "avg")
    n = group.size
    for i, shape in enumerate(SHAPES):
        assert got[f"leaf{i}"] is tree[f"leaf{i}"]
        expected = np.full(shape, np.float32(sum(r + i + 1 for r in range(n))) * np.float32(1 / n), "float32")
        np.testing.assert_array_equal(got[f"leaf{i}"].get(), expected)
    np.testing.assert_array_equal(got["whole"].get(), np.full(4, sum(range(n)) // n))
    np.testing.assert_array_equal(got["host"], np.full(3, 2.0))


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_leaves_have_no_least_and_no_greatest(group, stream, op, dtype):
    """By all ranks, as in host memory; NCCL would compare the parts."""
    values = np.array([1 + 1j, 2 - 3j]) * (group.rank + 1)
    x = fake_arrays.Array.of(values.astype(dtype), stream)
    for call in (group.allreduce_tree, lambda tree, op: ss.allreduce_gradients(group, tree, op)):
        with pytest.raises(ss.InvalidArgumentError, match=f"{op} does not fit {dtype}"):
            call({"x": x, "y": fake_arrays.Array.of(np.ones(3), stream)}, op)
    np.testing.assert_array_equal(x.get(), values)
    group.barrier()


def test_a_tree_is_synchronized(group, stream):
    root = group.size - 1
    tree = [fake_arrays.Array.of(x, stream) for x in leaves_of(group.rank)]
    tree += [fake_arrays.Array.of(np.full(5, group.rank, "int16"), stream), group.rank]
    got = ss.synchronize(group, tree, root=root)
    for array, expected in zip(got, leaves_of(root), strict=False):
        np.testing.assert_array_equal(array.get(), expected)
    np.testing.assert_array_equal(got[-2].get(), np.full(5, root))
    assert got[-1] == root


def test_gradients_that_some_ranks_lack_count_as_zeros(group, stream):
    mine = fake_arrays.Array.of(np.full(6, 3.0), stream) if group.rank == 0 else None
    got = ss.allreduce_gradients(group, {"a": mine}, "sum")["a"]
    np.testing.assert_array_equal(got.get() if mine else got.numpy(), np.full(6, 3.0))


def test_mixed_kinds_of_memory_between_sender_and_receiver(group, stream):
    if group.size == 1:
        return
    if group.rank == 0:
        group.send(np.arange(50.0), 1, tag=3)
        group.send(fake_arrays.Array.of(np.arange(9.0), stream), 1, tag=4)
    if group.rank == 1:
        later, first = np.empty(9), fake_arrays.Array((50,), "float64", stream)
        assert group.recv(later, 0, 4).count == 9
        assert group.recv(first, ss.ANY, ss.ANY).tag == 3
        np.testing.assert_array_equal(later, np.arange(9.0))
        np.testing.assert_array_equal(first.get(), np.arange(50.0))


def test_new_arrays_can_be_taken_over_by_dlpack(group, stream):
    got = group.allgather(fake_arrays.Array.of(np.arange(6, dtype="int32").reshape(2, 3), stream))
    assert got.__dlpack_device__() == (2, group.device)
    again = _core.view_info(got)
    assert again[0:2] == ("int32", (group.size, 2, 3))
    del again
    capsule = got.__dlpack__(max_version=(1, 0))
    assert "dltensor_versioned" in repr(capsule)
    assert '"dltensor"' in repr(got.__dlpack__())


def test_the_driver_of_a_copy_is_the_array_s_stream(group, stream):
    x = fake_arrays.Array.of(np.arange(10.0), stream)
    stream.delay(20_000)
    x.set(np.arange(10.0) + 1)
    host = np.empty(10)
    _core.pack([x], host.view(np.uint8))
    np.testing.assert_array_equal(host, np.arange(10.0) + 1)


def test_gaps_in_device_memory_are_refused(group, stream):
    class Strided:
        def __init__(self, array):
            self.array = array
            self.__cuda_array_interface__ = {
                **array.__cuda_array_interface__,
                "shape": (3,),
                "strides": (16,),
            }

    with pytest.raises(ss.InvalidArgumentError, match="contiguous"):
        group.allreduce(Strided(fake_arrays.Array.of(np.arange(6.0), stream)))
