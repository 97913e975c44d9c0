"""The program of test_torch_device_backend.py: puts a class in the place of torch's `Backend`.

`later_torch.py doc`: the text of its `__init__`; "none" for no text.
"""

import datetime
import sys
import types

import torch
from torch._C import _distributed_c10d as c10d


class Backend:
    def __init__(self, rank, size):
        self.made_with = rank, size


Backend.__init__.__doc__ = None if sys.argv[1] == "none" else sys.argv[1]
c10d.Backend = Backend
from samestep.torch import process_group  # noqa: E402

options = types.SimpleNamespace(
    store=torch.distributed.HashStore(),
    group_rank=0,
    group_size=1,
    timeout=datetime.timedelta(seconds=20),
    group_id="of one",
    global_ranks_in_group=[],
)
made = process_group.create(options)
x = torch.arange(5.0)
work = made.allreduce([x], torch.distributed.AllreduceOptions())
assert work.wait() and work.result()[0] is x
assert torch.equal(x, torch.arange(5.0))
print(type(made).__name__, made.getBackendName(), getattr(made, "made_with", None), made.getSize())
made.shutdown()
