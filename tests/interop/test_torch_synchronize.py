"""torch: modules, optimizers and trees of tensors are synchronized and reduced in place."""

import collections

import pytest
import samestep as ss
from torch_training import (
    assert_close,
    assert_equal_everywhere,
    backward,
    batch,
    gradients,
    model,
    nn,
    torch,
    whole_gradients,
)

BACKENDS = ["self", "native"]  # the same law on all: what differs between them is for tests/conformance
pytestmark = pytest.mark.ranks(1, 2, 3, timeout=120, backends=BACKENDS)


def test_modules_and_optimizers_are_written_in_place(group):
    torch.manual_seed(group.rank)
    net = nn.Sequential(nn.Linear(3, 400), nn.BatchNorm1d(400), nn.Linear(400, 400), nn.Linear(400, 1))
    opt = torch.optim.AdamW(net.parameters(), lr=0.1 * (group.rank + 1))
    net(torch.randn(4, 3)).sum().backward()
    opt.step()
    root = group.size - 1
    got = ss.synchronize(group, {"net": net, "opt": opt, "epoch": group.rank}, root=root)
    assert got["net"] is net
    assert got["opt"] is opt
    assert got["epoch"] == root
    assert opt.param_groups[0]["lr"] == 0.1 * (root + 1)
    assert_equal_everywhere(group, [*net.parameters(), *net.buffers()])
    assert_equal_everywhere(group, [s["exp_avg"] for s in opt.state.values()])
    assert_equal_everywhere(group, [s["step"] for s in opt.state.values()])


def test_state_dicts(group):
    torch.manual_seed(group.rank)
    net = nn.Linear(3, 3)
    got = ss.synchronize(group, net.state_dict())
    assert_equal_everywhere(group, net.parameters())
    assert got._metadata == net.state_dict()._metadata


def test_gradients_of_a_module_by_hand(group):
    net = model()
    backward(net, *batch(group.rank, group.size))
    net[4].bias.grad = None
    assert ss.allreduce_gradients(group, net) is net
    assert net[4].bias.grad is None
    assert_close(gradients(net)[:-1], whole_gradients()[:-1])


PARAMETERS = {
    "a dict of modules": lambda net: {"encoder": net},
    "a list of modules": lambda net: [net[0], net[2]],
    "an optimizer": lambda net: torch.optim.SGD(net.parameters(), 0.1, momentum=0.9),
    "a list of parameters": lambda net: list(net.parameters()),
    "a model's state": lambda net: {"model": collections.OrderedDict(net.named_parameters())},
    "a dict of parameters": lambda net: {"params": dict(net.named_parameters())},
}


@pytest.mark.parametrize("kind", PARAMETERS)
@pytest.mark.parametrize("weight", [None, 2.0])
def test_parameters_are_not_taken_for_gradients(group, kind, weight):
    net = model()
    tree = PARAMETERS[kind](net)
    with pytest.raises(ss.InvalidArgumentError, match="begins with parameters"):
        ss.allreduce_gradients(group, tree, weight=weight)
    with pytest.raises(ss.InvalidArgumentError, match=r"Accumulator.add: .* not with gradients"):
        ss.Accumulator(group).add(tree)
    with pytest.raises(ss.InvalidArgumentError, match=r"allreduce_gradients.* p.grad"):
        ss.DistributedOptimizer(group, Plain()).update(tree, ())


class Plain:
    def init(self, params):
        return ()

    def update(self, grads, state, params=None):
        return grads, state


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int64", "complex64"])
def test_trees_of_tensors(group, dtype):
    kind = getattr(torch, dtype)
    tree = [torch.full((3,), group.rank + 1, dtype=kind), torch.ones(2, 2, dtype=kind).T]
    got = group.allreduce_tree(tree, "sum")
    assert got[0] is tree[0]
    assert torch.equal(got[0], torch.full((3,), sum(range(group.size + 1)), dtype=kind))
    missing = ss.allreduce_gradients(
        group, [None if group.rank else torch.ones(3, dtype=kind), tree[1]], ss.SUM
    )
    assert torch.equal(missing[0], torch.ones(3, dtype=kind))


@pytest.mark.parametrize("verb", ["allreduce_tree", "synchronize"])
def test_autograd_notices_that_leaves_were_written(group, verb):
    if verb == "synchronize" and group.size == 1:
        return  # nothing is written
    tensors = [torch.ones(3), torch.ones(2)]
    weights = torch.ones(3, requires_grad=True)
    product = (tensors[0] * weights).sum()
    getattr(group, verb)(tensors, **({"root": group.size - 1} if verb == "synchronize" else {}))
    if verb == "allreduce_tree" or group.rank != group.size - 1:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


class Expanded(nn.Module):
    """Has a buffer that is one element seen four times, or four of its own."""

    def __init__(self, expanded):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("once", torch.zeros(1).expand(4) if expanded else torch.zeros(4))


@pytest.mark.parametrize("where", ["everywhere", "on root", "elsewhere"])
def test_a_buffer_whose_elements_share_memory_is_refused_on_all_ranks(group, where):
    is_root = group.rank == 0
    expanded = {"everywhere": True, "on root": is_root, "elsewhere": not is_root}[where]
    if group.size == 1 and not expanded:
        return
    alike = where == "everywhere" or group.size == 1
    kind = ss.InvalidArgumentError if alike else ss.MismatchError
    net = Expanded(expanded)
    with torch.no_grad():
        net.weight.fill_(group.rank)
    with pytest.raises(kind, match=r"synchronize.*leaf \.once"):
        ss.synchronize(group, net)
    assert_close([net.weight], [torch.full((2,), float(group.rank))], 0)
