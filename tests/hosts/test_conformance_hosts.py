"""The suite that defines a backend, all of it, over hosts that nothing but a network connects."""

import re

import conformance
import lab as labs
import pytest
from lab import PATIENCE_S


@pytest.mark.parametrize("layout", conformance.LAYOUTS)
def test_the_suite(layout):
    if reason := labs.missing():
        pytest.skip(reason)
    pytest.importorskip("mpi4py")
    n_hosts, n_ranks = layout.count(",") + 1, sum(map(int, layout.split(",")))
    lab = labs.Lab(n_hosts)
    try:
        code, text = conformance.run(lab, layout, conformance.BACKENDS, most_s=6 * PATIENCE_S)
    finally:
        lab.close()
    assert code == 0, text
    each = ", ".join(rf"\d+ {backend}" for backend in conformance.BACKENDS)
    assert re.search(rf"on {n_ranks} ranks \({each}\); .*, {n_hosts} hosts", text), text
