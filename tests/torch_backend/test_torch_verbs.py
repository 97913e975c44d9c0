"""Every verb of torch.distributed, with exact data."""

import datetime
import functools
import itertools

import pytest
import samestep as ss

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch_versions import since  # noqa: E402

pytestmark = [
    pytest.mark.ranks(1, 3, timeout=120, backends=["native"]),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch renames its verbs
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # which its optimizers use
]

COUNTS = [0, 1, 5, 10_007]
DTYPES = ["float32", "float64", "bfloat16", "float16", "int64", "uint8", "complex64"]


@pytest.fixture
def world(over):
    with over("samestep") as opened:
        yield opened


def of_rank(rank, count=5, dtype=torch.float32):
    """Small whole numbers, exact in any of the types for up to 3 ranks."""
    return (torch.arange(count) % 13 + rank).to(dtype)


def equal(got, want):
    assert got.dtype == want.dtype
    assert torch.equal(got, want), (got, want)


def everyone(world):
    return range(world.get_world_size())


@pytest.mark.parametrize(
    ("count", "dtype"), [*((count, "float32") for count in COUNTS), *((5, dtype) for dtype in DTYPES[1:])]
)
def test_all_reduce(world, count, dtype):
    kind = getattr(torch, dtype)
    x = of_rank(world.get_rank(), count, kind)
    assert world.all_reduce(x) is None
    equal(x, sum(of_rank(r, count, kind) for r in everyone(world)))


@pytest.mark.parametrize("shape", [(1,), (5,), (1, 2), (3, 2), ()])
def test_groups_take_a_tensor_in_place_of_a_list(world, shape):
    """As the groups of torch do: with a root, an operator and a timeout in place of the object of options."""
    group, op, last = world.group.WORLD, world.ReduceOp, world.get_world_size() - 1
    is_root, minute = world.get_rank() == last, datetime.timedelta(minutes=1)

    def given(rank=None):
        count = torch.Size(shape).numel()
        return of_rank(world.get_rank() if rank is None else rank, count).reshape(shape)

    parts = [given(r) for r in everyone(world)]
    reductions = {
        op.SUM: sum(parts),
        op.MAX: functools.reduce(torch.maximum, parts),
        op.MIN: functools.reduce(torch.minimum, parts),
    }
    for operator, want in reductions.items():
        calls = [
            lambda x, o=operator: group.allreduce(x, o),
            lambda x, o=operator: group.allreduce(x, op=o),
            lambda x, o=operator: group.allreduce([x], o, minute),
            lambda x, o=operator: group.allreduce(tensor=x, timeout=minute, op=o),
        ]
        for call in calls:
            x = given()
            call(x).wait()
            equal(x, want)
        for call in (
            lambda x, o=operator: group.reduce(x, last, o),
            lambda x, o=operator: group.reduce(x, root=last, op=o),
        ):
            x = given()
            call(x).wait()
            equal(x, want if is_root else given())
        out = torch.empty(shape)
        group.reduce_scatter(out, [given() for _ in parts], operator).wait()
        equal(out, want)
    for call in (lambda x: group.broadcast(x, last), lambda x: group.broadcast(tensor=x, root=last)):
        x = given()
        call(x).wait()
        equal(x, given(last))
    gathered = [torch.empty(shape) for _ in parts]
    group.allgather(gathered, given()).wait()
    assert all(map(torch.equal, gathered, parts))
    gathered = [torch.empty(shape) for _ in parts]
    group.gather(gathered if is_root else [], given(), last).wait()
    assert not is_root or all(map(torch.equal, gathered, parts))
    out = torch.empty(shape)
    group.scatter(out, parts if is_root else [], last).wait()
    equal(out, given())
    group.barrier(minute).wait()
    by_options = given()
    group.allreduce([by_options], opts=op.MAX).wait()
    equal(by_options, reductions[op.MAX])
    with pytest.raises(TypeError, match="no argument 'rank'"):
        group.broadcast(given(), rank=last)
    with pytest.raises(TypeError, match="broadcast: the root is missing"):
        group.broadcast(given())
    for many in (
        lambda x, o: group.allreduce([x], o, minute),
        lambda x, o: group.allreduce([x], o, op=op.MAX),
    ):
        with pytest.raises(TypeError, match="allreduce: there are too many arguments"):
            many(given(), world.AllreduceOptions())


@pytest.mark.parametrize("count", [4, 300_000])
def test_all_reduce_coalesced_of_tensors_that_share_memory(world, count):
    """Each is the sum of what all ranks passed, as with gloo: no element is added twice."""
    views = {
        "twice": lambda x: [x, x],
        "transposed": lambda x: [x, x.t()],
        "in part": lambda x: [x[0], x.flatten()[count // 2 : count + 2]],
    }
    for view in views.values():
        x = of_rank(world.get_rank(), 2 * count).reshape(2, count)
        world.all_reduce_coalesced(view(x))
        whole = sum(of_rank(r, 2 * count) for r in everyone(world)).reshape(2, count)
        for got, want in zip(view(x), view(whole), strict=True):
            equal(got, want)


OPS = {
    "AVG": lambda parts: sum(parts) / len(parts),
    "PRODUCT": lambda parts: functools.reduce(torch.mul, parts),
    "MIN": lambda parts: functools.reduce(torch.minimum, parts),
    "MAX": lambda parts: functools.reduce(torch.maximum, parts),
}
BITS = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}


@pytest.mark.parametrize("op", OPS)
def test_operators(world, op):
    x = of_rank(world.get_rank(), dtype=torch.float64)
    world.all_reduce(x, getattr(world.ReduceOp, op))
    torch.testing.assert_close(
        x, OPS[op]([of_rank(r, dtype=torch.float64) for r in everyone(world)]), rtol=1e-15, atol=0
    )


@pytest.mark.parametrize("op", BITS)
def test_operators_on_bits(world, op):
    x = of_rank(world.get_rank(), dtype=torch.int32)
    world.all_reduce(x, getattr(world.ReduceOp, op))
    equal(x, functools.reduce(BITS[op], [of_rank(r, dtype=torch.int32) for r in everyone(world)]))


@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "MAX"])
@pytest.mark.parametrize("n_tensors", [1, 2])
def test_the_group_takes_an_operator_in_place_of_options(world, op, n_tensors):
    group = world.distributed_c10d._get_default_group()
    values = [of_rank(world.get_rank()) + n for n in range(n_tensors)]
    group.allreduce(values, getattr(dist.ReduceOp, op)).wait()
    reduced = {**OPS, "SUM": sum}[op]
    for n, value in enumerate(values):
        equal(value, reduced([of_rank(r) + n for r in everyone(world)]))


def test_strided_memory_is_reduced_where_it_lies(world):
    whole = torch.zeros(6, 8)
    whole[::2, 1::3] = world.get_rank() + 1.0
    world.all_reduce(whole[::2, 1::3])
    total = sum(r + 1.0 for r in everyone(world))
    assert (whole[::2, 1::3] == total).all()
    assert whole.sum() == total * whole[::2, 1::3].numel()


LAYOUTS = {
    "transposed": lambda values: values.T.contiguous().T,
    "with gaps": lambda values: torch.stack([values, values], dim=-1)[..., 0],
    "with an order of axes and gaps": lambda values: torch.stack([values.T, values.T], dim=-1)[..., 0].T,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_may_differ_in_strides(world, layout):
    rank, n, last = world.get_rank(), world.get_world_size(), world.get_world_size() - 1

    def matrix(of):
        values = of_rank(of, 6).view(2, 3)
        return values if rank == 0 else LAYOUTS[layout](values)

    total = sum(of_rank(r, 6).view(2, 3) for r in everyone(world))
    for async_op in (False, rank == 0, True):
        x = matrix(rank)
        work = world.all_reduce(x, async_op=async_op)
        if work is not None:
            work.wait()
        equal(x, total)
    x = matrix(rank)
    world.reduce(x, last)
    equal(x, total if rank == last else matrix(rank))
    x = matrix(rank)
    world.broadcast(x, last)
    equal(x, matrix(last))
    got, x = [torch.empty(2, 3) for _ in range(n)], matrix(0)
    world.all_gather(got, matrix(rank))
    world.scatter(x, got if rank == 0 else None, src=0)
    equal(x, matrix(rank))
    world.gather(x, got if rank == 0 else None, dst=0)
    x = matrix(rank)
    world.reduce_scatter(x, [matrix(rank) for _ in range(n)])
    equal(x, total)
    x = matrix(rank)
    world.reduce_scatter_tensor(x, torch.cat([matrix(rank)] * n))
    equal(x, total)
    x = matrix(rank)
    world.all_gather_into_tensor(whole := torch.empty(2 * n, 3), x)
    for one in (torch.stack(got), whole.view(n, 2, 3)):
        equal(one, torch.stack([of_rank(r, 6).view(2, 3) for r in range(n)]))


def test_elements_that_share_memory_are_not_written(world):
    """Whatever the rank: they can still be sent."""
    rank, shared = world.get_rank(), torch.tensor([[1.0, 2.0]]).T.expand(2, 3)
    with pytest.raises(ss.InvalidArgumentError, match="share memory"):
        world.all_reduce(shared)
    x = shared if rank == 0 else torch.empty(2, 3)
    world.broadcast(x, 0)
    equal(x, shared)


def test_sparse_sum(world):
    rank, n = world.get_rank(), world.get_world_size()
    x = torch.sparse_coo_tensor([[rank, n]], [[1.0, 2.0], [3.0, 4.0]], (n + 1, 2), check_invariants=True)
    world.all_reduce(x)
    want = torch.tensor([[1.0, 2.0]] * n + [[3.0 * n, 4.0 * n]])
    equal(x.to_dense(), want)


@pytest.mark.parametrize("count", COUNTS)
def test_reduce_leaves_the_others_alone(world, count):
    dst = world.get_world_size() - 1
    x = of_rank(world.get_rank(), count)
    world.reduce(x, dst)
    here = world.get_rank() == dst
    equal(x, sum(of_rank(r, count) for r in everyone(world)) if here else of_rank(world.get_rank(), count))


@pytest.mark.parametrize("dtype", [*DTYPES, "bool", "float8_e4m3fn"])
def test_broadcast(world, dtype):
    kind = getattr(torch, dtype)
    x = of_rank(world.get_rank(), 7).to(kind)
    world.broadcast(x, world.get_world_size() - 1)
    equal(x.to(torch.complex64), of_rank(world.get_world_size() - 1, 7).to(kind).to(torch.complex64))


@pytest.mark.parametrize("count", COUNTS)
def test_gathering(world, count):
    n, rank = world.get_world_size(), world.get_rank()
    mine, want = of_rank(rank, count), [of_rank(r, count) for r in range(n)]
    got = [torch.empty(count) for _ in range(n)]
    world.all_gather(got, mine)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    flat, stacked = torch.empty(n * count), torch.empty(n, count)
    world.all_gather_into_tensor(flat, mine)
    world.all_gather_into_tensor(stacked, mine)
    equal(flat, torch.cat(want))
    equal(stacked, torch.stack(want))
    got = [torch.empty(count) for _ in range(n)] if rank == 0 else None
    world.gather(mine, got, dst=0)
    assert got is None or all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.float8_e4m3fn]
)
def test_all_gather_into_one_tensor_is_the_same_operation_however_each_rank_calls_it(world, dtype):
    """With another layout, with gradients, in place, or with a Work."""
    rank, n = world.get_rank(), world.get_world_size()
    want = torch.stack([of_rank(r, 6) for r in range(n)]).to(dtype)
    strided = torch.stack([of_rank(rank, 6)] * 2, 1).to(dtype)[:, 0]
    into = torch.empty(n, 6, dtype=dtype)
    world.all_gather_into_tensor(into, strided if rank == 0 else want[rank])
    equal(into.float(), want.float())
    if dtype.is_floating_point:
        into = torch.zeros(n, 6, dtype=dtype)
        world.all_gather_into_tensor(into, want[rank].clone().requires_grad_(rank == n - 1))
        equal(into.float(), want.float())
        assert not into.requires_grad
    into = torch.zeros(n, 6, dtype=dtype)
    into[rank] = want[rank]
    work = world.all_gather_into_tensor(into, into[rank], async_op=rank == 0)
    if work is not None:
        work.wait()
    equal(into.float(), want.float())


def test_all_gather_of_parts_that_differ_in_length(world):
    got = [torch.empty(r + 1) for r in everyone(world)]
    world.all_gather(got, of_rank(world.get_rank(), world.get_rank() + 1))
    assert all(torch.equal(part, of_rank(r, r + 1)) for r, part in enumerate(got))


@pytest.mark.parametrize("count", COUNTS)
def test_scatter_and_reduce_scatter(world, count):
    n, rank = world.get_world_size(), world.get_rank()
    out = torch.empty(count)
    world.scatter(out, [of_rank(10 + r, count) for r in range(n)] if rank == n - 1 else None, src=n - 1)
    equal(out, of_rank(10 + rank, count))
    blocks = [of_rank(rank + r, count) for r in range(n)]
    want = sum(of_rank(r + rank, count) for r in range(n))
    world.reduce_scatter(out, blocks)
    equal(out, want)
    world.reduce_scatter_tensor(out, torch.cat(blocks))
    equal(out, want)


def test_reduce_scatter_of_blocks_that_differ_in_length(world):
    n, rank = world.get_world_size(), world.get_rank()
    out = torch.empty(rank + 1)
    world.reduce_scatter(out, [of_rank(rank, r + 1) for r in range(n)])
    equal(out, sum(of_rank(r, rank + 1) for r in range(n)))


def block(sender, receiver, count):
    return of_rank(3 * sender + receiver, count)


@pytest.mark.parametrize("count", COUNTS)
def test_all_to_all(world, count):
    n, rank = world.get_world_size(), world.get_rank()
    mine = [block(rank, r, count) for r in range(n)]
    want = [block(r, rank, count) for r in range(n)]
    got = [torch.empty(count) for _ in range(n)]
    world.all_to_all(got, mine)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    out = torch.empty(n * count)
    world.all_to_all_single(out, torch.cat(mine))
    equal(out, torch.cat(want))


def test_all_to_all_of_ragged_rows(world):
    n, rank = world.get_world_size(), world.get_rank()
    sent, received = [rank + r for r in range(n)], [r + rank for r in range(n)]
    rows = torch.cat([torch.full((k, 2), 10.0 * rank + r) for r, k in enumerate(sent)])
    out = torch.empty(sum(received), 2)
    world.all_to_all_single(out, rows, received, sent)
    equal(out, torch.cat([torch.full((k, 2), 10.0 * r + rank) for r, k in enumerate(received)]))


def test_many_operations_are_under_way_at_once(world):
    parts = [of_rank(world.get_rank() + i, 100 + i) for i in range(40)]
    works = [world.all_reduce(x, async_op=True) for x in parts]
    for work in reversed(works):
        assert work.wait() is True
        assert work.is_completed()
    for i, x in enumerate(parts):
        equal(x, sum(of_rank(r + i, 100 + i) for r in everyone(world)))


def test_polling_alone_ends_an_operation(world):
    x = of_rank(world.get_rank(), 100_000)
    work = world.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    equal(x, sum(of_rank(r, 100_000) for r in everyone(world)))


def test_a_dropped_operation_is_carried_out(world):
    x = of_rank(world.get_rank())
    world.all_reduce(x, async_op=True)
    world.barrier()
    equal(x, sum(of_rank(r) for r in everyone(world)))


def test_futures(world):
    x = of_rank(world.get_rank())
    future = world.all_reduce(x, async_op=True).get_future()
    assert future.then(lambda f: f.value()[0].sum()).wait() == x.sum()
    assert torch.futures.collect_all([future]).wait()[0].value()[0] is not None


def test_objects(world):
    n, rank = world.get_world_size(), world.get_rank()
    got = [None] * n
    world.all_gather_object(got, {"rank": rank, "text": "x" * rank})
    assert got == [{"rank": r, "text": "x" * r} for r in range(n)]
    found = [{"from": rank}, rank]
    world.broadcast_object_list(found, src=n - 1)
    assert found == [{"from": n - 1}, n - 1]
    got = [None] * n if rank == 0 else None
    world.gather_object(rank, got, dst=0)
    assert got in (None, list(range(n)))
    part = [None]
    world.scatter_object_list(part, [f"for {r}" for r in range(n)] if rank == 0 else None, src=0)
    assert part == [f"for {rank}"]


@pytest.mark.ranks(3, timeout=60, backends=["native"])
def test_messages(world):
    n, rank = world.get_world_size(), world.get_rank()
    after, before = (rank + 1) % n, (rank - 1) % n
    for count in (0, 3, 200_000):
        got = torch.empty(count)
        ops = [
            world.P2POp(world.isend, of_rank(rank, count), after),
            world.P2POp(world.irecv, got, before),
        ]
        for work in world.batch_isend_irecv(ops):
            work.wait()
        equal(got, of_rank(before, count))
    if rank == 0:
        senders = set()
        for _ in range(1, n):
            got = torch.empty(2)
            sender = world.recv(got, tag=5)
            equal(got, of_rank(sender, 2))
            senders.add(sender)
        assert senders == set(range(1, n))
    else:
        world.send(of_rank(rank, 2), 0, tag=5)


@pytest.mark.ranks(3, timeout=60, backends=["native"])
def test_groups(world):
    rank = world.get_rank()
    for members in ([0, 2], [1], [0, 1, 2], [1, 2]):
        of = world.new_group(members)
        if rank in members:
            x = of_rank(rank)
            world.all_reduce(x, group=of)
            equal(x, sum(of_rank(r) for r in members))
            y = of_rank(rank)
            world.broadcast(y, members[-1], group=of)
            equal(y, of_rank(members[-1]))
            world.destroy_process_group(of)
    world.barrier()


def test_ending_and_beginning_again(over):
    for _ in range(3):
        with over("samestep") as world:
            x = torch.ones(3)
            world.all_reduce(x)
            assert x[0] == world.get_world_size()
            assert world.get_backend() == "samestep"


# ---- errors


@pytest.mark.ranks(3, timeout=60, backends=["native"])
def test_ranks_that_disagree_are_told_and_go_on(world):
    import samestep as ss

    with pytest.raises(ss.MismatchError, match="do not agree") as caught:
        world.all_reduce(torch.ones(3 + (world.get_rank() == 1)))
    assert isinstance(caught.value, dist.DistBackendError)
    x = torch.ones(2)
    world.all_reduce(x)
    assert x[0] == world.get_world_size()


@pytest.mark.ranks(3, timeout=60, backends=["native"])
def test_who_is_missing_is_named(world, group):
    if world.get_rank() != 1:
        with pytest.raises(dist.DistBackendError, match=r"rank 1|ranks? .*1"):
            world.group.WORLD.monitored_barrier(datetime.timedelta(seconds=0.3))
    group.barrier()
    if world.get_rank() == 1:
        world.barrier()


def test_what_cannot_be_carried_says_what_to_do(world):
    import samestep as ss

    with pytest.raises(ss.InvalidArgumentError, match=r"\.cpu\(\)"):
        world.all_reduce(torch.empty(3, device="meta"))
    with pytest.raises(ss.InvalidArgumentError, match="split_sizes"):
        world.all_to_all_single(torch.empty(3), torch.empty(3), [7], [3])
    with pytest.raises(ValueError, match=r"float32|bitwise|BAND|band"):
        world.all_reduce(torch.ones(2), world.ReduceOp.BAND)


# ---- what is built on the verbs


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_sharded_optimizer(over):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    results = []
    for sharded in (False, True):
        with over("samestep") as world:
            torch.manual_seed(0)
            net = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Linear(9, 2)))
            opt = (
                ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
                if sharded
                else torch.optim.Adam(net.parameters(), lr=0.01)
            )
            for step in range(3):
                opt.zero_grad()
                net(torch.ones(3, 4) * (world.get_rank() + step)).square().mean().backward()
                opt.step()
            results.append([p.detach().clone() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@since(2, 6, "torch.distributed.fsdp.fully_shard")
def test_fully_sharded_parameters(over):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(7, 7, dtype=torch.float64) for _ in range(3)))

    with over("samestep") as world:
        n, rank = world.get_world_size(), world.get_rank()
        net, whole = model(), model()
        mesh = init_device_mesh("cpu", (n,))
        for layer in net:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        opt, whole_opt = (torch.optim.SGD(m.parameters(), 0.1) for m in (net, whole))
        for step in range(3):
            net(torch.full((2, 7), rank + step / 4, dtype=torch.float64)).square().mean().backward()
            for r in range(n):
                x = torch.full((2, 7), r + step / 4, dtype=torch.float64)
                (whole(x).square().mean() / n).backward()
            for each in (opt, whole_opt):
                each.step()
                each.zero_grad()
        for sharded, p in zip(net.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(sharded.full_tensor(), p, rtol=1e-12, atol=1e-12)


def test_sampler_gives_each_rank_its_part(world):
    from torch.utils.data import DistributedSampler

    sampler = DistributedSampler(range(12), shuffle=True, seed=4)
    parts = [None] * world.get_world_size()
    world.all_gather_object(parts, list(sampler))
    assert sorted(itertools.chain(*parts)) == list(range(12))


def test_profiler_sees_the_verbs(world):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        world.all_reduce(torch.ones(3))
    assert any("samestep:all_reduce" in event.name for event in profile.events())


@pytest.mark.ranks(3, timeout=60, backends=["native"])
def test_a_profiler_does_not_wait(world):
    """All ranks send before they receive, more than the transport buffers."""
    n, rank = world.get_world_size(), world.get_rank()
    got = torch.empty(3_000_000)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        works = [world.isend(of_rank(rank, 3_000_000), (rank + 1) % n), world.irecv(got, (rank - 1) % n)]
        for work in works:
            work.wait()
    equal(got, of_rank((rank - 1) % n, 3_000_000))
    assert {"samestep:send", "samestep:recv"} <= {event.name for event in profile.events()}
