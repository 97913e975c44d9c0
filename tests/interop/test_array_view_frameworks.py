"""What view_of makes of the arrays of torch, JAX and MLX: the probe matrix."""

import subprocess
import sys

import numpy as np
import pytest
from array_views import EXTRA, NATIVE, View, refused, view
from running import program
from samestep import _core

# --- torch -----------------------------------------------------------------------------------------


def torch_says(x):
    item = x.element_size()
    strides = tuple(s * item for s in x.stride())
    name = str(x.dtype).removeprefix("torch.")
    return View(
        name, tuple(x.shape), strides, x.numel() * item, False, x.is_contiguous(), "cpu", 0, x.data_ptr()
    )


@pytest.mark.parametrize("name", NATIVE + EXTRA)
def test_torch_dtypes(name):
    torch = pytest.importorskip("torch")
    x = torch.zeros((2, 3), dtype=getattr(torch, name))
    assert view(x) == torch_says(x)


TORCH_LAYOUTS = {
    "0-d": lambda torch: torch.tensor(3.0),
    "no elements": lambda torch: torch.zeros(0, 3),
    "every second": lambda torch: torch.zeros(4, 6)[:, ::2],
    "transposed": lambda torch: torch.zeros(2, 3).T,
    "expanded": lambda torch: torch.zeros(3).expand(2, 3),
    "channels last": lambda torch: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "inside a storage": lambda torch: torch.zeros(10)[3:7],
    "requires grad": lambda torch: torch.zeros(3, requires_grad=True),
    "not a leaf": lambda torch: torch.zeros(3, requires_grad=True) * 2,
    "parameter": lambda torch: torch.nn.Parameter(torch.zeros(3)),
    "view of NumPy": lambda torch: torch.from_numpy(np.zeros(3)),
    "resolved conjugate": lambda torch: torch.zeros(3, dtype=torch.complex64).conj().resolve_conj(),
    "imaginary part": lambda torch: torch.zeros(3, dtype=torch.complex64).imag,
}


@pytest.mark.parametrize("layout", TORCH_LAYOUTS)
def test_torch_layouts(layout):
    x = TORCH_LAYOUTS[layout](pytest.importorskip("torch"))
    assert view(x) == torch_says(x)


TORCH_REFUSED = {
    "conjugated": (lambda t: t.ones(3, dtype=t.complex64).conj(), "resolve_conj"),
    "conjugated, 0-d": (lambda t: t.tensor(1j).conj(), "resolve_conj"),
    "negated": (lambda t: t.ones(3, dtype=t.complex64).conj().imag, "resolve_neg"),
    "negated, 0-d": (lambda t: t.tensor(1j).conj().imag, "resolve_neg"),
    "negated, without gaps": (
        lambda t: t.ones(3, dtype=t.complex64).conj().imag.as_strided((5,), (1,)),
        "resolve_neg",
    ),
    "sparse": (lambda t: t.eye(3).to_sparse(), "sparse_coo.*to_dense"),
    "meta": (lambda t: t.ones(3, device="meta"), "device meta.*to_empty"),
    "quantized": (lambda t: t.quantize_per_tensor(t.ones(3), 0.1, 0, t.quint8), "quint8.*dequantize"),
    "complex32": (lambda t: t.ones(3, dtype=t.complex32), "torch.complex32.*cannot be sent"),
    "nested": (lambda t: t.nested.nested_tensor([t.ones(3), t.ones(2)]), "ordinary tensor"),
}


@pytest.mark.filterwarnings("ignore")  # prototypes in torch warn
@pytest.mark.parametrize("kind", TORCH_REFUSED)
def test_torch_tensors_without_plain_memory(kind):
    make, match = TORCH_REFUSED[kind]
    refused(make(pytest.importorskip("torch")), match)


@pytest.mark.filterwarnings("ignore")
def test_torch_wrappers_have_no_memory():
    torch = pytest.importorskip("torch")

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise AssertionError(f"{function} was called")

    refused(Wrapper(), "no memory")


@pytest.mark.parametrize("layout", TORCH_LAYOUTS)
def test_torch_before_it_had_the_exchange_api(layout):
    torch = pytest.importorskip("torch")

    class Old(torch.Tensor):
        __dlpack_c_exchange_api__ = None

        def __dlpack__(self, *, stream=None):
            if self.requires_grad:
                raise BufferError("cannot export tensors that require gradient")
            return torch.utils.dlpack.to_dlpack(self.as_subclass(torch.Tensor))

    x = TORCH_LAYOUTS[layout](torch).as_subclass(Old)
    if x.numel() > 0:  # DLPack gives no address of nothing
        assert view(x) == torch_says(x)
    refused(torch.ones(3, dtype=torch.complex64).conj().imag.as_subclass(Old), "resolve_neg")


def test_torch_is_told_of_writes():
    torch = pytest.importorskip("torch")
    x, w = torch.ones(3), torch.ones(3, requires_grad=True)
    loss = (x * w).sum()
    _core.unpack(np.zeros(12, np.uint8), [x])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_torch_types_are_no_tensors():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="expected an array"):
        _core.view_info(torch.Tensor)


# --- JAX -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({*NATIVE, *EXTRA} - {"int64", "uint64", "float64", "complex128"}))
@pytest.mark.parametrize("shape", [(), (0, 3), (3,), (2, 3)])
def test_jax_arrays_are_read_only(name, shape):
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones(shape, name)
    seen = view(x)
    nbytes = x.size * x.dtype.itemsize
    assert seen[:2] == (name, shape)
    assert seen[3:8] == (nbytes, True, True, "cpu", 0)
    assert seen.address == x.unsafe_buffer_pointer() or nbytes == 0


def test_jax_arrays_without_plain_memory():
    jax = pytest.importorskip("jax")
    refused(jax.numpy.ones(4, jax.numpy.int4), "ArrayImpl cannot be read as plain memory")
    x = jax.numpy.ones(3)
    x.delete()
    refused(x, "has been deleted")
    with pytest.raises(TypeError, match="PRNGKeyArray"):
        view(jax.random.key(0))


def test_jax_tracers_are_refused():
    jax = pytest.importorskip("jax")
    jax.jit(lambda x: refused(x, "outside of jit"))(1.0)


def test_jax_arrays_on_two_devices_are_refused():
    pytest.importorskip("jax")
    command = [sys.executable, *program("interop/jax_devices", "view_arrays")]
    subprocess.run(command, check=True, timeout=120)


# --- MLX -------------------------------------------------------------------------------------------


def test_a_format_that_begins_like_another():
    mx = pytest.importorskip("mlx.core")  # writes "bfloat16" as format, which begins like a signed byte
    x = mx.ones((2, 3), mx.bfloat16)
    mx.eval(x)
    assert view(x)[:4] == ("bfloat16", (2, 3), (6, 2), 12)
