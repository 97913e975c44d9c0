"""Random capsules, buffers and array interfaces, good and malformed: python tests/fuzz/arrays.py --cases 1000000

Each is either refused by one of samestep's errors, or seen exactly as it is, as far as its bytes lie in its memory.
"""

import argparse
import collections
import random
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "fakes"))

import samestep as ss
from foreign_arrays import Cuda, Exporter, Unversioned, Versioned
from samestep import _core

EDGES = [
    0,
    1,
    -1,
    2,
    3,
    7,
    31,
    32,
    33,
    63,
    2**31 - 1,
    -(2**31),
    2**31,
    2**32,
    2**57,
    2**61,
    2**62,
    2**63 - 1,
    -(2**63),
]
DLPACK = {
    "int8": (0, 8, 1),
    "uint16": (1, 16, 1),
    "float32": (2, 32, 1),
    "float64": (2, 64, 1),
    "complex64": (5, 64, 1),
}
FORMATS = {"int8": b"b", "uint16": b"H", "float32": b"f", "float64": b"d", "complex64": b"Zf"}


def number(rng, bits=64):
    """Mostly small, sometimes an edge, sometimes anything."""
    kind = rng.random()
    if kind < 0.7:
        return rng.randint(-1, 6)
    value = rng.choice(EDGES) if kind < 0.95 else rng.getrandbits(bits) - 2 ** (bits - 1)
    return max(-(2 ** (bits - 1)), min(2 ** (bits - 1) - 1, value))


def layout(rng):
    """A dtype, a shape and strides in elements; half of them are such that they fit 4,096 bytes."""
    dtype = rng.choice(list(DLPACK))
    n_dims = rng.choice([0, 1, 1, 2, 2, 3, 5, 32])
    if rng.random() < 0.5:
        shape = tuple(rng.randint(0, 4) if i < 3 else 1 for i in range(n_dims))
        strides = tuple(rng.randint(-3, 9) for _ in shape)
    else:
        shape = tuple(number(rng) for _ in range(n_dims))
        strides = tuple(number(rng) for _ in range(n_dims))
    return dtype, shape, None if rng.random() < 0.3 else strides


def compact(shape):
    return tuple(int(np.prod([*shape[i + 1 :]], dtype=object)) for i in range(len(shape)))


def reach(shape, strides, itemsize):
    """The bytes from the first element to the lowest and behind the highest one."""
    low = sum(min(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
    high = sum(max(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
    return low * itemsize, (high + 1) * itemsize


def dlpack(rng, producer):
    dtype, shape, strides = layout(rng)
    offset = rng.choice([1024, 1024, 1024, 0, 2**63, 2**64 - 1])
    odd = rng.random()
    how = {"offset": offset, "null": odd < 0.03}
    how["dtype"] = tuple(rng.randrange(2**b) for b in (8, 8, 16)) if 0.03 < odd < 0.06 else DLPACK[dtype]
    how["device"] = (number(rng, 32), number(rng, 32)) if 0.06 < odd < 0.09 else (1, 0)
    if producer is Versioned:
        how["version"] = (rng.randrange(2**32), 0) if 0.09 < odd < 0.12 else (1, rng.randrange(4))
    x = producer(shape=shape, strides=strides, **how)
    if 0.12 < odd < 0.15:
        x.managed.tensor.n_dims = x.versioned.tensor.n_dims = number(rng, 32)
        if 0 < x.managed.tensor.n_dims <= 32:  # it would be read beyond its end, which nobody can see
            x.managed.tensor.n_dims = x.versioned.tensor.n_dims = -1
    plain = odd >= 0.15 and offset == 1024
    return x, (dtype, shape, strides, x.bytes[1024:]) if plain else None


def buffer(rng):
    dtype, shape, strides = layout(rng)
    itemsize = 8 if dtype in ("complex64", "float64") else np.dtype(dtype).itemsize
    wrapped = 2**63
    in_bytes = (
        None
        if strides is None
        else tuple((s * itemsize + wrapped) % (2 * wrapped) - wrapped for s in strides)
    )
    nbytes = int(np.prod(shape, dtype=object)) * itemsize
    odd = rng.random()
    how = {"null": odd < 0.03, "format": FORMATS[dtype], "itemsize": itemsize}
    how["nbytes"] = nbytes if odd > 0.06 and 0 <= nbytes < 2**63 else number(rng)
    if 0.06 < odd < 0.09:
        how["n_dims"] = rng.choice([-1, 33, 2**31 - 1, -(2**31)])
    if 0.09 < odd < 0.12:
        how["format"] = rng.choice([b">f", b"", b"T{f:x:}", b"ff", b"O", b"x" * 50, None])
    if 0.12 < odd < 0.15:
        how["itemsize"] = number(rng)
    return Exporter(shape=shape, strides=in_bytes, **how), None


def interface(rng):
    dtype, shape, strides = layout(rng)
    anything = [
        None,
        3,
        -1,
        2**80,
        "text",
        "\udcff",
        (),
        (1,),
        [1, "a"],
        {},
        object(),
        (None, None),
        float("nan"),
    ]
    how = {
        "shape": shape,
        "typestr": np.dtype(dtype).str,
        "strides": strides,
        "data": (4096, False),
        "version": 3,
        "stream": None,
    }
    for field in how:
        if rng.random() < 0.1:
            how[field] = rng.choice(anything)
    x = Cuda(**how)
    if rng.random() < 0.1:
        del x.__cuda_array_interface__[rng.choice(list(how))]
    return x, None


MAKERS = {
    "DLPack, versioned": lambda rng: dlpack(rng, Versioned),
    "DLPack": lambda rng: dlpack(rng, Unversioned),
    "buffer": buffer,
    "cuda array interface": interface,
}


def check(x, expected):
    """What became of one array: "refused", or "seen" after its elements have been compared."""
    try:
        seen = _core.view_info(x)
    except (ss.InvalidArgumentError, TypeError) as error:
        assert str(error)
        return "refused"
    assert all(n >= 0 for n in seen[1])
    assert 0 <= seen[3] <= 2**57
    if expected is not None:
        dtype, shape, strides, memory = expected
        itemsize = np.dtype(dtype).itemsize
        steps = compact(shape) if strides is None else strides
        assert (seen[0], seen[1]) == (dtype, shape)
        low, high = reach(shape, steps, itemsize)
        if 0 < seen[3] <= 1 << 16 and low >= -1024 and high <= len(memory):
            memory.base[...] = np.arange(4096) % 251
            in_bytes = [0 if n == 1 else step * itemsize for n, step in zip(shape, steps, strict=True)]
            elements = memory[: len(memory) // 8 * 8].view(dtype)
            whole = np.lib.stride_tricks.as_strided(elements, shape, in_bytes)
            packed = np.empty(seen[3], np.uint8)
            _core.pack([x], packed)
            assert packed.tobytes() == whole.tobytes()
            return "compared"
    return "seen"


def run(seed, n_cases):
    """How often each protocol had each outcome."""
    outcomes = {name: collections.Counter() for name in MAKERS}
    rng = random.Random(seed)
    for case in range(n_cases):
        name = rng.choice(list(MAKERS))
        x, expected = MAKERS[name](rng)
        try:
            outcomes[name][check(x, expected)] += 1
        except Exception as error:
            raise AssertionError(
                f"seed {seed}, case {case}, {name}: {type(error).__name__}: {error}"
            ) from error
        if isinstance(x, Exporter):
            assert x.held == 0
        elif not isinstance(x, Cuda):
            assert x.returned >= 1  # once for each look
    return outcomes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=100_000)
    given = parser.parse_args()
    print(
        "| protocol | arrays | refused | accepted | elements compared | crashes |\n|---|--:|--:|--:|--:|--:|"
    )
    for name, counted in run(given.seed, given.cases).items():
        counts = [counted[outcome] for outcome in ("refused", "seen", "compared")]
        print(f"| {name} | {counted.total():,} | " + " | ".join(f"{count:,}" for count in counts) + " | 0 |")
