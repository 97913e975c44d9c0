"""Groups of several backends, with a stand-in for the one of a GPU; and what torch asks a group."""

import datetime
import os

import pytest
import samestep as ss

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from samestep.torch import devices  # noqa: E402
from torch_versions import since  # noqa: E402

pytestmark = [
    pytest.mark.ranks(1, 3, timeout=120, backends=["native"]),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch renames its verbs
]
MIXED = "cpu:samestep,meta:standin"
NEEDS_NO_BACKEND = {
    *(
        "BackendType",
        "Options",
        "options",
        "CUSTOM",
        "GLOO",
        "MPI",
        "NCCL",
        "UCC",
        "UNDEFINED",
        "XCCL",
        "_pybind11_conduit_v1_",
    ),
    *(
        "_add_ephemeral_timeout",
        "_backend_id",
        "_has_hooks",
        "_id",
        "_register_backend",
        "_set_default_backend",
    ),
    *("Options", "options"),
    *("_register_on_completion_hook", "_set_group_desc", "_set_group_name", "bound_device_id", "boxed"),
    *("group_desc", "group_name", "name", "rank", "size", "unbox", "use_pg_for_symm_mem_rendezvous"),
}
"""What torch's own class answers."""


made = []
"""Groups of the stand-in, in this process."""


class Standin(dist.ProcessGroup):
    """Notes what it is asked for."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.asked, self.ranks = [], (rank, size)
        made.append(self)

    def __getattribute__(self, name):
        if name not in VERBS:
            return super().__getattribute__(name)

        def verb(*_):
            self.asked.append(name)
            done = torch.futures.Future()
            done.set_result(None)
            return torch._C._distributed_c10d._create_work_from_future(done)

        return verb

    def getBackendName(self):
        return "standin"

    def setGroupName(self, name):
        self.named = name

    def getGroupName(self):
        return self.named

    def setGroupDesc(self, desc):
        pass

    def _get_backend(self, device):
        return self


COLLECTIVES = [
    *("allreduce", "broadcast", "allgather", "reduce", "gather", "scatter", "reduce_scatter", "alltoall")
]
VERBS = {*COLLECTIVES, "send", "recv", "barrier"}


@pytest.fixture
def mixed(over):
    if "standin" not in dist.Backend.backend_list:
        dist.Backend.register_backend("standin", Standin, devices=["meta"])
    made.clear()
    with over(MIXED, timeout=datetime.timedelta(seconds=20)) as opened:
        yield opened


def on(device, n=3):
    return torch.full((n,), 2.0, device=device)


def each_verb(world, device, group=None):
    rank, size = world.get_rank(group), world.get_world_size(group)
    root = world.get_global_rank(group or world.group.WORLD, 0)
    listed = [on(device) for _ in range(size)]
    world.all_reduce(on(device), group=group)
    world.broadcast(on(device), root, group=group)
    world.all_gather(listed, on(device), group=group)
    world.reduce(on(device), root, group=group)
    world.gather(on(device), listed if rank == 0 else None, root, group=group)
    world.scatter(on(device), listed if rank == 0 else None, root, group=group)
    world.reduce_scatter(on(device), listed, group=group)
    world.all_to_all(listed, [on(device) for _ in range(size)], group=group)


def test_tensors_of_each_device_go_to_the_backend_of_the_device(mixed):
    world = mixed
    before = on("cpu")
    each_verb(world, "cpu")
    assert not made  # nothing has asked for it
    each_verb(world, "meta")
    each_verb(world, "cpu")
    each_verb(world, "meta")
    (device,) = made
    assert device.ranks == (world.get_rank(), world.get_world_size())
    assert device.asked == 2 * COLLECTIVES
    world.all_reduce(before)
    assert torch.equal(before, on("cpu") * world.get_world_size())
    assert device.asked == 2 * COLLECTIVES


def test_a_part_of_the_ranks_has_both_backends_too(mixed):
    world = mixed
    size = world.get_world_size()
    ranks = [0, size - 1] if size > 1 else [0]
    some = world.new_group(ranks)
    if world.get_rank() in ranks:
        each_verb(world, "meta", some)
        x = on("cpu")
        world.all_reduce(x, group=some)
        assert torch.equal(x, on("cpu") * len(ranks))
        assert [device.ranks for device in made] == [(ranks.index(world.get_rank()), len(ranks))]


@since(2, 5, "call of `shutdown` when a group ends")
@pytest.mark.parametrize("ends", ["first", "with the world"])
def test_the_half_of_a_device_ends_with_its_group(mixed, ends):
    some = mixed.new_group(list(range(mixed.get_world_size())))
    for _ in range(2):
        mixed.all_reduce(on("meta"), group=some)
    (half,) = made
    if ends == "first":
        mixed.destroy_process_group(some)
        with pytest.raises(KeyError):
            mixed.get_process_group_ranks(half)  # torch does not know it any more
        mixed.all_reduce(on("meta"))
        assert len(made) == 2


def test_the_group_says_which_devices_it_serves(mixed):
    group = mixed.group.WORLD
    assert {device.type for device in group._device_types} == {"cpu", "meta"}
    gathered = [None] * mixed.get_world_size()
    mixed.all_gather_object(gathered, mixed.get_rank())  # of Python's objects: on the host
    assert gathered == list(range(mixed.get_world_size()))
    assert not made
    assert isinstance(group._get_backend(torch.device("meta")), Standin)


def test_torch_serves_devices_where_the_program_has_named_samestep_alone(over, monkeypatch):
    if "standin" not in dist.Backend.backend_list:
        dist.Backend.register_backend("standin", Standin, devices=["meta"])
    monkeypatch.setattr(devices, "_of_torch", lambda: {"meta": "standin"})
    monkeypatch.setenv("SAMESTEP_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")  # as if it were not set; removed again at the end
    made.clear()
    with over("samestep", timeout=datetime.timedelta(seconds=20)) as world:
        each_verb(world, "cpu")
        assert not made
        each_verb(world, "meta")
        each_verb(world, "meta", world.new_group(list(range(world.get_world_size()))))
        assert [device.asked for device in made] == 2 * [COLLECTIVES]
        assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
        gathered = [None] * world.get_world_size()
        world.all_gather_object(gathered, world.get_rank())  # stays on the host
        assert gathered == list(range(world.get_world_size()))
        assert [device.asked for device in made] == 2 * [COLLECTIVES]
        assert {device.type for device in world.group.WORLD._device_types} == {"cpu", "meta"}


def test_a_tensor_that_no_backend_serves_is_refused(over):
    with over("samestep") as world:
        for _ in range(2):
            with pytest.raises(ss.InvalidArgumentError, match="cpu:samestep,cuda:nccl"):
                world.all_reduce(on("meta"))


def test_torch_gets_an_answer_or_an_error_to_whatever_it_asks(over):
    with over("samestep") as world:
        group = world.group.WORLD
        ours = {
            name
            for kind in type(group).__mro__
            if kind.__module__.startswith("samestep")
            for name in vars(kind)
        }
        asked = {name for name in dir(world.ProcessGroup) if not name.startswith("__")}
        assert asked - ours - NEEDS_NO_BACKEND == set()
        for name in ("supports_reconfigure", "supports_window", "supports_shrinking", "supports_splitting"):
            assert getattr(group, name) is getattr(group._get_backend("cpu"), name) is False
        for name in ("new_window", "split_group", "register_abort_hook", "get_reconfigure_handle"):
            with pytest.raises(NotImplementedError, match=name):
                getattr(group, name)()
        for name in ("_supports_reconfigure", "_supports_window"):
            assert not getattr(world.distributed_c10d, name, bool)()
        assert group._device_types == [torch.device("cpu")]
    assert group._device_types == []  # of no group that torch knows: torch 2.15 asks this before it knows it


def test_one_tensor_gathers_those_of_all_ranks(over):
    with over("samestep") as world:
        rank, size = world.get_rank(), world.get_world_size()
        options = dist.GatherOptions()
        options.rootRank = size - 1
        into = torch.zeros(2 * size)
        world.group.WORLD.gather_single(into, torch.tensor([rank, rank + 0.5]), options).wait()
        everything = torch.arange(2.0 * size) / 2
        assert torch.equal(into, everything if rank == size - 1 else torch.zeros(2 * size))


def test_works_answer_after_they_have_ended(over):
    with over("samestep") as world:
        rank, size = world.get_rank(), world.get_world_size()
        work = world.all_reduce(on("cpu"), async_op=True)
        assert work.wait() and work.is_completed() and work.is_success()
        got = on("cpu", 1)
        ring = [world.P2POp(world.isend, torch.tensor([float(rank)]), (rank + 1) % size)] if size > 1 else []
        ring += [world.P2POp(world.irecv, got, (rank - 1) % size)] if size > 1 else []
        for each in world.batch_isend_irecv(ring) if ring else ():
            assert each.wait() and each.is_completed()
        assert got.item() == ((rank - 1) % size if size > 1 else 2)
        if rank:
            world.send(torch.tensor([rank]), 0)
        else:
            found = [(world.recv(into), into.item()) for into in (torch.tensor([0]) for _ in range(1, size))]
            assert sorted(found) == [(r, r) for r in range(1, size)]
        world.group.WORLD.monitored_barrier(timeout=datetime.timedelta(seconds=20))
