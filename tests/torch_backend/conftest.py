"""torch.distributed over the ranks of the pytest plugin."""

import contextlib
import datetime
import itertools
import os

import pytest

_numbers = itertools.count()
_kept = []
"""Groups of gloo. Where one is freed, Python's lock is held while gloo's threads end, which may be waiting for it; that
happens where a test returns, with the model whose buckets were reduced."""


@pytest.fixture
def over(group, tmp_path):
    """`with over("samestep") as dist`: torch.distributed on this backend, for as long as the block lasts."""
    torch_dist = pytest.importorskip("torch.distributed")
    import samestep.torch

    samestep.torch.register()
    folder = group.bcast_object(str(tmp_path))

    @contextlib.contextmanager
    def opened(backend, **options):
        meeting = os.path.join(folder, f"store{next(_numbers)}")
        meeting = group.bcast_object(meeting)
        torch_dist.init_process_group(
            backend,
            init_method=f"file://{meeting}",
            rank=group.rank,
            world_size=group.size,
            timeout=options.pop("timeout", datetime.timedelta(seconds=60)),
            **options,
        )
        try:
            yield torch_dist
        finally:
            if backend == "gloo":
                _kept.append(torch_dist.group.WORLD)
            torch_dist.destroy_process_group()

    return opened
