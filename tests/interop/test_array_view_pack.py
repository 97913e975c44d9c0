"""pack and unpack: arrays of any layout and library become one run of bytes, and back."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import samestep as ss
from running import script
from samestep import _core


def leaves():
    """Arrays of all layouts with values that tell every element from every other."""
    base = np.arange(120, dtype="f4").reshape(2, 3, 4, 5)
    records = np.zeros(7, [("a", "u1"), ("b", "i4")])
    records["b"] = np.arange(7) + 1000
    return {
        "contiguous": base.copy(),
        "transposed": base.copy().transpose(3, 1, 0, 2),
        "every second": base.copy()[:, ::2, 1:, ::2],
        "backwards": base.copy()[::-1, :, ::-1],
        "0-d": np.array(7, "i8"),
        "0-d of a larger": base.copy()[1, 2, 3, 4:5].reshape(()),
        "no elements": np.zeros((3, 0, 2)),
        "complex": np.arange(6).astype("c16")[::-1],
        "bool": np.array([True, False, True])[::2],
        "bytes": bytearray(b"abcdefg"),
        "memoryview": memoryview(bytearray(b"abcdefg"))[::3],
        "misaligned records": records["b"],
        "large": np.arange(300_000, dtype="f8")[::3],
    }


def packed(x):
    return np.ascontiguousarray(np.asarray(x)).reshape(-1).view(np.uint8)


def run_of(arrays):
    return np.concatenate([packed(x) for x in arrays])


@pytest.mark.parametrize("kind", leaves())
def test_pack_is_row_major(kind):
    x = leaves()[kind]
    out = np.full(packed(x).size, 255, np.uint8)
    assert _core.pack([x], out) is None
    np.testing.assert_array_equal(out, packed(x))


def test_pack_joins_and_unpack_parts():
    arrays = list(leaves().values())
    run = run_of(arrays)
    out = np.zeros_like(run)
    _core.pack(arrays, out)
    np.testing.assert_array_equal(out, run)

    for x in arrays:
        np.asarray(x)[...] = 0
    assert _core.unpack(out, tuple(arrays)) is None
    np.testing.assert_array_equal(run_of(arrays), run)


def test_unpack_leaves_the_gaps_alone():
    whole = np.full((4, 6), 9.0)
    _core.unpack(np.zeros(2 * 3 * 8, np.uint8), [whole[::2, ::2]])
    assert (whole == 9).sum() == 24 - 6


def test_pack_of_no_arrays():
    _core.pack([], np.empty(0, np.uint8))
    _core.unpack(b"" or bytearray(), [])


def test_the_run_may_be_any_contiguous_array_of_the_size():
    out = np.zeros((2, 3), "f4")
    _core.pack([np.arange(6, dtype="f4")], out)
    np.testing.assert_array_equal(out, np.arange(6, dtype="f4").reshape(2, 3))


def test_unpack_takes_a_read_only_run():
    x = np.zeros(3, "u1")
    _core.unpack(memoryview(b"abc"), [x])
    assert bytes(x) == b"abc"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch(dtype):
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, dtype)
    base = torch.arange(24, dtype=dtype).reshape(4, 6)
    arrays = [base.clone(), base.clone().T, base.clone()[:, ::2], torch.nn.Parameter(base.clone())]
    out = np.empty(sum(x.numel() * x.element_size() for x in arrays), np.uint8)
    _core.pack(arrays, out)
    expected = torch.cat([x.detach().contiguous().view(-1) for x in arrays]).view(torch.uint8).numpy()
    np.testing.assert_array_equal(out, expected)

    targets = [torch.zeros_like(x) for x in arrays]
    _core.unpack(out, targets)
    for target, x in zip(targets, arrays, strict=True):
        assert torch.equal(target, x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax(dtype):
    jax = pytest.importorskip("jax")
    x = jax.numpy.arange(24, dtype=dtype).reshape(4, 6)
    out = np.empty(x.nbytes, np.uint8)
    _core.pack([x], out)
    np.testing.assert_array_equal(out, packed(x))
    with pytest.raises(ss.InvalidArgumentError, match=r"arrays\[0\]: the array is read-only"):
        _core.unpack(out, [x])


BAD_CALLS = {
    "not an array": ([np.ones(1), 2.0], TypeError, r"pack: arrays\[1\]: expected an array.*got float"),
    "dtype": (
        [np.ones(1), np.ones(1, "g")],
        ss.InvalidArgumentError,
        r"pack: arrays\[1\]: dtype .*float128|longdouble",
    ),
    "total": (
        [np.ones(1)],
        ss.InvalidArgumentError,
        r"pack: out: needs 8 contiguous bytes.*for 1 arrays, got 16; make",
    ),
}


@pytest.mark.parametrize("kind", BAD_CALLS)
def test_bad_arrays_are_named_and_nothing_is_written(kind):
    arrays, error, match = BAD_CALLS[kind]
    out = np.full(16, 255, np.uint8)
    with pytest.raises(error, match=match):
        _core.pack(arrays, out)
    assert (out == 255).all()
    with pytest.raises(
        error, match=match.replace("pack: out", "unpack: buffer").replace("pack: arr", "unpack: arr")
    ):
        _core.unpack(out, arrays)
    assert arrays[0][0] == 1


def test_not_a_sequence():
    with pytest.raises(TypeError, match="sequence"):
        _core.pack(3, np.empty(0, np.uint8))


def test_a_run_with_gaps_is_refused():
    with pytest.raises(ss.InvalidArgumentError, match="got 8 with gaps"):
        _core.pack([np.ones(1)], np.empty(16, np.uint8)[::2])


PACK_ON_A_DEVICE = script("interop/pack_on_a_device")


def test_arrays_of_a_device_are_refused_where_no_runtime_is_open():
    done = subprocess.run([sys.executable, PACK_ON_A_DEVICE], capture_output=True, text=True, check=True)
    assert "arrays[0]: the array is on a cuda device; copy it" in done.stdout


# --- what may be written -----------------------------------------------------------------------------

UNWRITABLE = {
    "read-only": (
        lambda: np.broadcast_to(np.zeros(3), (3,)),
        r"read-only; pass a writable copy such as np.array\(x\)",
    ),
    "repeated": (
        lambda: np.lib.stride_tricks.as_strided(np.zeros(3), (2, 3), (0, 8)),
        r"share memory \(shape \(2, 3\), strides \(0, 8\) bytes\).*x.clone\(\) or np.array\(x\)",
    ),
    "sliding view": (lambda: np.lib.stride_tricks.as_strided(np.zeros(5), (3, 3), (8, 8)), "share memory"),
    "half a step": (lambda: np.lib.stride_tricks.as_strided(np.zeros(5), (3,), (4,)), "share memory"),
    "there and back": (
        lambda: np.lib.stride_tricks.as_strided(np.zeros(5)[4:], (3, 3), (-8, -8)),
        "share memory",
    ),
}


@pytest.mark.parametrize("kind", UNWRITABLE)
def test_unwritable_arrays_are_refused_and_not_touched(kind):
    make, match = UNWRITABLE[kind]
    x = make()
    first = np.zeros(2)
    run = np.full(16 + x.nbytes, 255, np.uint8)
    with pytest.raises(ss.InvalidArgumentError, match=r"unpack: arrays\[1\]: .*" + match):
        _core.unpack(run, [first, x])
    assert not first.any()
    assert not np.asarray(x).any()


def test_torch_expand_is_refused_as_output():
    torch = pytest.importorskip("torch")
    with pytest.raises(ss.InvalidArgumentError, match=r"share memory.*expand"):
        _core.unpack(np.zeros(24, np.uint8), [torch.zeros(3).expand(2, 3)])


@pytest.mark.parametrize(
    "x",
    [
        np.lib.stride_tricks.as_strided(np.ones(6), (1, 3), (0, 16)),  # a stride that is never taken
        np.lib.stride_tricks.as_strided(np.ones(3), (0, 3), (0, 0)),  # nothing overlaps nothing
        np.ones((3, 4, 5)).transpose(1, 2, 0)[::-1, :, ::-1],
        np.ones((3, 4))[:, :1],
    ],
)
def test_writable_layouts(x):
    _core.unpack(np.zeros(x.nbytes, np.uint8), [x])
    assert not x.any()


def test_pack_refuses_an_unwritable_out():
    out = np.empty(8, np.uint8)
    out.flags.writeable = False
    with pytest.raises(ss.InvalidArgumentError, match="pack: out: the array is read-only"):
        _core.pack([np.ones(1)], out)


# --- the interpreter lock ----------------------------------------------------------------------------


def test_large_copies_let_other_threads_run():
    turns, stop = [0], threading.Event()

    def take_turns():
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0)

    x, out = np.zeros(1 << 25, np.uint8)[::2], np.zeros(1 << 24, np.uint8)
    interval = sys.getswitchinterval()
    thread = threading.Thread(target=take_turns)
    try:
        sys.setswitchinterval(1e3)  # the lock changes hands only where somebody gives it away
        thread.start()
        before = turns[0]
        for _ in range(50):  # on a busy machine the other thread may sleep through some
            _core.pack([x], out)
            if turns[0] > before:
                break
        else:
            pytest.fail("no other thread ran during 50 copies of 16 MiB")
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
