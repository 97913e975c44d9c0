"""Variables of the environment that differ between ranks: all are told at the start, and may start again."""

import pytest
from launching import told
from samestep import terms

SCRIPT = """
import json, os
import numpy as np
import samestep as ss
from samestep import terms

backend, values = {backend!r}, {values!r}
rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
found = []
for name, value in values:
    if rank == 1:
        os.environ[name] = value
    try:
        ss.initialize(backend, timeout=60)
    except ss.Error as error:
        found.append([type(error).__name__, str(error)])
    os.environ.pop(name, None)
with ss.initialize(backend, timeout=60) as world:
    found.append(world.allreduce(np.full(200_000, rank + 1.0))[7])
print(json.dumps(found))
"""
OTHER = {
    terms.ENGINES["mpi"]: "direct",
    terms.ENGINES["native"]: "tcp",
    terms.ALGORITHM: "halving",
    terms.WINDOW_PIECE: "4096",
    terms.MPI_PIECE: "1000",
    terms.GPU_AWARE: "1",
}


@pytest.mark.parametrize("backend", ["native", "mpi"])
def test_every_rank_is_told_what_differs_and_what_means_nothing(begin, backend, monkeypatch):
    for name in OTHER:
        monkeypatch.delenv(name, raising=False)
    if backend == "mpi":
        pytest.importorskip("mpi4py")
    names = terms.OVER[backend]
    values = [pair for name in names for pair in ((name, OTHER[name]), (name, "-1"))]
    run = begin(f"--{backend}", SCRIPT.format(backend=backend, values=values), n=3)
    found = told(run)
    assert found[0] == found[1] == found[2]
    *errors, total = found[0]
    assert total == 6.0
    for (name, value), (kind, text) in zip(values, errors, strict=True):
        if value == "-1":
            assert kind == "InvalidArgumentError"
            assert text.endswith("got '-1' on rank 1")
        else:
            assert kind == "MismatchError"
            assert text.endswith(f" on ranks 0, 2, {value} on rank 1")
        assert text.startswith(f"{name} ")
