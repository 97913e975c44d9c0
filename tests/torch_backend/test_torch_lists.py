"""Lists of tensors that do not fit, errors of one rank or one operation, and meetings: nothing wrong, nobody left."""

import datetime

import pytest
import samestep as ss
import samestep.torch

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch_versions import since  # noqa: E402

pytestmark = [
    pytest.mark.ranks(1, 3, timeout=120, backends=["native"]),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch renames its verbs
]
REFUSED = (ss.InvalidArgumentError, ss.MismatchError)


@pytest.fixture
def world(over):
    with over("samestep", timeout=datetime.timedelta(seconds=20)) as opened:
        yield opened


def full(value, *shape):
    return torch.full(shape, float(value))


def blocks(world, *shapes):
    """One for each rank: of the given shapes, and then of the last one."""
    n = world.get_world_size()
    return [full(-1, *shape) for shape in (shapes + shapes[-1:] * n)[:n]]


def on_root(world, listed):
    return listed if world.get_rank() == 0 else None


def adjoining(n, count, dtype):
    room = torch.full((n * count + 2,), -1, dtype=dtype)
    return room, [room[1 + i * count : 1 + (i + 1) * count] for i in range(n)]


LAYOUTS = {
    "adjoining": adjoining,
    "backwards": lambda n, count, dtype: (None, adjoining(n, count, dtype)[1][::-1]),
    "with gaps": lambda n, count, dtype: (
        None,
        [row[:count] for row in torch.zeros(n, count + 1, dtype=dtype)],
    ),
    "apart": lambda n, count, dtype: (None, [torch.zeros(count, dtype=dtype) for _ in range(n)]),
    "strided": lambda n, count, dtype: (None, list(torch.zeros(count, n, dtype=dtype).unbind(1))),
}


@pytest.mark.parametrize("count", [0, 1, 5, 70_000])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.uint16], ids=str)
def test_all_gather_into_blocks_that_lie_differently_on_each_rank(world, layout, count, dtype):
    """Those that adjoin, as in `all_gather_object`, are received where they are."""
    n, rank = world.get_world_size(), world.get_rank()
    room, listed = LAYOUTS["adjoining" if rank == 0 else layout](n, count, dtype)
    world.all_gather(listed, torch.full((count,), 3 + rank, dtype=dtype))
    assert all(torch.equal(block, torch.full((count,), 3 + r, dtype=dtype)) for r, block in enumerate(listed))
    if room is not None:
        assert [room[0].item(), room[-1].item()] == [-1 if dtype != torch.uint16 else 65535] * 2


WRONG_ON_ALL = {
    "gather of unequal": lambda w: w.gather(full(1, 2), on_root(w, blocks(w, (1,), (3,), (2,))), dst=0),
    "gather of another shape": lambda w: w.gather(full(1, 2, 3), on_root(w, blocks(w, (3, 2))), dst=0),
    "scatter of unequal": lambda w: w.scatter(full(1, 2), on_root(w, blocks(w, (1,), (3,), (2,))), src=0),
    "scatter of another shape": lambda w: w.scatter(full(1, 2, 3), on_root(w, blocks(w, (3, 2))), src=0),
    "all_gather of unequal": lambda w: w.all_gather(blocks(w, (1,), (3,), (1,)), full(1, 2)),
    "all_gather of another shape": lambda w: w.all_gather(blocks(w, (3, 2)), full(1, 2, 3)),
    "all_gather into sparse": lambda w: w.all_gather([b.to_sparse() for b in blocks(w, (2,))], full(1, 2)),
    "reduce_scatter of another shape": lambda w: w.reduce_scatter(full(0, 3, 2), blocks(w, (2, 3))),
    "reduce_scatter of unequal": lambda w: w.reduce_scatter(full(0, 2), blocks(w, (1,), (3,), (1,))),
    "all_to_all of another shape": lambda w: w.all_to_all(blocks(w, (3, 2)), blocks(w, (2, 3))),
    "broadcast of several dtypes": lambda w: w.group.WORLD.broadcast([full(1, 2), full(1, 2).int()]).wait(),
    "all_reduce of several shapes": lambda w: w.group.WORLD.allreduce([full(1, 2), full(1, 3)]).wait(),
    "all_reduce of several devices": lambda w: w.all_reduce_coalesced(
        [full(1, 2), torch.empty(2, device="meta")]
    ),
    "all_gather_into_tensor": lambda w: w.all_gather_into_tensor(full(0, 7), full(1, 2)),
    "reduce_scatter_tensor": lambda w: w.reduce_scatter_tensor(full(0, 2), full(1, 7)),
}


def goes_on(world):
    x = full(1, 3)
    world.all_reduce(x)
    assert x.tolist() == [world.get_world_size()] * 3


@pytest.mark.parametrize("call", WRONG_ON_ALL)
def test_a_list_that_does_not_fit_is_an_error_on_all_ranks(world, call):
    with pytest.raises(REFUSED) as caught:
        WRONG_ON_ALL[call](world)
    assert isinstance(caught.value, dist.DistBackendError)
    goes_on(world)


def expanded(world):
    return [torch.zeros(1).expand(2) if world.get_rank() == 0 else full(0, 2) for _ in blocks(world, (2,))]


def freed(world):
    outputs = blocks(world, (2,))
    if world.get_rank() == 0:
        outputs[0].untyped_storage().resize_(0)
    return outputs


WRONG_ON_ONE = {  # rank 0
    "all_gather": lambda w, wrong: w.all_gather(blocks(w, (3,) if wrong else (2,), (2,)), full(1, 2)),
    "all_gather into what cannot be written": lambda w, _: w.all_gather(expanded(w), full(1, 2)),
    "all_to_all into what cannot be written": lambda w, _: w.all_to_all(expanded(w), blocks(w, (2,))),
    "reduce_scatter": lambda w, wrong: w.reduce_scatter(full(0, 2), blocks(w, (2 + wrong,))),
    "all_gather_coalesced": lambda w, wrong: w.all_gather_coalesced(
        [[full(0, 2), full(0, 3 + wrong)] for _ in blocks(w, (2,))], [full(1, 2), full(1, 3)]
    ),
    "all_reduce": lambda w, wrong: w.all_reduce(torch.empty(2, device="meta") if wrong else full(1, 2)),
    "all_reduce of bits": lambda w, wrong: w.all_reduce(
        torch.ones(2, dtype=torch.float32 if wrong else torch.int32), w.ReduceOp.BAND
    ),
    "all_reduce of sparse": lambda w, wrong: w.all_reduce(
        full(1, 2).to_sparse(), w.ReduceOp.MAX if wrong else w.ReduceOp.SUM
    ),
    "all_to_all_single": lambda w, wrong: w.all_to_all_single(
        full(0, w.get_world_size() + wrong), full(0, w.get_world_size())
    ),
}


INTO_NO_MEMORY = {
    "all_gather into what has no memory": lambda w, _: w.all_gather(freed(w), full(1, 2)),
    "all_to_all into what has no memory": lambda w, _: w.all_to_all(freed(w), blocks(w, (2,))),
}
WRONG_ON_ONE |= INTO_NO_MEMORY
prints = since(2, 5, "way to print a tensor without memory, as it does for its log")


@pytest.mark.parametrize(
    "call", [pytest.param(call, marks=[prints] * (call in INTO_NO_MEMORY)) for call in WRONG_ON_ONE]
)
def test_what_one_rank_cannot_begin_is_an_error_on_all(world, call):
    rank = world.get_rank()
    with pytest.raises(ss.InvalidArgumentError if rank == 0 else ss.MismatchError) as caught:
        WRONG_ON_ONE[call](world, rank == 0)
    if rank:
        assert "what this rank cannot take" in str(caught.value)
    goes_on(world)


@pytest.mark.ranks(3, timeout=60, backends=["native"])
@pytest.mark.parametrize(
    "shapes", [((1,), (3,), (2,)), ((0,), (2,), (4,))], ids=["two exchanged", "with an empty one"]
)
def test_lengths_of_blocks_are_the_same_on_all_ranks(world, shapes):
    """The totals agree, and the lengths on two of the ranks; also those of what rank 2 itself gets."""
    rank = world.get_rank()
    mine = shapes if rank < 2 else (shapes[1], shapes[0], shapes[2])
    with pytest.raises(ss.MismatchError, match="reduce_scatter"):
        world.reduce_scatter(full(0, *mine[rank]), [full(1, *shape) for shape in mine])
    goes_on(world)
    out = full(0, *shapes[rank])
    world.reduce_scatter(out, [full(r, *shape) for r, shape in enumerate(shapes)])
    assert torch.equal(out, full(3 * rank, *shapes[rank]))


@pytest.mark.ranks(3, timeout=60, backends=["native"])
def test_sparse_tensors_are_the_same_but_for_their_entries(world):
    one = world.get_rank() == 1
    for wrong in (
        torch.sparse_coo_tensor([[0]], [1.0], (3 + one,), check_invariants=True),
        torch.sparse_coo_tensor([[0]], [1.0], (3,), check_invariants=True).to(
            [torch.float32, torch.float64][one]
        ),
        full(1, 3, 2).to_sparse(1 + one),
    ):
        with pytest.raises(ss.MismatchError, match="all_reduce"):
            world.all_reduce(wrong)
    goes_on(world)


def test_an_error_while_results_are_stored_belongs_to_its_operation(world):
    for waits in (True, False):
        outputs = blocks(world, (2,))
        work = world.all_gather(outputs, full(1, 2), async_op=True)
        outputs[0].resize_(5)  # the result does not fit any more
        for _ in range(2 * waits):
            with pytest.raises(RuntimeError, match="unpack"):
                work.wait()
        for _ in range(3):
            other = world.all_reduce(full(1, 2), async_op=True)
            assert other.wait()
            goes_on(world)
        assert work.is_completed()
        assert not work.is_success()


# ---- meeting


def test_worlds_and_groups_follow_each_other_at_one_store(group, tmp_path):
    """As under torchrun, whose store outlives each world; torch gives them the same keys."""
    folder = group.bcast_object(str(tmp_path))
    store = dist.FileStore(f"{folder}/store", group.size)
    samestep.torch.register()
    for _ in range(3):
        dist.init_process_group("samestep", store=store, rank=group.rank, world_size=group.size)
        try:
            everyone = list(range(group.size))
            for local in (False, True, True):
                again = dist.new_group(everyone, use_local_synchronization=local)
                x = full(1, 2)
                dist.all_reduce(x, group=again)
                assert x.tolist() == [group.size] * 2
                dist.destroy_process_group(again)
        finally:
            dist.destroy_process_group()


@pytest.mark.ranks(3, timeout=60, backends=["native"])
def test_ranks_may_have_made_other_groups_before(world):
    rank, found = world.get_rank(), []
    for members in [[0, 1], [0, 2]] if rank == 0 else [[1, 2], [0, 1], [0, 2]]:
        if rank in members:
            of = world.new_group(members, use_local_synchronization=True)
            x = full(rank, 1)
            world.all_reduce(x, group=of)
            found.append(x.item() == sum(members))
    everyone = world.new_group([0, 1, 2], use_local_synchronization=True)
    world.barrier(group=everyone)
    assert found == [True, True]


@pytest.mark.ranks(3, timeout=60, backends=["native"])
def test_neither_the_world_nor_a_group_ends_with_another_group(world, group):
    rank = world.get_rank()

    def made():
        return world.new_group([0, 1, 2], timeout=datetime.timedelta(seconds=20))

    def goes_on_in(of):
        for n in (1, 100_000):
            x = full(rank, n)
            world.all_reduce(x, group=of)
            assert x.tolist() == [3] * n

    first, second = made(), made()
    goes_on_in(first)
    for ended in (first, world.group.WORLD):
        if rank == 1:
            ended.abort()
        else:
            with pytest.raises(ss.PeerLostError, match=r"rank 1 has left group .*: it called abort"):
                world.all_reduce(full(1), group=ended)
        group.barrier()
        goes_on_in(second)
        third = made()
        goes_on_in(third)
        pair = world.new_group([2, 1], use_local_synchronization=True) if rank else None
        if pair:
            x = full(rank, 2)
            world.all_reduce(x, group=pair)
            assert x.tolist() == [3, 3]


@pytest.mark.ranks(3, timeout=60, backends=["native"])
def test_who_has_not_come_to_a_group_is_named_and_it_forms_later(world, group):
    soon = datetime.timedelta(seconds=0.3)
    if world.get_rank() == 0:
        with pytest.raises(ss.TimeoutError, match=r"rank 1 of 2 did not join.*ranks \[0, 2\]"):
            world.new_group([0, 2], timeout=soon, use_local_synchronization=True)
    group.barrier()
    if world.get_rank() != 1:
        of = world.new_group([0, 2], use_local_synchronization=True)
        world.barrier(group=of)
