"""The suite that defines a backend over hosts that nothing but a network connects, as far as time allows.

`python tests/hosts/conformance.py` runs all of it.
"""

import re

import conformance
import lab as labs
import pytest
from lab import PATIENCE_S

MIXED = (
    "test_reductions.py",
    "test_point_to_point.py",
    "test_groups.py",
    "test_mismatch.py",
    "test_schedules.py",
)
PARTS = {"1,1": ("test_movement.py", "test_work.py"), "2,2": (), "1,2,1": MIXED}  # (): all


@pytest.mark.parametrize("layout", PARTS)
def test_the_suite(layout):
    if reason := labs.missing():
        pytest.skip(reason)
    pytest.importorskip("mpi4py")
    assert layout in conformance.LAYOUTS
    n_hosts, n_ranks = layout.count(",") + 1, sum(map(int, layout.split(",")))
    files = [conformance.SUITE / name for name in PARTS[layout]]
    lab = labs.Lab(n_hosts)
    try:
        code, text = conformance.run(lab, layout, conformance.BACKENDS, files, most_s=6 * PATIENCE_S)
    finally:
        lab.close()
    assert code == 0, text
    each = ", ".join(rf"\d+ {backend}" for backend in conformance.BACKENDS)
    assert re.search(rf"on {n_ranks} ranks \({each}\); .*, {n_hosts} hosts", text), text
