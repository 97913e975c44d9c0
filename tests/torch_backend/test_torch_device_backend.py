"""The class for a torch whose backends Python may write, with a stand-in for torch's: this torch may be older."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

STAND_IN = """
import datetime, types
import torch
from torch._C import _distributed_c10d as c10d


class Backend:
    def __init__(self, rank, size):
        self.made_with = rank, size


Backend.__init__.__doc__ = {doc!r}
c10d.Backend = Backend
from samestep.torch import process_group

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
"""


@pytest.mark.parametrize(
    ("doc", "expected"),
    [
        (
            "__init__(self: torch._C._distributed_c10d.Backend, rank: int, size: int) -> None",
            "DeviceBackend samestep (0, 1) 1",
        ),
        ("Initialize self.  See help(type(self)) for accurate signature.", "ProcessGroup samestep None 1"),
        (None, "ProcessGroup samestep None 1"),
    ],
    ids=["later", "2.13", "without a text"],
)
def test_what_is_made_follows_from_what_torch_lets_python_write(doc, expected):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STAND_IN.format(doc=doc)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected
