"""Arrays of made-up libraries, one class for each protocol, which say of themselves whatever a test wants."""

import ctypes

import numpy as np

FLOAT32 = (2, 32, 1)  # DLPack's type code, bits, lanes
CPU = (1, 0)


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("n_dims", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Memory:
    """Memory that can be handed out as a DLPack tensor, and counts how often it came back."""

    def __init__(
        self,
        *,
        shape=(2, 3),
        strides=(3, 1),
        dtype=FLOAT32,
        device=CPU,
        offset=0,
        null=False,
        version=(1, 0),
        flags=0,
    ):
        self.bytes = np.zeros(4096, np.uint8)
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        self.strides = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        self.address = 0 if null else self.bytes.ctypes.data
        self.tensor = Tensor(self.address, *device, len(shape), *dtype, self.shape, self.strides, offset)
        self.returned = 0
        self.deleter = Deleter(self.take_back)
        deleter = ctypes.cast(self.deleter, ctypes.c_void_p)
        self.managed = Managed(self.tensor, None, deleter)
        self.versioned = ManagedVersioned(*version, None, deleter, flags, self.tensor)

    def take_back(self, _):
        self.returned += 1


class Versioned(Memory):
    def __dlpack__(self, *, max_version=None):
        assert max_version == (1, 3)
        return new_capsule(ctypes.addressof(self.versioned), b"dltensor_versioned", None)


class Unversioned(Memory):
    def __dlpack__(self):
        return new_capsule(ctypes.addressof(self.managed), b"dltensor", None)


# --- __cuda_array_interface__ ------------------------------------------------------------------------


class Cuda:
    def __init__(self, **fields):
        self.__cuda_array_interface__ = {
            "shape": (2, 3),
            "typestr": "<f4",
            "data": (4096, False),
            "version": 3,
            **fields,
        }


# --- the buffer protocol, which Python classes cannot speak before Python 3.12 -------------------------


class PyBuffer(ctypes.Structure):
    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    ]


class _Slot(ctypes.Structure):
    _fields_ = [("slot", ctypes.c_int), ("function", ctypes.c_void_p)]


class _Spec(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("basicsize", ctypes.c_int),
        ("itemsize", ctypes.c_int),
        ("flags", ctypes.c_uint),
        ("slots", ctypes.POINTER(_Slot)),
    ]


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(PyBuffer), ctypes.c_int)
def _get_buffer(exporter, view, _flags):
    ctypes.memmove(view, ctypes.byref(exporter.buffer), ctypes.sizeof(PyBuffer))
    view[0].obj = exporter
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(exporter))  # the view's
    exporter.held += 1
    return 0


@ctypes.PYFUNCTYPE(None, ctypes.py_object, ctypes.POINTER(PyBuffer))
def _release_buffer(exporter, _view):
    exporter.held -= 1


def _exporting_type():
    get_slot, release_slot = 1, 2  # Py_bf_getbuffer, Py_bf_releasebuffer
    slots = (_Slot * 3)(
        _Slot(get_slot, ctypes.cast(_get_buffer, ctypes.c_void_p)),
        _Slot(release_slot, ctypes.cast(_release_buffer, ctypes.c_void_p)),
        _Slot(0, None),
    )
    base_type = 1 << 10  # Py_TPFLAGS_BASETYPE
    spec = _Spec(b"foreign_arrays._Exporting", object.__basicsize__, 0, base_type, slots)
    make = ctypes.pythonapi.PyType_FromSpec
    make.restype, make.argtypes = ctypes.py_object, [ctypes.POINTER(_Spec)]
    return make(ctypes.byref(spec))


def _sizes(values):
    return None if values is None else (ctypes.c_ssize_t * len(values))(*values)


class Exporter(_exporting_type()):
    """Memory behind the buffer protocol; `held` counts the views that have not been released."""

    def __init__(
        self,
        *,
        shape=(2, 3),
        strides=(12, 4),
        suboffsets=None,
        format=b"f",
        itemsize=4,
        nbytes=24,
        n_dims=None,
        null=False,
    ):
        self.bytes = np.zeros(4096, np.uint8)
        self.held = 0
        n = len(shape or ()) if n_dims is None else n_dims
        address = None if null else self.bytes.ctypes.data
        self.buffer = PyBuffer()
        self.buffer.buf, self.buffer.len, self.buffer.itemsize = address, nbytes, itemsize
        self.buffer.ndim, self.buffer.format = n, format
        self.buffer.shape, self.buffer.strides = _sizes(shape), _sizes(strides)
        self.buffer.suboffsets = _sizes(suboffsets)
