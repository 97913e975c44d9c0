"""Tensors that are given other memory while an operation works on the one they had."""

import pytest

torch = pytest.importorskip("torch")
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

pytestmark = pytest.mark.ranks(1, 2, 3, backends=["self", "native"])


@pytest.mark.parametrize("shape", [(60_000,), (200, 300)])
@pytest.mark.parametrize("change", ["x.data = ...", "x.set_(...)", "model.half()"])
def test_the_memory_lives_until_the_operation_has_ended(group, shape, change):
    model = torch.nn.Module()
    model.x = torch.nn.Parameter(torch.full(shape, group.rank + 1.0), requires_grad=False)
    memory = StorageWeakRef(model.x.untyped_storage())
    work = group.iallreduce(model.x)
    if change == "model.half()":
        model.half()
    elif change == "x.set_(...)":
        model.x.set_(torch.zeros(3))
    else:
        model.x.data = torch.zeros(3)
    is_kept = not memory.expired()
    work.wait()
    assert is_kept
    assert memory.expired()
