"""Parameters that torch divides among ranks: what takes those of one rank for all refuses them."""

import pytest
import samestep as ss
from torch_versions import since

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

pytestmark = [
    pytest.mark.ranks(1, 2, 3, timeout=120, backends=["native"]),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch renames its verbs
    pytest.mark.filterwarnings("ignore::UserWarning"),  # FullyShardedDataParallel's own
]


def fsdp2(world, net):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(net, mesh=init_device_mesh("cpu", (world.get_world_size(),)))
    return net


def fsdp1(world, net, *, use_orig_params=False):
    from torch.distributed.fsdp import FullyShardedDataParallel

    host = torch.device("cpu")
    return FullyShardedDataParallel(net, device_id=host, use_orig_params=use_orig_params)


def fsdp1_with_views(world, net):
    return fsdp1(world, net, use_orig_params=True)


KINDS = [
    pytest.param(fsdp2, marks=since(2, 6, "torch.distributed.fsdp.fully_shard")),
    fsdp1,
    fsdp1_with_views,
]


def own(net):
    locals_ = (p.to_local() if hasattr(p, "to_local") else p for p in net.parameters())
    return [p.detach().clone() for p in locals_]


@pytest.mark.parametrize("divide", KINDS)
def test_a_model(group, over, divide):
    """Each rank's part may have the shape of every other's, so that nothing else would tell."""
    n = group.size
    with over("samestep") as world:
        torch.manual_seed(0)
        net = divide(world, torch.nn.Linear(4, 4 * n, bias=False))
        before = own(net)
        text = "of which each rank holds another part"
        for tree in (net, {"net": net}):
            with pytest.raises(ss.InvalidArgumentError, match=text):
                ss.synchronize(group, tree)
            with pytest.raises(ss.InvalidArgumentError, match=text):
                ss.TrainState(group, net=tree)
        assert all(torch.equal(p, q) for p, q in zip(own(net), before, strict=True))


@pytest.mark.parametrize("divide", KINDS)
@pytest.mark.parametrize("distribute", [ss.DistributedOptimizer, ss.ShardedOptimizer])
def test_an_optimizer(group, over, divide, distribute):
    """Its gradients are averaged already, and those of this rank's part only."""
    with over("samestep") as world:
        net = divide(world, torch.nn.Linear(4, 4 * group.size, bias=False))
        opt = torch.optim.SGD(net.parameters(), 0.1)
        with pytest.raises(
            ss.InvalidArgumentError, match=r"\['params'\]\[0\] is a [\w ]+, of which each rank holds"
        ):
            distribute(group, opt)
        with pytest.raises(ss.InvalidArgumentError, match="of which each rank holds another part"):
            ss.TrainState(group, opt=opt)
