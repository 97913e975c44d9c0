"""What the entry point for torch does beside registering the backend, without torch."""

from types import SimpleNamespace

import pytest
from _samestep_torch import gloo


@pytest.mark.parametrize(
    ("given", "started"),
    [
        (("gloo",), "samestep"),
        (("GLOO",), "samestep"),
        (("nccl",), "nccl"),
        (("cpu:gloo,cuda:nccl",), "cpu:gloo,cuda:nccl"),
        ((), None),
    ],
)
def test_only_gloo_alone_is_replaced(given, started):
    def init_process_group(backend=None, init_method=None, *, rank=-1):
        return backend, init_method, rank

    dist = SimpleNamespace(init_process_group=init_process_group, distributed_c10d=SimpleNamespace())
    gloo.replace(dist, "samestep")
    assert dist.distributed_c10d.init_process_group is dist.init_process_group
    assert dist.init_process_group(*given, rank=3) == (started, None, 3)
    if given:
        assert dist.init_process_group(given[0], "file:///a") == (started, "file:///a", -1)
        assert dist.init_process_group(backend=given[0]) == (started, None, -1)
