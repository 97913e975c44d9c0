"""What the tests of array views share."""

from typing import NamedTuple

import pytest
import samestep as ss
from samestep import _core

NATIVE = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
NATIVE += ["float16", "float32", "float64", "complex64", "complex128"]
EXTRA = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]


class View(NamedTuple):
    dtype: str
    shape: tuple
    strides: tuple
    nbytes: int
    readonly: bool
    contiguous: bool
    device_kind: str
    device_index: int
    address: int


def view(x):
    return View(*_core.view_info(x))


def refused(x, match):
    with pytest.raises(ss.InvalidArgumentError, match=match):
        _core.view_info(x)


def numpy_says(x):
    contiguous = x.flags.c_contiguous and (x.flags.aligned or x.size == 0)
    return View(
        x.dtype.name, x.shape, x.strides, x.nbytes, not x.flags.writeable, contiguous, "cpu", 0, x.ctypes.data
    )
