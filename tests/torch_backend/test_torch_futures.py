"""Futures of operations, as Python and C++ wait for them, and what torch asks of a backend by name."""

import datetime
import threading

import pytest
import samestep as ss

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch.nn.parallel import DistributedDataParallel  # noqa: E402

pytestmark = [
    pytest.mark.ranks(1, 3, timeout=120, backends=["native"]),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch renames its verbs
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # and what it calls itself
]


@pytest.fixture
def world(over):
    with over("samestep", timeout=datetime.timedelta(seconds=20)) as opened:
        yield opened


def total(world, x):
    return sum(x + rank for rank in range(world.get_world_size()))


@pytest.mark.parametrize("count", [0, 1, 300_000])
def test_futures_of_two_groups_may_be_taken_in_any_order(world, count):
    rank, everyone = world.get_rank(), list(range(world.get_world_size()))
    groups = [world.new_group(everyone), world.new_group(everyone)]
    values = [torch.full((count,), 1.0 + rank) for _ in groups]
    order = (0, 1) if rank == 0 else (1, 0)
    futures = [world.all_reduce(values[i], group=groups[i], async_op=True).get_future() for i in order]
    torch.futures.wait_all(futures)
    assert all(torch.equal(value, torch.full((count,), total(world, 1.0))) for value in values)


@pytest.mark.ranks(3, timeout=60, backends=["native"])
def test_one_future_does_not_hold_up_another(world):
    """The message is sent once the reduction has ended: C++ waits for that while it is watched, too."""
    rank = world.get_rank()
    got = torch.empty(3)
    pending = [world.irecv(got, 1).get_future()] if rank == 0 else []
    torch.futures.wait_all([world.all_reduce(torch.ones(2), async_op=True).get_future()])
    world.barrier()
    if rank == 1:
        world.send(torch.arange(3.0), 0)
    torch.futures.wait_all(pending)
    assert rank != 0 or got.tolist() == [0, 1, 2]


def test_a_callback_may_start_an_operation_and_take_its_future(world):
    def again(future):
        return world.all_reduce(future.value()[0], async_op=True).get_future()

    first = world.all_reduce(torch.ones(2), async_op=True).get_future()
    (second,) = torch.futures.wait_all([first.then(again)])
    torch.futures.wait_all([second])
    assert second.value()[0].tolist() == [world.get_world_size() ** 2] * 2


def test_the_thread_ends_with_its_futures(world):
    torch.futures.wait_all([world.all_reduce(torch.ones(2), async_op=True).get_future()])
    for thread in threading.enumerate():
        if thread.name == "samestep futures":
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.ranks(3, timeout=60, backends=["native"])
def test_a_future_has_the_error_of_its_operation(world):
    futures = [
        world.all_reduce(torch.ones(2 + (i == 0 == world.get_rank())), async_op=True).get_future()
        for i in range(2)
    ]
    with pytest.raises(RuntimeError, match="do not agree"):
        torch.futures.wait_all(futures[:1])
    torch.futures.wait_all(futures[1:])
    assert futures[1].value()[0].tolist() == [world.get_world_size()] * 2


@pytest.mark.parametrize("hook", ["ALLREDUCE", "FP16_COMPRESS"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("views", [False, True])
def test_hooks_of_the_reducer_in_c(world, hook, dtype, views):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 500, bias=False), torch.nn.Linear(500, 4, bias=False))
    net = DistributedDataParallel(layers.to(dtype), bucket_cap_mb=0.002, gradient_as_bucket_view=views)
    net._register_builtin_comm_hook(getattr(world.BuiltinCommHookType, hook))
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(0.25)
    n, rank = world.get_world_size(), world.get_rank()
    for _ in range(2):
        net.zero_grad()
        net(torch.full((1, 8), 3.0 * rank, dtype=dtype)).sum().backward()
        mean = 3 * (n - 1) / 2
        first, second = (p.grad for p in net.parameters())
        assert torch.equal(first, torch.full_like(first, mean))  # 4 * 0.25
        assert torch.equal(second, torch.full_like(second, 2 * mean))  # 8 * 0.25


# ---- what torch asks for by the name of gloo


def test_the_timeout_of_a_group_may_be_set(world, group, recwarn):
    from torch.distributed import distributed_c10d as c10d

    set_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout  # the name up to torch 2.13
    set_timeout(datetime.timedelta(seconds=0.3))
    assert not [seen for seen in recwarn if "timeout" in str(seen.message)]
    if world.get_world_size() > 1 and world.get_rank() == 0:
        with pytest.raises(ss.TimeoutError, match="rank"):
            world.all_reduce(torch.ones(2))
    elif world.get_world_size() == 1:
        world.all_reduce(torch.ones(2))
    group.barrier()  # the others stay until then


@pytest.mark.ranks(3, timeout=60, backends=["native"])
@pytest.mark.filterwarnings("ignore::UserWarning")  # FullyShardedDataParallel's own
def test_a_shard_that_is_elsewhere_is_on_the_host(world):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType

    net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(6, 1))
    net = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    config = ShardedStateDictConfig(offload_to_cpu=True)
    with FullyShardedDataParallel.state_dict_type(net, StateDictType.SHARDED_STATE_DICT, config):
        saved = net.state_dict()
        assert {value.device for value in saved.values()} == {torch.device("cpu")}
        net.load_state_dict(saved)
    assert world.get_backend() == "samestep"


class EndsDuringAWait:
    """An operation that another thread completes just after the deadline of a wait."""

    ended = False

    def wait(self, seconds, ends_group):
        if not self.ended:
            self.ended = True
            raise ss.TimeoutError("the deadline has passed")

    def done(self):
        return self.ended


@pytest.mark.ranks(1, timeout=60, backends=["native"])
def test_the_deadline_of_one_wait_is_no_error_of_the_operation():
    from samestep.torch.work import Work

    work = Work([EndsDuringAWait()], [torch.ones(1)], 20.0)
    assert work.wait(datetime.timedelta(milliseconds=1))
    assert work.is_success()
