"""Arrays that say what cannot be: each is refused with an error that names the property, before it is used."""

import ctypes

import numpy as np
import pytest
import samestep as ss
from foreign_arrays import Cuda, Exporter, Unversioned, Versioned, new_capsule
from samestep import _core

HUGE = 2**62
PRODUCERS = pytest.mark.parametrize("producer", [Versioned, Unversioned])


def refused(x, match):
    with pytest.raises(ss.InvalidArgumentError, match=match):
        _core.view_info(x)


LAYOUTS = {
    "negative extent": ({"shape": (2, -3), "strides": None}, r"shape \(2, -3\).*extent -3 of axis 1"),
    "negative beside zero": ({"shape": (0, -1), "strides": None}, "extent -1 of axis 1"),
    "two negatives": ({"shape": (-2, -3), "strides": None}, "extent -2 of axis 0"),
    "count overflows": ({"shape": (HUGE, HUGE), "strides": None}, "more than any memory"),
    "count overflows to 0": ({"shape": (2**32, 2**32), "strides": None}, "more than any memory"),
    "bytes overflow": ({"shape": (HUGE,), "strides": None}, "more than any memory"),
    "stride overflows": ({"shape": (2, 3), "strides": (HUGE, 1)}, "beyond the address space"),
    "reach overflows": ({"shape": (2**40, 3), "strides": (2**40, 1)}, "beyond the address space"),
    "reach below null": ({"shape": (2, 3), "strides": (-(2**50), 1)}, "beyond the address space"),
    "null": ({"null": True}, "no memory"),
}


@PRODUCERS
@pytest.mark.parametrize("name", LAYOUTS)
def test_dlpack_layouts(producer, name):
    properties, match = LAYOUTS[name]
    x = producer(**properties)
    refused(x, match)
    assert x.returned == 1


@PRODUCERS
@pytest.mark.parametrize("n_dims", [-1, -(2**31), 33, 2**31 - 1])
def test_dlpack_numbers_of_dimensions(producer, n_dims):
    x = producer()
    x.managed.tensor.n_dims = x.versioned.tensor.n_dims = n_dims
    refused(x, f"{n_dims} dimensions")
    assert x.returned == 1


@PRODUCERS
def test_dlpack_without_a_shape(producer):
    x = producer()
    nothing = ctypes.POINTER(ctypes.c_int64)()
    x.managed.tensor.shape = x.versioned.tensor.shape = nothing
    refused(x, "2 dimensions but no shape")


@PRODUCERS
def test_dlpack_offset_beyond_the_address_space(producer):
    refused(producer(offset=2**64 - 8), "byte_offset 18446744073709551608")
    refused(producer(offset=2**63), "byte_offset 9223372036854775808")
    refused(producer(offset=2**56), "byte_offset 72057594037927936")


@PRODUCERS
@pytest.mark.parametrize("dtype", [(2, 32, 0), (2, 0, 1), (255, 255, 65535)])
def test_dlpack_dtypes(producer, dtype):
    refused(producer(dtype=dtype), f"code {dtype[0]}, {dtype[1]} bits, {dtype[2]} lanes")


@PRODUCERS
def test_dlpack_device_with_a_negative_index(producer):
    refused(producer(device=(2, -3)), "device with index -3")


@pytest.mark.parametrize("version", [(0, 8), (2**32 - 1, 0)])
def test_dlpack_versions(version):
    refused(Versioned(version=version), f"DLPack {version[0]}.{version[1]}")


@PRODUCERS
def test_what_an_axis_of_one_says_of_its_stride_is_nothing(producer):
    assert _core.view_info(producer(shape=(1, 3), strides=(HUGE, 1)))[5]


class HalfTable(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        ("previous", ctypes.c_void_p),
        ("rest", ctypes.c_void_p * 5),
    ]


def test_exchange_tables_without_functions_or_without_end():
    empty, endless = HalfTable((1, 3)), HalfTable((2, 0))
    endless.previous = ctypes.addressof(endless)
    for table in (empty, endless):

        class Slow(Versioned):
            __dlpack_c_exchange_api__ = new_capsule(ctypes.addressof(table), b"dlpack_exchange_api", None)

        assert _core.view_info(Slow())[0] == "float32"


def test_exchange_that_gives_nothing():
    nothing = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(lambda _x, _out: 0)
    table = HalfTable((1, 3))
    table.rest[1] = ctypes.cast(nothing, ctypes.c_void_p).value

    class Empty(Versioned):
        __dlpack_c_exchange_api__ = new_capsule(ctypes.addressof(table), b"dlpack_exchange_api", None)

    refused(Empty(), "Empty gave no tensor")


BUFFERS = {
    "negative extent": ({"shape": (2, -3)}, "extent -3 of axis 1"),
    "negative dimensions": ({"n_dims": -1}, "-1 dimensions"),
    "many dimensions": ({"n_dims": 64}, "64 dimensions"),
    "no shape": ({"shape": None, "n_dims": 2}, "2 dimensions but no shape"),
    "overflow": ({"shape": (HUGE, HUGE), "strides": None}, "more than any memory"),
    "stride overflows": ({"strides": (HUGE, HUGE)}, "beyond the address space"),
    "null": ({"null": True}, "no memory"),
    "short": ({"nbytes": 20}, "holds 20 bytes, but its shape .* takes 24"),
    "negative length": ({"nbytes": -1}, "holds -1 bytes"),
    "suboffsets": ({"suboffsets": (0, 0)}, "suboffsets"),
    "itemsize": ({"itemsize": -4}, "format 'f' and -4 bytes"),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers(name):
    properties, match = BUFFERS[name]
    x = Exporter(**properties)
    refused(x, match)
    assert x.held == 0


def test_a_buffer_that_is_right():
    x = Exporter(suboffsets=(-1, -1))
    address = x.bytes.ctypes.data
    assert _core.view_info(x) == ("float32", (2, 3), (12, 4), 24, False, True, "cpu", 0, address)
    assert x.held == 0


INTERFACES = {
    "shape is no tuple": ({"shape": 6}, "'shape' must be a tuple"),
    "shape of text": ({"shape": ("2", 3)}, "'shape' must be a tuple"),
    "extent does not fit": ({"shape": (2**70,)}, "'shape' must be a tuple of 64-bit integers"),
    "negative extent": ({"shape": (-1,)}, "extent -1 of axis 0"),
    "overflow": ({"shape": (HUGE, HUGE)}, "more than any memory"),
    "short strides": ({"strides": (4,)}, "'strides' must be as many"),
    "strides of text": ({"strides": "ab"}, "'strides' must be a tuple"),
    "stride overflows": ({"strides": (HUGE, 4)}, "beyond the address space"),
    "empty data": ({"data": ()}, r"'data' must be \(address, read_only\)"),
    "data is a number": ({"data": 4096}, "'data' must be"),
    "no address": ({"data": (None, False)}, "'data' must be"),
    "address does not fit": ({"data": (2**64, False)}, "'data' must be"),
    "negative address": ({"data": (-1, False)}, "'data' must be"),
    "null": ({"data": (0, False)}, "no memory"),
    "end of the addresses": ({"data": (2**64 - 8, False)}, "more than any memory"),
    "typestr": ({"typestr": 4}, "'typestr' must be a string"),
    "no text": ({"typestr": "<\udcff"}, "'typestr' must be a string"),
    "order": ({"typestr": "xf4"}, "type 'xf4'"),
    "stream of text": ({"stream": "x"}, "'stream' must be None or the handle"),
    "negative stream": ({"stream": -5}, "'stream' must be"),
    "stream does not fit": ({"stream": 2**64}, "'stream' must be"),
    "newer": ({"version": 4}, "version 4"),
    "version of text": ({"version": "3"}, "'version' must be"),
}


@pytest.mark.parametrize("name", INTERFACES)
def test_cuda_array_interfaces(name):
    properties, match = INTERFACES[name]
    refused(Cuda(**properties), match)


@pytest.mark.parametrize("field", ["shape", "typestr", "data"])
def test_cuda_array_interface_without_a_field(field):
    x = Cuda()
    del x.__cuda_array_interface__[field]
    refused(x, f"has no '{field}'")


def test_cuda_array_interface_that_is_no_dict_or_fails():
    class Fails:
        @property
        def __cuda_array_interface__(self):
            raise RuntimeError("it has gone")

    refused(Fails(), "Fails for __cuda_array_interface__ failed: it has gone")
    x = Cuda()
    x.__cuda_array_interface__ = 3
    refused(x, "Cuda is no dict")


def test_a_verb_says_so_too_and_goes_on():
    backend = ss.initialize()
    with pytest.raises(ss.InvalidArgumentError, match="extent -3"):
        backend.allreduce(Versioned(shape=(2, -3), strides=None))
    with pytest.raises(ss.InvalidArgumentError, match=r"recv: .*more than any memory"):
        backend.recv(Versioned(shape=(HUGE, HUGE), strides=None), 0)
    np.testing.assert_array_equal(backend.allreduce(np.ones(3)), np.ones(3))
