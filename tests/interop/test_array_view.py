"""What view_of makes of NumPy arrays, of buffers, and of what is not an array: the probe matrix.

The law: the view says of an array exactly what its own library says, or refuses with the cure.
"""

import array
import ctypes
import gc
import mmap
import sys
import weakref

import numpy as np
import pytest
import samestep as ss
from array_views import EXTRA, NATIVE, numpy_says, refused, view
from samestep import _core

# --- NumPy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NATIVE)
def test_numpy_dtypes(name):
    x = np.zeros((2, 3), name)
    assert view(x) == numpy_says(x)


@pytest.mark.parametrize("name", EXTRA)
def test_numpy_dtypes_of_ml_dtypes(name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.zeros((2, 3), getattr(ml_dtypes, name))
    assert view(x) == numpy_says(x)
    assert view(x) == numpy_says(x)  # the second time the type number is known


@pytest.mark.parametrize("code", "?bBhHiIlLqQefdFDpPnN")
def test_every_c_type_has_its_width(code):
    try:
        x = np.zeros(3, code)
    except TypeError:
        pytest.skip(f"this NumPy has no type code {code}")
    assert view(x) == numpy_says(x)


def read_only(x):
    x.flags.writeable = False
    return x


LAYOUTS = {
    "0-d": lambda: np.array(3.0),
    "no elements": lambda: np.zeros((0, 3)),
    "no elements, strided": lambda: np.zeros((0, 4))[:, ::2],
    "one element of many dimensions": lambda: np.zeros((1,) * 32),
    "every second": lambda: np.zeros((4, 6))[:, ::2],
    "backwards": lambda: np.zeros((4, 6))[::-1, ::-1],
    "backwards, one element": lambda: np.zeros(1)[::-1],
    "transposed": lambda: np.zeros((2, 3)).T,
    "Fortran order": lambda: np.zeros((2, 3), order="F"),
    "rows of a matrix": lambda: np.zeros((4, 6))[1:3],
    "one column": lambda: np.zeros((4, 6))[:, 2],
    "new axes": lambda: np.zeros((2, 3))[:, None, :, None],
    "read-only": lambda: read_only(np.zeros(3)),
    "broadcast": lambda: np.broadcast_to(np.zeros(3, "f4"), (2, 3)),
    "field of records": lambda: np.zeros(3, [("a", "u1"), ("b", "f4")])["b"],
    "misaligned": lambda: np.frombuffer(bytearray(9), "f4", count=2, offset=1),
    "misaligned, no elements": lambda: np.frombuffer(bytearray(9), "f4", offset=1)[:0],
    "complex, half aligned": lambda: np.frombuffer(bytearray(36), "u1")[4:20].view("c8"),
    "matrix subclass": lambda: np.zeros((2, 3)).view(np.recarray),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numpy_layouts(layout):
    x = LAYOUTS[layout]()
    assert view(x) == numpy_says(x)


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_numpy_memmap(tmp_path, mode):
    np.arange(6, dtype="f4").tofile(tmp_path / "x")
    x = np.memmap(tmp_path / "x", "f4", mode=mode, shape=(2, 3))
    assert view(x) == numpy_says(x)
    assert view(x).readonly == (mode == "r")


@pytest.mark.parametrize("name", NATIVE)
def test_numpy_scalars_are_read_only_arrays(name):
    seen = view(np.dtype(name).type(1))
    assert (seen.dtype, seen.shape, seen.readonly) == (name, (), True)


def test_numpy_scalars_of_other_types():
    refused(np.datetime64("2020"), "datetime64")  # its buffer would be eight plain bytes
    refused(np.longdouble(1), r"astype\(np.float64\)")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert view(ml_dtypes.bfloat16(1))[:2] == ("bfloat16", ())  # it has no buffer at all


NOT_SENT = {
    ">f4": r"foreign byte order.*newbyteorder",
    ">i2": r"foreign byte order.*newbyteorder",
    "O": "dtype object .*bcast_object",
    "g": r"accepted are .*astype\(np.float64\)",
    "G": r"astype\(np.complex128\)",
    "M8[s]": r"datetime64\[s\].*view\(np.int64\)",
    "m8[s]": r"timedelta64\[s\].*view\(np.int64\)",
    "S3": "bcast_object",
    "U3": "bcast_object",
    "V3": "np.uint8",
    "i4,f4": "fields one by one",
}


@pytest.mark.parametrize("dtype", NOT_SENT)
def test_numpy_dtypes_that_cannot_be_sent(dtype):
    refused(np.zeros(3, dtype), NOT_SENT[dtype])


def test_numpy_string_dtype_cannot_be_sent():
    if not hasattr(np.dtypes, "StringDType"):
        pytest.skip("NumPy 2 brought it")
    refused(np.zeros(3, np.dtypes.StringDType()), "StringDType.*bcast_object")


@pytest.mark.parametrize("name", ["int4", "float8_e4m3fnuz"])
def test_ml_dtypes_that_cannot_be_sent(name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    refused(np.zeros(3, getattr(ml_dtypes, name)), f"{name} cannot be sent.*astype")


def test_foreign_bfloat16_is_refused():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    view(np.zeros(3, ml_dtypes.bfloat16))  # its type number is known from here on
    refused(np.zeros(3, np.dtype(ml_dtypes.bfloat16).newbyteorder(">")), "foreign byte order")


def test_masked_arrays_are_refused():
    refused(np.ma.zeros(3), "mask.*filled")


def test_too_many_dimensions_are_refused():
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":
        pytest.skip("older NumPy ends at 32 itself")
    refused(np.zeros((1,) * 33), "33 dimensions, more than 32; reshape")


# --- the buffer protocol -----------------------------------------------------------------------------


@pytest.mark.parametrize("code", "bBhHiIlLqQfd")
def test_array_array(code):
    x = array.array(code, [1, 2, 3])
    as_numpy = np.frombuffer(x, code)
    assert view(x) == numpy_says(as_numpy)


BUFFERS = {
    "bytearray": lambda: bytearray(3),
    "empty": bytearray,
    "read-only memoryview": lambda: memoryview(b"abc"),
    "strided memoryview": lambda: memoryview(bytearray(8))[::-2],
    "two dimensions": lambda: memoryview(bytearray(24)).cast("d", (3, 1)),
    "mmap": lambda: mmap.mmap(-1, 8),
    "memoryview of complex": lambda: memoryview(np.zeros(3, "c8")),
    "memoryview of half": lambda: memoryview(np.zeros(3, "f2")),
    "memoryview of 0-d": lambda: memoryview(np.zeros((), "f4")),
    "ctypes floats": ctypes.c_float * 3,
    "ctypes longs": ctypes.c_long * 3 * 2,  # ctypes calls an eight-byte long "<l"
    "ctypes bools": ctypes.c_bool * 3,
    "ctypes number": lambda: ctypes.c_double(1),
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers(kind):
    x = BUFFERS[kind]()
    assert view(x) == numpy_says(np.asarray(x))


CHARACTERS = "w" if "w" in array.typecodes else "u"  # the type of the elements, new in Python 3.13
BAD_BUFFERS = {
    "characters": (
        lambda: array.array(CHARACTERS, "ab"),
        "array.array holds elements of format '[uw]' and 4 bytes",
    ),
    "bytes of length one": (lambda: ctypes.create_string_buffer(3), "format '<c'"),
    "foreign byte order": (ctypes.c_float.__ctype_be__ * 3, "format '>f'"),
    "pointers": (ctypes.c_void_p * 2, r"cast\('B'\)"),
    "long double": (ctypes.c_longdouble * 2, "16 bytes, which cannot be sent; accepted are"),
    "records": (lambda: memoryview(np.zeros(2, "i4,f4")), "format 'T{"),
    "objects": (lambda: memoryview(np.zeros(2, "O")), "format 'O'"),
}


@pytest.mark.parametrize("kind", BAD_BUFFERS)
def test_buffers_that_cannot_be_sent(kind):
    make, match = BAD_BUFFERS[kind]
    refused(make(), match)


def test_released_memoryview_is_refused():
    x = memoryview(b"abc")
    x.release()
    refused(x, "does not give its memory: operation forbidden on released")


# --- not arrays --------------------------------------------------------------------------------------

NOT_ARRAYS = {
    "int": (1, r"got int; pass np.asarray\(x\)"),
    "float": (1.0, r"got float; pass np.asarray\(x\)"),
    "bool": (True, "got bool; pass"),
    "complex": (1j, "got complex; pass"),
    "list": ([1.0], r"got list; pass np.asarray\(x\)"),
    "tuple": ((1.0,), r"got tuple; pass np.asarray\(x\)"),
    "dict": ({"a": np.ones(3)}, "got dict; .*synchronize"),
    "bytes": (b"abc", r"got bytes; pass np.frombuffer\(x, np.uint8\).*bcast_object"),
    "str": ("abc", "got str; use an object verb such as bcast_object"),
    "None": (None, "got NoneType$"),
    "object": (object(), "expected an array .NumPy, torch, JAX, CuPy.* got object"),
    "array type": (np.ndarray, "got type"),
    "dtype": (np.dtype("f4"), "got numpy"),
}


@pytest.mark.parametrize("kind", NOT_ARRAYS)
def test_not_an_array(kind):
    x, match = NOT_ARRAYS[kind]
    with pytest.raises(TypeError, match=match):
        _core.view_info(x)


# --- lifetime ----------------------------------------------------------------------------------------


def makers():
    yield "numpy", lambda: np.zeros(3)
    yield "numpy scalar", lambda: np.float32(3)
    yield "numpy refused", lambda: np.zeros(3, "g")
    yield "torch", lambda: pytest.importorskip("torch").zeros(3)
    yield "torch refused", lambda: pytest.importorskip("torch").zeros(3, device="meta")
    yield "torch negated", lambda: pytest.importorskip("torch").tensor(1j).conj().imag
    yield "jax", lambda: pytest.importorskip("jax").numpy.zeros(3)
    yield "jax bfloat16", lambda: pytest.importorskip("jax").numpy.zeros(3, "bfloat16")
    yield "array.array", lambda: array.array("f", [1.0])
    yield "array.array refused", lambda: array.array(CHARACTERS, "a")
    yield "not an array", object


@pytest.mark.parametrize(("kind", "make"), [pytest.param(*pair, id=pair[0]) for pair in makers()])
def test_a_view_keeps_nothing(kind, make):
    x = make()
    gc.collect()
    before = sys.getrefcount(x)
    for _ in range(10):
        try:
            _core.view_info(x)
        except (TypeError, ss.InvalidArgumentError):
            assert "refused" in kind or kind in ("torch negated", "not an array")
    assert sys.getrefcount(x) == before


def test_a_buffer_is_given_back():
    x = bytearray(3)
    _core.view_info(x)
    x.append(1)  # raises BufferError while exported


def test_types_that_come_and_go_are_forgotten():
    passed = []
    for _ in range(40):

        class Passing:
            __slots__ = ()

        with pytest.raises(TypeError, match="Passing"):
            _core.view_info(Passing())
        passed.append(weakref.ref(Passing))
        assert view(np.float32(1)).readonly
        assert view(bytearray(3)).dtype == "uint8"
    del Passing
    gc.collect()
    assert sum(type_() is not None for type_ in passed) < 10
