"""view_of against made-up libraries: every corner that the protocols allow and no library at hand shows."""

import ctypes
import sys

import numpy as np
import pytest
import samestep as ss
from foreign_arrays import Cuda, Memory, Unversioned, Versioned, new_capsule
from samestep import _core

PRODUCERS = pytest.mark.parametrize("producer", [Versioned, Unversioned])


# --- __dlpack__ --------------------------------------------------------------------------------------


@PRODUCERS
def test_dlpack(producer):
    x = producer()
    readonly = producer is Unversioned  # it has no flags, so it may be
    expected = ("float32", (2, 3), (12, 4), 24, readonly, True, "cpu", 0, x.address)
    assert _core.view_info(x) == expected
    assert x.returned == 1


def test_dlpack_read_only_flag():
    assert _core.view_info(Versioned(flags=1))[4] is True
    assert _core.view_info(Versioned(flags=2))[4] is False  # another flag: a copy made for us


@PRODUCERS
def test_dlpack_counts_strides_in_elements_and_the_offset_in_bytes(producer):
    x = producer(strides=(1, -2), offset=160)
    assert _core.view_info(x)[2] == (4, -8)
    assert _core.view_info(x)[8] == x.address + 160


@PRODUCERS
def test_dlpack_without_strides_is_compact(producer):
    assert _core.view_info(producer(shape=(2, 3, 4), strides=None))[2] == (48, 16, 4)


@PRODUCERS
def test_dlpack_of_nothing(producer):
    assert _core.view_info(producer(shape=(0, 3), null=True))[1:4] == ((0, 3), (12, 4), 0)
    assert _core.view_info(producer(shape=(), strides=()))[1:4] == ((), (), 4)


DTYPES = {
    (0, 8, 1): "int8",
    (0, 64, 1): "int64",
    (1, 16, 1): "uint16",
    (2, 16, 1): "float16",
    (2, 64, 1): "float64",
    (4, 16, 1): "bfloat16",
    (5, 64, 1): "complex64",
    (5, 128, 1): "complex128",
    (6, 8, 1): "bool",
    (10, 8, 1): "float8_e4m3fn",
    (12, 8, 1): "float8_e5m2",
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_dlpack_dtypes(dtype):
    assert _core.view_info(Versioned(dtype=dtype))[0] == DTYPES[dtype]


@PRODUCERS
@pytest.mark.parametrize(
    "dtype", [(2, 32, 4), (2, 80, 1), (3, 64, 1), (0, 4, 1), (6, 1, 1), (17, 4, 1), (99, 8, 1)]
)
def test_dlpack_dtypes_that_cannot_be_sent(producer, dtype):
    x = producer(dtype=dtype)
    code, bits, lanes = dtype
    with pytest.raises(
        ss.InvalidArgumentError, match=f"code {code}, {bits} bits, {lanes} lanes.*accepted are"
    ):
        _core.view_info(x)
    assert x.returned == 1


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ((1, 0), ("cpu", 0)),
        ((2, 3), ("cuda", 3)),
        ((3, 1), ("cpu", 0)),  # pinned memory of the host
        ((10, 2), ("rocm", 2)),
        ((11, 0), ("cpu", 0)),
        ((13, 1), ("cuda", 1)),
        ((8, 0), ("other", 0)),
    ],
)
def test_dlpack_devices(device, expected):
    assert _core.view_info(Versioned(device=device))[6:8] == expected


def test_dlpack_of_a_later_major_is_refused():
    x = Versioned(version=(2, 0))
    with pytest.raises(ss.InvalidArgumentError, match=r"DLPack 2\.0, which is newer"):
        _core.view_info(x)
    assert x.returned == 1


@PRODUCERS
def test_dlpack_without_memory_is_refused(producer):
    x = producer(null=True)
    with pytest.raises(ss.InvalidArgumentError, match="no memory"):
        _core.view_info(x)
    assert x.returned == 1


def test_dlpack_with_too_many_dimensions_is_refused():
    x = Versioned(shape=(1,) * 33, strides=(1,) * 33)
    with pytest.raises(ss.InvalidArgumentError, match="33 dimensions"):
        _core.view_info(x)
    assert x.returned == 1


def test_a_used_capsule_is_refused():
    class Again(Unversioned):
        def __dlpack__(self):
            self.capsule = getattr(self, "capsule", None) or super().__dlpack__()
            return self.capsule

    x = Again()
    _core.view_info(x)
    with pytest.raises(ss.InvalidArgumentError, match="unused DLPack capsule"):
        _core.view_info(x)
    assert x.returned == 1


def test_errors_of_the_producer():
    class Broken:
        def __init__(self, error):
            self.error = error

        def __dlpack__(self, max_version=None):
            raise self.error

    with pytest.raises(ss.InvalidArgumentError, match="Broken cannot be read as plain memory: gone;"):
        _core.view_info(Broken(RuntimeError("gone.\na long trace")))
    for passing in (KeyboardInterrupt, MemoryError):
        with pytest.raises(passing):
            _core.view_info(Broken(passing()))


def test_numpy_through_dlpack_only():
    class Only:
        def __init__(self, x):
            self.x = x

        def __dlpack__(self, **options):
            return self.x.__dlpack__(**options)

    x = np.arange(24.0).reshape(4, 6)[::2, ::-3]
    before = sys.getrefcount(x)
    seen, expected = _core.view_info(Only(x)), _core.view_info(x)
    assert seen[:4] + seen[5:] == expected[:4] + expected[5:]  # before NumPy 2.1 its capsules had no flags
    assert sys.getrefcount(x) == before


# --- DLPack's C exchange API -------------------------------------------------------------------------

Export = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))


class ExchangeApi(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("export_managed", Export),
        ("import_managed", ctypes.c_void_p),
        ("borrow", ctypes.c_void_p),
        ("current_stream", ctypes.c_void_p),
    ]


@Export
def export_versioned(x, out):
    out[0] = ctypes.addressof(x.versioned)
    return 0


TABLE = ExchangeApi(1, 3, None, None, export_versioned)
NEWER_TABLE = ExchangeApi(2, 0, ctypes.addressof(TABLE))
ONLY_NEWER_TABLE = ExchangeApi(2, 0, None)


def api_capsule(table):
    return new_capsule(ctypes.addressof(table), b"dlpack_exchange_api", None)


@pytest.mark.parametrize("table", [TABLE, NEWER_TABLE])
def test_exchange_api(table):
    class Fast(Memory):
        __dlpack_c_exchange_api__ = api_capsule(table)

        def __dlpack__(self, **_):
            raise AssertionError("the slow path was taken")

    for _ in range(2):  # found, then remembered
        x = Fast(flags=1, strides=(4, 1))
        assert _core.view_info(x) == ("float32", (2, 3), (16, 4), 24, True, False, "cpu", 0, x.address)
        assert x.returned == 1
    assert _core.view_info(Fast())[4] is False

    class Heir(Fast):
        pass

    assert _core.view_info(Heir())[0] == "float32"


@pytest.mark.parametrize("capsule", [api_capsule(ONLY_NEWER_TABLE), None, new_capsule(1, b"something", None)])
def test_exchange_api_of_no_use_leaves_dlpack(capsule):
    class Slow(Versioned):
        __dlpack_c_exchange_api__ = capsule

    assert _core.view_info(Slow())[0] == "float32"


# --- __cuda_array_interface__ ------------------------------------------------------------------------


def test_cuda_array_interface():
    assert _core.view_info(Cuda()) == ("float32", (2, 3), (12, 4), 24, False, True, "cuda", -1, 4096)
    assert _core.view_info(Cuda(strides=None))[2] == (12, 4)
    strided = _core.view_info(Cuda(strides=(4, 8), data=(8192, True), typestr="|i1"))
    assert strided == ("int8", (2, 3), (4, 8), 6, True, False, "cuda", -1, 8192)
    assert _core.view_info(Cuda(shape=(), typestr="<c16"))[:4] == ("complex128", (), (), 16)


@pytest.mark.parametrize("typestr", [">f4", "<V2", "|O", "<M8[s]", ""])
def test_cuda_array_interface_types_that_cannot_be_sent(typestr):
    with pytest.raises(
        ss.InvalidArgumentError, match=f"type '{typestr}'".replace("|", r"\|").replace("[", r"\[")
    ):
        _core.view_info(Cuda(typestr=typestr))


def test_cuda_array_interface_with_a_mask_is_refused():
    with pytest.raises(ss.InvalidArgumentError, match="mask"):
        _core.view_info(Cuda(mask=Cuda()))
    assert _core.view_info(Cuda(mask=None))[0] == "float32"
