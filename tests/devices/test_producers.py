"""Operations come after what the library of an array has put into its stream, however it names that stream."""

import sys
import types

import device_jobs
import numpy as np
import pytest
from running import program
from samestep import _core
from samestep.gpu.device_array import DeviceArray

BACKENDS = pytest.mark.parametrize("backend", ["nccl", "native"])


def run(tmp_path, function, backend, n_ranks=2):
    return device_jobs.run(tmp_path, program("devices/device_producers", function, backend), n_ranks)


@BACKENDS
def test_no_stream_means_the_default_stream(tmp_path, backend):
    for rank in run(tmp_path, "reduce_an_array_of_the_default_stream", backend):
        assert rank.reports == [{"ended": True, "result": [3.0] * 5}], rank


@BACKENDS
def test_the_default_stream_waits_for_streams_made_without_flags(tmp_path, backend):
    """So that work after the default stream comes after what they have, too."""
    (rank,) = run(tmp_path, "reduce_an_array_that_a_blocking_stream_makes", backend, 1)
    assert rank.reports == [{"early": False, "result": [1.0] * 5}], rank


@BACKENDS
def test_a_library_with_dlpack_only_lets_the_default_stream_wait(tmp_path, backend):
    (rank,) = run(tmp_path, "reduce_an_array_with_dlpack_only", backend, 1)
    assert rank.reports == [{"early": False, "result": [1.0] * 5}], rank


@BACKENDS
@pytest.mark.parametrize("torch", ["", "_without_raw_streams"])
def test_tensors_of_torch_are_used_in_its_current_stream(tmp_path, backend, torch):
    """Before the operation and after it."""
    (rank,) = run(tmp_path, "reduce_a_tensor_of_torch" + torch, backend, 1)
    assert rank.reports == [{"used": [-1.0] * 5}, {"early": False, "result": [1.0] * 5}], rank


@BACKENDS
def test_arrays_of_cupy_without_the_interface_are_used_in_its_current_stream(tmp_path, backend):
    (rank,) = run(tmp_path, "reduce_an_array_of_cupy_without_the_interface", backend, 1)
    assert rank.reports == [{"library": "cupy"}, {"early": False, "result": [1.0] * 5}], rank


@BACKENDS
def test_a_library_with_the_exchange_api_is_asked_for_its_current_stream(tmp_path, backend):
    for rank in run(tmp_path, "reduce_an_array_of_the_current_stream", backend):
        assert rank.reports == [{"asked": True, "result": [3.0] * 5}], rank


@pytest.mark.parametrize("of_ours", [False, True])
@pytest.mark.parametrize("knows_versions", [True, False])
def test_who_names_a_stream_is_not_asked_to_synchronize(monkeypatch, knows_versions, of_ours):
    """CuPy, and the arrays that the package makes itself."""
    streams = []

    class ndarray(DeviceArray if of_ours else object):
        __cuda_array_interface__ = property()
        values = np.arange(3.0)

        def __init__(self):
            pass

        def __dlpack__(self, *, stream=None, **more):
            if more and not knows_versions:
                raise TypeError("unexpected keyword")
            streams.append(stream)
            return self.values.__dlpack__(**more)

    if not of_ours:
        monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=ndarray))
    assert _core.view_info(ndarray())[:2] == ("float64", (3,))
    assert streams == [-1]
