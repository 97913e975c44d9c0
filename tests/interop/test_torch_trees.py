"""Trees of torch: modules, optimizers, state dicts."""

import pytest
import samestep as ss
from samestep import trees
from samestep.trees.signature import describe_leaves

torch = pytest.importorskip("torch")


def test_a_state_dict_keeps_its_metadata():
    state = torch.nn.Linear(2, 3).state_dict()
    flat = trees.flatten(state)
    assert flat.names == ["['weight']", "['bias']"]
    assert flat.rebuild(flat.leaves)._metadata == state._metadata


def test_a_module_is_opened_into_parameters_and_buffers_and_returned_itself():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    flat = trees.flatten({"model": module})
    assert flat.names[:2] == ["['model'].0.weight", "['model'].0.bias"]
    assert "['model'].1.running_mean" in flat.names
    assert flat.leaves[0] is module[0].weight
    assert flat.rebuild(flat.leaves)["model"] is module


def test_tied_weights_appear_once_in_a_module_and_share_in_its_state_dict():
    layer = torch.nn.Linear(2, 2, bias=False)
    module = torch.nn.Sequential(layer, layer)
    assert trees.flatten(module).names == [".0.weight"]
    assert describe_leaves(*trees.flatten(module.state_dict())[:2], "synchronize").aliases == [0, 0]


def test_the_options_and_state_of_an_optimizer_are_written_back():
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    flat = trees.flatten(optimizer)
    assert ".state[0]['exp_avg']" in flat.names
    assert not any("params'" in name for name in flat.names)
    new = list(flat.leaves)
    new[flat.names.index(".param_groups[0]['lr']")] = 0.5
    assert flat.rebuild(new) is optimizer
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in module.parameters()]


def test_the_state_of_adamw_can_be_loaded_after_a_round_trip():
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    flat = trees.flatten(optimizer.state_dict())
    optimizer.load_state_dict(flat.rebuild(flat.leaves))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_numbers_of_few_bits_may_be_infinite_or_no_number(dtype):
    backend = ss.initialize()
    for value, is_finite in ((1.0, True), (float("nan"), False)):
        x = torch.tensor([0.5, value]).to(getattr(torch, dtype))
        assert backend.all_finite({"x": x}) is is_finite
    ss.finalize()
