"""Numbers no machine can serve: refused with the argument's name, before anything is started."""

from datetime import timedelta

import numpy as np
import pytest
import samestep as ss
from samestep import rendezvous

BAD_SECONDS = [float("inf"), float("-inf"), float("nan"), -1, 0, 1e10, 1e300, 10**400, 10**5000, "soon"]


@pytest.fixture(autouse=True)
def no_world():
    ss.finalize()
    yield
    ss.finalize()


@pytest.mark.parametrize("timeout", BAD_SECONDS, ids=range(len(BAD_SECONDS)))
def test_timeouts(timeout):
    with pytest.raises(ss.InvalidArgumentError, match="initialize: timeout must be a number of seconds"):
        ss.initialize(timeout=timeout)
    backend = ss.initialize()
    with pytest.raises(ss.InvalidArgumentError, match="timeout must be a number of seconds"):
        backend.barrier(timeout=timeout)
    if not isinstance(timeout, str):
        with pytest.raises(ss.InvalidArgumentError, match="timeout must be a number of seconds"):
            rendezvous.HashStore(timeout=timeout)


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), 1e300, 10**400, "soon"], ids=range(5))
def test_timeouts_of_wait(timeout):
    work = ss.initialize().ibarrier()
    with pytest.raises(
        ss.InvalidArgumentError, match="wait: timeout must be a number of seconds at most 1e9"
    ):
        work.wait(timeout)
    work.wait(0)
    work.wait(-1)  # a deadline that has passed already


def test_timeouts_of_the_environment(monkeypatch):
    monkeypatch.setenv("SAMESTEP_TIMEOUT", "inf")
    with pytest.raises(
        ss.InvalidArgumentError, match="initialize: SAMESTEP_TIMEOUT must be a number of seconds"
    ):
        ss.initialize()


def test_the_longest_timeout():
    ss.initialize(timeout=1e9).barrier()
    rendezvous.HashStore(timeout=timedelta(days=11_574))
    with pytest.raises(ss.InvalidArgumentError):
        rendezvous.HashStore(timeout=timedelta.max)


TOO_LARGE = [[2**70], 2**70, (2**40, 2**40), 2**55, (0, 2**62, 4), 10**5000]


@pytest.mark.parametrize(
    "shape", TOO_LARGE, ids=["list", "int", "product", "bytes", "beside zero", "5000 digits"]
)
def test_shapes_beyond_any_memory(shape):
    backend = ss.initialize()
    with pytest.raises(ss.InvalidArgumentError, match=r"empty: shape .* is more than any memory holds"):
        backend.empty(shape)
    with pytest.raises(ss.InvalidArgumentError, match=r"zeros: shape .* is more than any memory holds"):
        backend.zeros(shape)


@pytest.mark.parametrize("shape", [-1, (2, -3), (0, -1)])
def test_negative_extents(shape):
    with pytest.raises(ss.InvalidArgumentError, match=r"empty: shape .* has a negative extent"):
        ss.initialize().empty(shape)


@pytest.mark.parametrize("shape", [2.5, (2, "a"), "ab", None, ([1, 2], 3)])
def test_what_is_no_shape(shape):
    with pytest.raises(TypeError, match="empty: shape must be an int or a sequence of ints"):
        ss.initialize().empty(shape)


def test_shapes_as_numpy_gives_them():
    backend = ss.initialize()
    assert backend.empty(np.int64(3)).shape == (3,)
    assert backend.zeros(np.array([2, 3])).shape == (2, 3)
    assert backend.empty(()).shape == ()


def test_what_exceeds_the_memory_of_this_machine():
    with pytest.raises(MemoryError):
        ss.initialize().empty(2**52, np.uint8)
