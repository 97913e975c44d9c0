"""Calls from threads of the user, whose current device is device 0 until they select another."""

from __future__ import annotations

import sys
import threading

import fake_arrays
import numpy as np
import pytest
import real_libraries
import samestep as ss
from samestep import arrays

ranks = pytest.mark.ranks(2, 3, backends=["fakes", "staged-native"])
KINDS = [fake_arrays.Array, fake_arrays.ConvertingArray]
kinds = pytest.mark.parametrize("kind", KINDS, ids=["unknown library", "CuPy"])


@pytest.fixture(autouse=True)
def _has_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_arrays.cupy())


def in_thread(act):
    """What `act` returns in a new thread, which stays on its device."""
    found = []

    def run():
        try:
            before = fake_arrays.current_device()
            found.append(act())
            assert fake_arrays.current_device() == before == 0
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[-1], BaseException):
        raise found[-1]
    return found[0]


def array(kind, group, *shape):
    return kind.of(np.full(shape, group.rank + 1.0, "float32"), fake_arrays.Stream())


def check(group, result, expected):
    """The elements, and that they are on the group's device."""
    assert arrays.device_of(result) == group.device
    values = result.get() if isinstance(result, fake_arrays.Array) else result.numpy()
    np.testing.assert_array_equal(values, expected)


def of_ranks(group, *shape):
    return np.stack([np.full(shape, rank + 1.0, "float32") for rank in range(group.size)])


@ranks
@kinds
def test_new_results_are_on_the_device_of_the_input(group, kind):
    if real_libraries.wanted():
        real_libraries.skip("this needs more devices")
    assert group.rank == 0 or group.device != 0
    x, rows = array(kind, group, 700), array(kind, group, group.size, 5)
    everyone = of_ranks(group, 700)
    check(group, in_thread(lambda: group.allgather(x)), everyone)
    check(group, in_thread(lambda: group.allgatherv(x)), everyone.reshape(-1))
    check(group, in_thread(lambda: group.reduce_scatter(rows)), everyone[:, :5].sum(0))
    check(group, in_thread(lambda: group.alltoall(rows)), everyone[:, :5])
    gathered = in_thread(lambda: group.gather(x, root=1))
    if group.rank == 1:
        check(group, gathered, everyone)


@ranks
@kinds
def test_results_of_read_only_arrays_are_on_their_device(group, kind):
    x = array(kind, group, 700)
    x.readonly = True
    total = of_ranks(group, 700).sum(0)
    check(group, in_thread(lambda: group.allreduce(x)), total)
    check(group, in_thread(lambda: group.bcast(x, root=1)), np.full(700, 2.0, "float32"))
    check(group, in_thread(lambda: group.allreduce_tree({"x": x}))["x"], total)


@ranks
@kinds
def test_results_without_an_input_are_on_the_device_of_the_group(group, kind):
    """These fail, if at all, only after ranks have exchanged something."""
    rows = array(kind, group, group.size, 7)
    at_root = group.rank == 1
    check(group, in_thread(lambda: group.scatter(rows if at_root else None, root=1)), np.full(7, 2.0))
    counts = [1] * group.size
    got = in_thread(lambda: group.scatterv(rows if at_root else None, counts if at_root else None, root=1))
    check(group, got, np.full((1, 7), 2.0))
    x = None if at_root else array(kind, group, 700)
    expected = of_ranks(group, 700).sum(0) - 2
    check(group, in_thread(lambda: group.allreduce_tree({"x": x}))["x"], expected)
    total = ss.Accumulator(group)
    total.add({"x": array(kind, group, 700)})
    check(group, in_thread(total.mean)["x"], of_ranks(group, 700).mean(0))
