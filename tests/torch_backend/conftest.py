"""torch.distributed over the ranks of the pytest plugin."""

import contextlib
import datetime
import itertools
import os
import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GROUP = "torch.backends"
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


@pytest.fixture
def environment(tmp_path):
    """For child processes: with the entry points of pyproject.toml, also where the package runs from its tree."""
    env = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    env["OMP_NUM_THREADS"] = "1"
    if any(point.name == "samestep" for point in entry_points(group=GROUP)):
        return env
    facts = tmp_path / "samestep_in_its_tree-0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: samestep-in-its-tree\nVersion: 0\n")
    lines = re.findall(rf'entry-points."{GROUP}"\]\n(\w+) = "([^"]+)"', (ROOT / "pyproject.toml").read_text())
    (facts / "entry_points.txt").write_text(
        f"[{GROUP}]\n" + "".join(f"{name} = {target}\n" for name, target in lines)
    )
    return env | {"PYTHONPATH": os.pathsep.join([str(tmp_path), env.get("PYTHONPATH", "")])}
