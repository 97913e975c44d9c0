"""torch.distributed over the ranks of the pytest plugin."""

import contextlib
import datetime
import itertools
import os

import pytest

_numbers = itertools.count()


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
            torch_dist.destroy_process_group()

    return opened
