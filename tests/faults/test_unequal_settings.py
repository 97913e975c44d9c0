"""Variables of the environment that differ between ranks: an error on all ranks, which may start again."""

import pytest
from launching import reports
from running import program
from samestep import _settings

OTHER = {
    _settings.TRANSPORTS["mpi"]: "mpi",
    _settings.TRANSPORTS["native"]: "tcp",
    _settings.ALGORITHM: "recursive_halving",
    _settings.SEGMENT_BYTES: "4096",
    _settings.MPI_MAX_MESSAGE: "1000",
    _settings.GPU_AWARE_MPI: "1",
    _settings.ENCRYPT: "1",
}


@pytest.mark.parametrize("backend", ["native", pytest.param("mpi", marks=pytest.mark.slow)])
def test_every_rank_learns_what_differs_and_what_is_invalid(begin, backend, monkeypatch):
    for name in OTHER:
        monkeypatch.delenv(name, raising=False)
    if backend == "mpi":
        pytest.importorskip("mpi4py")
    names = _settings.must_agree(backend)
    values = [pair for name in names for pair in ((name, OTHER[name]), (name, "-1"))]
    run = begin(f"--{backend}", program("faults/start", "change_settings_of_rank_1", backend, values), n=3)
    found = reports(run)
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
