"""What the entry point for torch does beside registering the backend, without torch."""

from types import SimpleNamespace

import pytest
from samestep.torch import autoload


class OfNewerTorch:
    """`torch.distributed.Backend` from 2.14 on, which Python may derive from."""

    def __init__(self):
        """__init__(self, rank: int, size: int) -> None"""


@pytest.mark.parametrize(
    ("given", "started", "from_2_14"),
    [
        ("gloo", "samestep", "samestep"),
        ("GLOO", "samestep", "samestep"),
        ("nccl", "nccl", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:samestep,cuda:nccl"),
        ("cuda:gloo", "cuda:gloo", "cuda:gloo"),
        (None, None, None),
    ],
)
@pytest.mark.parametrize("backend_class", [object, OfNewerTorch])
def test_gloo_is_replaced_where_a_group_is_opened(given, started, from_2_14, backend_class):
    def init_process_group(backend=None, init_method=None, *, rank=-1):
        return backend, init_method, rank

    def new_group(ranks=None, timeout=None, backend=None):
        return ranks, backend

    dist = SimpleNamespace(
        init_process_group=init_process_group,
        new_group=new_group,
        distributed_c10d=SimpleNamespace(),
        Backend=backend_class,
    )
    autoload.replace(dist, "samestep")
    assert dist.distributed_c10d.init_process_group is dist.init_process_group
    assert dist.distributed_c10d.new_group is dist.new_group
    name = from_2_14 if backend_class is OfNewerTorch else started
    assert dist.init_process_group(given, "file:///a", rank=3) == (name, "file:///a", 3)
    assert dist.init_process_group(backend=given) == (name, None, -1)
    assert dist.init_process_group() == (None, None, -1)
    assert dist.new_group([0, 1], None, given) == dist.new_group([0, 1], backend=given) == ([0, 1], name)
    assert dist.new_group([1]) == ([1], None)
