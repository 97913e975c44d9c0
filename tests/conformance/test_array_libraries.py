"""Arrays of other libraries: torch, JAX, and what has no library."""

import array

import numpy as np
import pytest
import samestep as ss
from foreign_arrays import Unversioned
from reference import assert_same, dtype, reduced, values
from samestep import _core

pytestmark = pytest.mark.ranks(1, 2)


def inputs_of(group, shape, name="float32"):
    return [values(rank, shape, name) for rank in range(group.size)]


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def jax():
    return pytest.importorskip("jax")


TORCH_DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
]


def test_torch_in_place_and_returned(group, torch):
    for name in TORCH_DTYPES:
        inputs = inputs_of(group, (3, 5), name)
        x = torch.from_numpy(inputs[group.rank].copy())
        assert group.allreduce(x) is x
        assert_same(x.numpy(), reduced(inputs, "sum"), name)


def test_torch_bfloat16(group, torch):
    inputs = inputs_of(group, 37, "bfloat16")
    x = torch.from_numpy(inputs[group.rank].view("int16").copy()).view(torch.bfloat16)
    assert group.allreduce(x) is x
    assert_same(x.view(torch.int16).numpy().view(dtype("bfloat16")), reduced(inputs, "sum"))


def test_torch_gives_torch(group, torch):
    n, rank = group.size, group.rank
    blocks = inputs_of(group, (n, 3))
    x = torch.from_numpy(blocks[rank].copy())
    for got, expected in [
        (group.allgather(x), np.stack(blocks)),
        (group.alltoall(x), np.stack([b[rank] for b in blocks])),
        (group.reduce_scatter(x), reduced(blocks, "sum")[rank]),
        (group.allgatherv(x), np.concatenate(blocks)),
        (group.scatter(x if rank == 0 else None), blocks[0][rank]),
        (group.bcast(x.clone(), root=n - 1), blocks[n - 1]),
    ]:
        assert isinstance(got, torch.Tensor)
        assert_same(got.numpy(), expected)
    got = group.gather(x)
    assert got is None if rank else isinstance(got, torch.Tensor)


def test_torch_strided_and_0d(group, torch):
    inputs = inputs_of(group, (4, 6))
    x = torch.from_numpy(inputs[group.rank].copy())
    group.allreduce(x.t()[1:, ::2])
    expected = inputs[group.rank].copy()
    expected[::2, 1:] = reduced([a[::2, 1:] for a in inputs], "sum")
    assert_same(x.numpy(), expected)
    y = torch.tensor(group.rank + 1.0)
    assert group.allreduce(y) is y
    assert y.item() == group.size * (group.size + 1) / 2


def test_torch_parameters_and_gradients(group, torch):
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(group.rank + 1.0)
    model(torch.ones(1, 3)).sum().backward()
    group.allreduce(model.weight.grad, "avg")
    assert_same(model.weight.grad.numpy(), np.ones((2, 3), "float32"))
    group.bcast(model.weight.data, root=group.size - 1)
    assert (model.weight == group.size).all()


def test_torch_conjugate_and_negative_views_are_resolved_or_refused(group, torch):
    for view in (lambda t: t.conj(), lambda t: t.conj().imag):
        x = torch.full((3,), 1 + 2j)
        try:
            got = group.allgather(view(x))
        except ss.InvalidArgumentError:
            assert group.allreduce(1) == group.size
            continue
        assert torch.equal(got, torch.stack([view(x).resolve_conj().resolve_neg()] * group.size))


def test_torch_sparse_tensors_are_refused(group, torch):
    with pytest.raises((TypeError, ss.InvalidArgumentError), match=r"(?i)sparse|layout|strided"):
        group.allreduce(torch.eye(3).to_sparse())
    assert group.allreduce(1) == group.size


def test_jax_arrays_are_left_and_new_ones_returned(group, jax):
    for name in ["bool", "int32", "uint8", "float16", "bfloat16", "float32", "complex64"]:
        inputs = inputs_of(group, (3, 5), name)
        x = jax.numpy.asarray(inputs[group.rank])
        got = group.allreduce(x)
        assert isinstance(got, jax.Array)
        assert got is not x
        assert_same(np.asarray(got), reduced(inputs, "sum"), name)
        assert_same(np.asarray(x), inputs[group.rank], "the input")


def test_jax_gives_jax(group, jax):
    n, rank = group.size, group.rank
    blocks = inputs_of(group, (n, 3))
    x = jax.numpy.asarray(blocks[rank])
    for got, expected in [
        (group.bcast(x, root=n - 1), blocks[n - 1]),
        (group.allgather(x), np.stack(blocks)),
        (group.alltoall(x), np.stack([b[rank] for b in blocks])),
        (group.reduce_scatter(x), reduced(blocks, "sum")[rank]),
        (group.allgatherv(x), np.concatenate(blocks)),
        (group.scatter(x if rank == 0 else None), blocks[0][rank]),
    ]:
        assert isinstance(got, jax.Array)
        assert_same(np.asarray(got), expected)


def test_jax_arrays_cannot_be_received_into(group, jax):
    x = jax.numpy.zeros(3)
    with pytest.raises(ss.InvalidArgumentError, match=r"read-only|writ|immutable"):
        group.recv(x, 0)
    with pytest.raises(ss.InvalidArgumentError, match=r"read-only|writ|immutable"):
        group.allreduce(np.zeros(3, "float32"), out=x)


def test_jax_tracers_are_reduced_or_refused_with_a_cure(group, jax):
    assert np.asarray(jax.jit(group.allreduce)(jax.numpy.ones(3))).tolist() == [group.size] * 3
    with pytest.raises((TypeError, ss.InvalidArgumentError), match="jit"):
        jax.jit(group.gather)(jax.numpy.zeros(3))
    assert group.allreduce(1) == group.size


def test_ranks_may_use_different_libraries(group, torch, jax):
    inputs = inputs_of(group, 9)
    mine = inputs[group.rank].copy()
    x = torch.from_numpy(mine) if group.rank == 0 else jax.numpy.asarray(mine)
    assert_same(np.asarray(group.allreduce(x)), reduced(inputs, "sum"))


def test_buffers_without_a_library(group):
    n = group.size
    x = array.array("d", [group.rank + 1.0, 2.0])
    assert group.allreduce(x) is x
    assert list(x) == [n * (n + 1) / 2, 2.0 * n]
    y = bytearray([group.rank, 7])
    assert group.bcast(y, root=n - 1) is y
    assert list(y) == [n - 1, 7]
    z = memoryview(array.array("i", [1, 2, 3]))
    group.allreduce(z)
    assert z.tolist() == [n, 2 * n, 3 * n]


class OnlyDLPack:
    """An array of an unknown library."""

    def __init__(self, inner):
        self.inner = inner

    def __dlpack__(self, **options):
        return self.inner.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.inner.__dlpack_device__()


class Library:
    """The Python array API of arrays that are never changed. Like MLX it makes float32 of others' float64."""

    @staticmethod
    def from_dlpack(x):
        elements = np.from_dlpack(x)
        return Immutable(elements.astype("float32") if elements.dtype == "float64" else elements)

    @staticmethod
    def asarray(x, dtype):
        return Immutable(np.asarray(x, dtype))


for name in np.sctypeDict.values():
    setattr(Library, np.dtype(name).name, name)


class Immutable(OnlyDLPack):
    """An array of a library that nothing else is known of. It gives out its memory as writable."""

    def __array_namespace__(self, *, api_version=None):
        return Library

    @property
    def dtype(self):
        return self.inner.dtype


SHAPES = [(), (0, 2), (3,), (2, 3)]


@pytest.mark.parametrize("name", ["bool", "int8", "uint16", "uint64", "float16", "float64", "complex64"])
def test_arrays_of_an_unknown_array_library_are_left_and_new_ones_returned(group, name):
    last = group.size - 1
    for shape in SHAPES:
        inputs = inputs_of(group, shape, name)
        mine = inputs[group.rank].copy()
        x = Immutable(mine)
        total, everyone = reduced(inputs, "sum"), np.stack(inputs)
        for got, expected in [
            (group.allreduce(x), total),
            (group.iallreduce(x).wait(), total),
            (group.allreduce_tree({"w": [x]})["w"][0], total),
            (group.bcast(x, root=last), inputs[last]),
            (group.synchronize({"w": x}, root=last)["w"], inputs[last]),
            (group.allgather(x), everyone),
            (group.iallgather(x).wait(), everyone),
            (ss.gather_metrics(group, {"w": x})["w"], np.concatenate([np.atleast_1d(a) for a in inputs])),
        ]:
            assert type(got) is Immutable
            assert_same(got.inner, expected, name)
        got = group.gather(x, root=last)
        assert got is None if group.rank != last else type(got) is Immutable
        assert_same(mine, inputs[group.rank], "the input")


def test_blocks_of_an_array_library_stay_in_it(group):
    n, rank = group.size, group.rank
    blocks = inputs_of(group, (n, 3))
    x = Immutable(blocks[rank][::, ::-1].copy()[::, ::-1])  # not row-major
    for got, expected in [
        (group.allgatherv(x), np.concatenate(blocks)),  # first: then all ranks know the library
        (group.scatter(x if rank == 0 else None), blocks[0][rank]),
        (
            group.scatterv(x if rank == 0 else None, [1] * n if rank == 0 else None),
            blocks[0][rank : rank + 1],
        ),
        (group.reduce_scatter(x), reduced(blocks, "sum")[rank]),
        (group.alltoall(x), np.stack([b[rank] for b in blocks])),
        (group.alltoallv(x, [1] * n)[0], np.stack([b[rank] for b in blocks])),
    ]:
        assert type(got) is Immutable
        assert_same(got.inner, expected)


def test_gradients_of_an_array_library_stay_in_it(group):
    x = Immutable(np.full((2, 3), group.rank + 1.0))
    total = ss.Accumulator(group)
    total.add({"w": x})
    for mean in (total.mean()["w"], ss.allreduce_gradients(group, {"w": x})["w"]):
        assert type(mean) is Immutable
        assert_same(mean.inner, np.full((2, 3), (group.size + 1) / 2))
    assert_same(x.inner, np.full((2, 3), group.rank + 1.0), "the input")
    absent = group.allreduce_tree({"w": x if group.rank == 0 else None})["w"]
    assert type(absent) is Immutable
    assert_same(absent.inner, np.ones((2, 3)))


def test_immutable_arrays_cannot_be_received_into(group):
    given = np.zeros(3)
    for verb in (group.allreduce, group.bcast, group.reduce_scatter, group.allgather):
        x = given if verb in (group.allreduce, group.bcast) else np.zeros((group.size, 3))
        with pytest.raises(ss.InvalidArgumentError, match=f"{verb.__name__}: out.* read-only"):
            verb(x, out=Immutable(np.zeros((group.size, 3) if verb == group.allgather else 3)))
    with pytest.raises(ss.InvalidArgumentError, match=r"recv: .*read-only \(.*Immutable\)"):
        group.recv(Immutable(given), 0)
    assert not given.any()


class Silent(Unversioned):
    """Writable memory that does not say so."""


class OfKnownLibrary(Unversioned):
    __module__ = "dpctl.tensor"  # in the table


def test_memory_that_does_not_say_that_it_may_be_written_is_written_of_a_known_library_alone(group):
    for kind, in_place in [(Silent, False), (OfKnownLibrary, True)]:
        x = kind()
        x.bytes[:24].view("float32")[:] = group.rank + 1
        got = group.allreduce(x)
        assert (got is x) == in_place
        total = group.size * (group.size + 1) / 2
        assert set(x.bytes[:24].view("float32")) == {total if in_place else group.rank + 1}
        if not in_place:
            assert_same(got, np.full((2, 3), total, "float32"))


def test_a_tensor_of_objects_is_not_asked_for_its_memory(group):
    class Strings:
        dtype = "<dtype: 'string'>"  # TensorFlow would end the process

        def __dlpack__(self, **options):
            raise AssertionError("asked")

    with pytest.raises(ss.InvalidArgumentError, match=r"'string'.*cannot be sent.*object verb"):
        group.allreduce(Strings())


LIBRARIES = [
    ("mlx.core", "array"),
    ("array_api_strict", "asarray"),
    ("pyarrow", "array"),
    pytest.param("tensorflow", "constant", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("module", "make"), LIBRARIES)
def test_results_are_of_the_library_of_the_input(group, module, make):
    library = pytest.importorskip(module)
    inputs = inputs_of(group, 4)

    def mine():
        return getattr(library, make)(inputs[group.rank].copy())

    for got, expected in [
        (group.scatter(group.allgather(mine()), root=group.size - 1), inputs[group.rank]),
        (group.bcast(mine()), inputs[0]),
        (group.allreduce_tree({"w": mine()})["w"], reduced(inputs, "sum")),
    ]:
        assert isinstance(got, type(mine()))
        elements = np.empty(4, "float32")
        _core.pack([got], elements)
        assert_same(elements, expected)
    x = mine()
    is_new = group.allreduce(x) is not x
    assert is_new == (module != "array_api_strict")  # whose arrays are mutable
    _core.pack([x], elements)
    assert_same(elements, inputs[group.rank] if is_new else reduced(inputs, "sum"))


def test_anything_with_dlpack(group):
    inputs = inputs_of(group, (2, 3))
    inner = inputs[group.rank].copy()
    x = OnlyDLPack(inner)
    group.allreduce(x)
    assert_same(inner, reduced(inputs, "sum"))
