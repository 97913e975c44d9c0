"""Several arrays on each rank, on the host."""

import numpy as np
import pytest
import samestep as ss
import samestep.distributed as dist
from libraries import ALL, WRITABLE, assert_same, contribution, make

SHAPES = [(0,), (5,), (2, 3)]


def part(rank, j, shape, dtype="f4"):
    return contribution(3 * rank + j, shape, dtype)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("library", ALL)
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_all_reduce(group, library, async_op):
    for shape in SHAPES:
        tensors = [make(library, part(group.rank, j, shape)) for j in range(3)]
        before = list(tensors)
        answer = dist.all_reduce_multigpu(tensors, async_op=async_op)
        assert (answer.wait() if async_op else answer) is None
        total = sum(part(r, j, shape) for r in range(group.size) for j in range(3))
        for x, given in zip(tensors, before, strict=True):
            assert_same(x, total)
            assert (x is given) == (library in WRITABLE)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_are_rounded_once(group, dtype):
    torch = pytest.importorskip("torch")
    tensors = [torch.full((3,), 1.0, dtype=getattr(torch, dtype)) for _ in range(300)]
    dist.all_reduce_multigpu(tensors)
    expected = torch.full((3,), 300.0 * group.size).to(getattr(torch, dtype))
    assert all(torch.equal(x, expected) for x in tensors)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("op", "dtype", "expected"),
    [
        ("avg", "u1", 249),
        ("avg", "i8", 249),
        ("avg", "f4", 249),
        ("max", "i4", 250),
        ("min", "i4", 248),
        ("bor", "u1", 250 | 249 | 248),
        ("land", "u1", 1),
    ],
)
def test_operators(group, op, dtype, expected):
    tensors = [np.full(4, 248 + j, dtype) for j in range(3)]
    dist.all_reduce_multigpu(tensors, op)
    for x in tensors:
        assert_same(x, np.full(4, expected, dtype))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("library", ALL)
def test_reduce(group, library):
    root = group.size - 1
    tensors = [make(library, part(group.rank, j, (2, 3))) for j in range(3)]
    assert dist.reduce_multigpu(tensors, root, dst_tensor=1) is None
    total = sum(part(r, j, (2, 3)) for r in range(group.size) for j in range(3))
    for j, x in enumerate(tensors):
        assert_same(x, total if (group.rank, j) == (root, 1) else part(group.rank, j, (2, 3)))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("library", ALL)
def test_broadcast(group, library):
    root = group.size - 1
    tensors = [make(library, part(group.rank, j, (2, 3))) for j in range(3)]
    assert dist.broadcast_multigpu(tensors, root, src_tensor=2) is None
    for x in tensors:
        assert_same(x, part(root, 2, (2, 3)))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("library", ALL)
def test_all_gather(group, library):
    inputs = [make(library, part(group.rank, j, (2, 3))) for j in range(2)]
    outputs = [[make(library, np.zeros((2, 3), "f4")) for _ in range(2 * group.size)] for _ in range(2)]
    request = dist.all_gather_multigpu(outputs, inputs, async_op=True)
    assert request.wait() is None
    for got in outputs:
        for k in range(group.size):
            for j in range(2):
                assert_same(got[k * 2 + j], part(k, j, (2, 3)))


@pytest.mark.ranks(2, 3)
def test_lists_of_different_lengths_are_an_error_on_all_ranks(group):
    tensors = [np.ones(6) for _ in range(1 + group.rank)]
    outputs = [[np.zeros(6) for _ in range(group.size * len(tensors))] for _ in tensors]
    calls = [
        lambda: dist.all_reduce_multigpu(tensors),
        lambda: dist.reduce_multigpu(tensors, 0),
        lambda: dist.broadcast_multigpu(tensors, 0),
        lambda: dist.all_gather_multigpu(outputs, tensors),
    ]
    for call in calls:
        with pytest.raises(ss.MismatchError):
            call()
    for x in tensors:
        assert_same(x, np.ones(6))
    with pytest.raises(ss.MismatchError, match="rank 1: all_reduce_multigpu of 2 arrays"):
        request = dist.all_reduce_multigpu(tensors, async_op=True)
        while not request.is_completed():
            pass
        assert isinstance(request.exception(), ss.MismatchError)
        request.wait()
    dist.barrier()


@pytest.mark.ranks(1, 2)
def test_wrong_arguments_are_named(group):
    x = np.ones(2)
    for kind, text, act in [
        (TypeError, "tensor_list must be a list", lambda: dist.all_reduce_multigpu(x)),
        (ss.InvalidArgumentError, "at least one", lambda: dist.all_reduce_multigpu([])),
        (
            ss.InvalidArgumentError,
            r"tensor_list\[1\] has 3",
            lambda: dist.all_reduce_multigpu([x, np.ones(3)]),
        ),
        (ss.InvalidArgumentError, "(?i)band", lambda: dist.all_reduce_multigpu([x], "band")),
        (ss.InvalidArgumentError, "src_tensor 1", lambda: dist.broadcast_multigpu([x], 0, src_tensor=1)),
        (ss.InvalidArgumentError, "dst_tensor -1", lambda: dist.reduce_multigpu([x], 0, dst_tensor=-1)),
        (ss.InvalidArgumentError, "1 lists", lambda: dist.all_gather_multigpu([], [x])),
        (
            ss.InvalidArgumentError,
            r"output_tensor_lists\[0\] must have",
            lambda: dist.all_gather_multigpu([[]], [x]),
        ),
    ]:
        with pytest.raises(kind, match=text):
            act()
    dist.barrier()
