"""Collectives under torch's names: one law for each, on every library, size and backend."""

import functools
import operator

import numpy as np
import pytest
import samestep as ss
import samestep.distributed as dist
from libraries import ALL, SHAPES, WRITABLE, assert_same, contribution, make, outcome

each_library = pytest.mark.parametrize("library", ALL)
CASES = [(shape, async_op) for shape in SHAPES for async_op in (False, True)]


def done(answer, async_op):
    """What the function returned, or its request does."""
    if not async_op:
        return answer
    while not answer.is_completed():
        pass
    assert answer.exception() is None
    return answer.wait()


@pytest.mark.ranks(1, 2, 3)
@each_library
def test_all_reduce(group, library):
    for shape, async_op in CASES:
        x = make(library, contribution(group.rank, shape))
        answer = done(dist.all_reduce(x, async_op=async_op), async_op)
        expected = sum(contribution(r, shape) for r in range(group.size))
        assert_same(outcome(answer, x, library), np.asarray(expected, "f4"))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("op", "combine"),
    [
        (dist.ReduceOp.SUM, operator.add),
        (dist.ReduceOp.PRODUCT, operator.mul),
        (dist.ReduceOp.MIN, np.minimum),
        (dist.ReduceOp.MAX, np.maximum),
        (dist.ReduceOp.BAND, operator.and_),
        (dist.ReduceOp.BOR, operator.or_),
        (dist.ReduceOp.BXOR, operator.xor),
        ("max", np.maximum),
    ],
    ids=str,
)
def test_operators(group, op, combine):
    parts = [contribution(r, 37, "i8") for r in range(group.size)]
    x = parts[group.rank].copy()
    assert dist.all_reduce(x, op) is None
    assert_same(x, functools.reduce(combine, parts))


@pytest.mark.ranks(1, 2, 3)
def test_average(group):
    x = np.full(7, float(group.rank))
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    assert_same(x, np.full(7, (group.size - 1) / 2))


@pytest.mark.ranks(1, 2, 3)
@each_library
def test_broadcast(group, library):
    for shape, async_op in CASES:
        root = group.size - 1
        x = make(library, contribution(group.rank, shape))
        answer = done(dist.broadcast(x, root, async_op=async_op), async_op)
        assert_same(outcome(answer, x, library), contribution(root, shape))


@pytest.mark.ranks(1, 2, 3)
@each_library
def test_reduce_leaves_all_but_the_root_alone(group, library):
    for shape, async_op in CASES:
        root = group.size - 1
        x = make(library, contribution(group.rank, shape))
        answer = done(dist.reduce(x, root, async_op=async_op), async_op)
        total = np.asarray(sum(contribution(r, shape) for r in range(group.size)), "f4")
        expected = total if group.rank == root else contribution(group.rank, shape)
        assert_same(outcome(answer, x, library), expected)


@pytest.mark.ranks(1, 2, 3)
@each_library
def test_all_gather(group, library):
    for shape, async_op in CASES:
        x = make(library, contribution(group.rank, shape))
        slots = [make(library, np.zeros(shape, "f4")) for _ in range(group.size)]
        before = list(slots)
        assert done(dist.all_gather(slots, x, async_op=async_op), async_op) is None
        for rank, slot in enumerate(slots):
            assert_same(
                outcome(slot if library not in WRITABLE else None, slot, library), contribution(rank, shape)
            )
            assert (slot is before[rank]) == (library in WRITABLE)
        assert_same(x, contribution(group.rank, shape))


@pytest.mark.ranks(1, 2, 3)
@each_library
def test_gather(group, library):
    for shape, async_op in CASES:
        root = group.size - 1
        x = make(library, contribution(group.rank, shape))
        slots = (
            [make(library, np.zeros(shape, "f4")) for _ in range(group.size)] if group.rank == root else None
        )
        assert done(dist.gather(x, slots, root, async_op=async_op), async_op) is None
        for rank, slot in enumerate(slots or []):
            assert_same(slot, contribution(rank, shape))


@pytest.mark.ranks(1, 2, 3)
@each_library
def test_scatter(group, library):
    for shape, async_op in CASES:
        root = group.size - 1
        x = make(library, np.zeros(shape, "f4"))
        parts = [make(library, contribution(r, shape)) for r in range(group.size)]
        answer = dist.scatter(x, parts if group.rank == root else [], root, async_op=async_op)
        assert_same(outcome(done(answer, async_op), x, library), contribution(group.rank, shape))


@pytest.mark.ranks(1, 2, 3)
def test_roots_are_rank_zero_unless_said(group):
    x, slots = np.full(2, float(group.rank)), [np.zeros(2) for _ in range(group.size)]
    dist.gather(x, slots if group.rank == 0 else None)
    if group.rank == 0:
        assert_same(np.stack(slots)[:, 0], np.arange(float(group.size)))
    dist.scatter(x, slots if group.rank == 0 else None)
    assert_same(x, np.full(2, float(group.rank)))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("library", WRITABLE)
def test_gaps_in_memory_are_left_alone(group, library):
    wide = make(library, np.full((4, 6), -1.0))
    x = wide[::2, 1::2]  # 2 x 3
    x[...] = make(library, np.full((2, 3), float(group.rank)))
    dist.all_reduce(x)
    expected = np.full((4, 6), -1.0)
    expected[::2, 1::2] = sum(range(group.size))
    assert_same(wide, expected)
    x[...] = make(library, np.full((2, 3), float(group.rank)))
    dist.broadcast(x, group.size - 1)
    expected[::2, 1::2] = group.size - 1
    assert_same(wide, expected)
    slots = [make(library, np.zeros((3, 2))).T for _ in range(group.size)]
    dist.all_gather(slots, x.T.T)
    assert_same(slots[-1], np.full((2, 3), group.size - 1.0))
    dist.scatter(x, slots if group.rank == 0 else None)
    assert_same(wide, expected)


@pytest.mark.ranks(2, 3)
def test_shapes_may_differ_where_counts_agree(group):
    shape = [(6,), (2, 3), (3, 1, 2)][group.rank]
    x = contribution(group.rank, 6).reshape(shape)
    dist.all_reduce(x)
    assert_same(x.reshape(-1), sum(contribution(r, 6) for r in range(group.size)))
    x = contribution(group.rank, 6).reshape(shape)
    dist.broadcast(x, 1)
    assert_same(x, contribution(1, 6).reshape(shape))
    slots = [np.zeros(shape, "f4") for _ in range(group.size)]
    dist.all_gather(slots, contribution(group.rank, (2, 3)))
    assert_same(slots[1], contribution(1, 6).reshape(shape))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("how", ["count", "dtype", "op", "root", "function"])
def test_ranks_that_disagree_all_learn_it_and_go_on(group, how):
    odd = group.rank == group.size - 1
    x = np.ones(
        (2, 3) if not (odd and how == "count") else (2, 4), "f4" if not (odd and how == "dtype") else "f8"
    )
    with pytest.raises(ss.MismatchError, match=f"rank {group.size - 1}") as caught:
        if how == "root":
            dist.broadcast(x, int(odd))
        elif how == "function" and odd:
            dist.barrier()
        else:
            dist.all_reduce(x, dist.ReduceOp.MAX if odd and how == "op" else dist.ReduceOp.SUM)
    texts = group.allgather_object(str(caught.value))
    assert len(set(texts)) == 1
    if how == "dtype":
        assert "float32" in texts[0]
        assert "float64" in texts[0]
    y = np.ones(2)
    dist.all_reduce(y)
    assert_same(y, np.full(2, float(group.size)))


@pytest.mark.ranks(2, 3)
def test_any_number_in_any_mixture_and_order(group):
    n, me = group.size, group.rank
    sums = [np.full(k, float(me)) for k in (0, 1, 7, 5000)]
    slots = [np.zeros(3) for _ in range(n)]
    last = np.full(4, float(me))
    requests = [dist.all_reduce(x, async_op=True) for x in sums]
    requests.append(dist.all_gather(slots, np.full(3, float(me)), async_op=True))
    requests.append(dist.barrier(async_op=True))
    requests.append(dist.broadcast(last, n - 1, async_op=True))
    for request in reversed(requests):
        assert request.wait(60) is None
        assert request.is_completed()
        assert request.done()
    for x in sums:
        assert_same(x, np.full(x.shape, float(sum(range(n)))))
    assert_same(np.stack(slots)[:, 0], np.arange(float(n)))
    assert_same(last, np.full(4, n - 1.0))


@pytest.mark.ranks(2, 3)
def test_a_request_that_is_dropped_is_carried_out(group):
    slots = [np.zeros((2, 2)) for _ in range(group.size)]
    parts = [np.ones(100_000) for _ in range(50)]
    for x in parts[1:]:
        dist.all_reduce(x, async_op=True)
    dist.all_gather(slots, np.full((2, 2), float(group.rank)), async_op=True)
    part = dist.new_group()
    dist.all_reduce(parts[0], async_op=True, group=part)
    dist.destroy_process_group()
    assert_same(np.stack(slots)[:, 0, 0], np.arange(float(group.size)))
    for x in parts:
        assert_same(x, np.full(100_000, float(group.size)))


@pytest.mark.ranks(2, 3)
def test_a_barrier_is_not_completed_before_all_are_there(group):
    if group.rank == 0:
        group.recv(np.empty(1), 1)
    request = dist.barrier(async_op=True)
    if group.rank == 1:
        early = [request.is_completed() for _ in range(50)]
        group.send(np.ones(1), 0)
        assert not any(early)
    request.wait()
    assert request.is_completed()


@pytest.mark.ranks(2)
def test_a_wait_that_runs_out_breaks_nothing(group):
    x = np.ones(3)
    if group.rank == 0:
        request = dist.all_reduce(x, async_op=True)
        with pytest.raises(ss.TimeoutError, match="allreduce"):
            request.wait(0.05)
        group.send(np.ones(1), 1)
        request.wait()
    else:
        group.recv(np.empty(1), 0)
        dist.all_reduce(x)
    assert_same(x, np.full(3, 2.0))


@pytest.mark.ranks(1, 2)
def test_autograd_learns_of_what_was_written(group):
    torch = pytest.importorskip("torch")
    weight = torch.ones(2, 3, requires_grad=True)
    x = torch.ones(2, 3)
    y = (weight * x).sum()
    dist.all_reduce(x)
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.backward()
    slots = [torch.ones(2) for _ in range(group.size)]
    y = (torch.ones(2, requires_grad=True) * slots[0]).sum()
    dist.all_gather(slots, torch.ones(2))
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.backward()


@pytest.mark.ranks(1, 2)
def test_wrong_lists_are_named(group):
    x, n = np.ones(3), group.size
    fine = [np.ones(3) for _ in range(n)]
    wrong = [
        (TypeError, "tensor_list must be a list or tuple", np.ones((n, 3))),
        (ss.InvalidArgumentError, f"tensor_list must have {n} arrays, got {n + 1}", [*fine, x]),
        (ss.InvalidArgumentError, r"tensor_list\[0\] has 2 elements of float64", [np.ones(2), *fine[1:]]),
        (ss.InvalidArgumentError, r"tensor_list\[0\] has 3 elements of int32", [np.ones(3, "i4"), *fine[1:]]),
        (TypeError, r"tensor_list\[0\] must be an array, got str", ["x", *fine[1:]]),
        (ss.InvalidArgumentError, r"tensor_list\[0\] cannot be written", (make("read-only", x), *fine[1:])),
    ]
    for kind, text, tensors in wrong:
        with pytest.raises(kind, match=f"all_gather: {text}"):
            dist.all_gather(tensors, x)
    dist.all_gather(tuple(fine), x)
    with pytest.raises(ss.InvalidArgumentError, match="gather_list"):
        dist.gather(x, None if group.rank == 0 else fine, 0)
    with pytest.raises(ss.InvalidArgumentError, match="scatter_list"):
        dist.scatter(x, [] if group.rank == 0 else fine, 0)


@pytest.mark.ranks(1, 2)
def test_wrong_arguments_are_named(group):
    x = np.ones(2)
    for act, text in [
        (lambda: dist.all_reduce([1.0]), "all_reduce: tensor must be an array, got list"),
        (lambda: dist.all_reduce(1.0), "all_reduce: tensor must be an array, got float"),
        (lambda: dist.broadcast(np.float64(1), 0), "broadcast: tensor must be an array, got float64"),
        (lambda: dist.broadcast(x, "0"), "broadcast: src must be an int, got str"),
        (lambda: dist.broadcast(x, True), "broadcast: src must be an int, got bool"),
        (lambda: dist.reduce(x), "reduce: dst"),
        (lambda: dist.all_reduce(x, group="world"), "group must be"),
        (lambda: dist.all_reduce(x, group=0), "group must be"),
        (lambda: dist.barrier(group=group.split(0)), "new_group"),
    ]:
        with pytest.raises(TypeError, match=text):
            act()
    for act, text in [
        (lambda: dist.broadcast(x, group.size), rf"src {group.size} is not in the group.*\[0"),
        (lambda: dist.broadcast(x, -1), "src -1"),
        (lambda: dist.reduce(x, group_dst=group.size), f"group_dst {group.size} is outside"),
        (lambda: dist.broadcast(x, 0, group_src=0), "give one"),
        (lambda: dist.gather(x, None, 0, group_dst=0), "give one"),
        (lambda: dist.all_reduce(x, "median"), "median"),
        (lambda: dist.all_reduce(np.array(["a"])), "str|U1"),
        (lambda: dist.all_reduce(np.ones(2, "f4"), dist.ReduceOp.BAND), "(?i)band"),
    ]:
        with pytest.raises(ss.InvalidArgumentError, match=text):
            act()
    dist.all_reduce(x)
    assert_same(x, np.full(2, float(group.size)))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("layout", ["C", "F"])
def test_one_array_in_several_requests(group, layout):
    """Each acts on what the one before has left, whichever is waited for first."""
    n = group.size
    x = np.full((3, 4), group.rank + 1.0, order=layout)
    blocks = [np.zeros((3, 4), order=layout) for _ in range(n)]
    requests = [
        dist.all_reduce(x, async_op=True),
        dist.all_gather(blocks, x, async_op=True),
        dist.all_reduce(blocks[-1], async_op=True),
        dist.scatter(x, blocks if group.rank == 0 else None, src=0, async_op=True),
    ]
    for request in reversed(requests):
        request.wait()
    total = n * (n + 1) / 2
    assert_same(blocks[-1], np.full((3, 4), total * n))
    assert_same(x, np.full((3, 4), total * n if group.rank == n - 1 else total))
