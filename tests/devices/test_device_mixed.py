"""Ranks whose arrays are in different memory wait on different paths: they learn of each other soon, and which."""

import device_jobs
import pytest
from running import program

SOON_S = 20.0  # of 60, on a busy machine; 1 s otherwise
HOST, DEVICE = (
    "a call with arrays in host memory, or a barrier",
    "a call with arrays in device memory, through ",
)
# What rank 0 has called, for the others, and what these have called, for rank 0, which closes without an error.
OTHER_CALLS = {
    "barrier": (HOST, DEVICE),
    "not NCCL's": (DEVICE + "NCCL", DEVICE + "the host"),
    "waited for later": (DEVICE, HOST),
    "close": ("close", None),
}
BACKENDS = pytest.mark.parametrize(("backend", "n"), [("nccl", 2), ("nccl", 3), ("native", 2), ("native", 3)])


def run(tmp_path, n, function, *values):
    ended = device_jobs.run(tmp_path, program("devices/device_mixed", function, *values), n)
    assert [rank.code for rank in ended] == [0] * n, ended
    return [rank.reports for rank in ended]


def ranks_text(ranks):
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def require_named(found, others, called):
    """`found`: the error of a rank, for which `others` have `called` something else."""
    assert found.get("kind") == "MismatchError", found
    assert f"{ranks_text(others)}: {called}" in found["text"], found
    assert found["seconds"] < SOON_S, found


@pytest.mark.slow
@pytest.mark.parametrize("device_rank", [0, 1])
@BACKENDS
def test_one_rank_with_arrays_on_the_device(tmp_path, backend, n, device_rank):
    reports = run(tmp_path, n, "each_verb", backend, device_rank)
    on_host = [rank for rank in range(n) if rank != device_rank]
    assert len(set(map(len, reports))) == 1 and len(reports[0]) == 2 * 14
    for i in range(0, len(reports[0]), 2):
        for rank, found in enumerate(reports):
            if rank == device_rank:
                require_named(found[i], on_host, HOST)
            else:
                require_named(found[i], [device_rank], DEVICE + ("NCCL" if backend == "nccl" else "the host"))
            assert found[i + 1] == {"sum": n}


@pytest.mark.parametrize("kind", OTHER_CALLS)
@BACKENDS
def test_other_calls(tmp_path, backend, n, kind):
    if backend == "native" and kind == "not NCCL's":
        pytest.skip("both go through the host, which compares them")
    of_first, of_others = OTHER_CALLS[kind]
    first, *others = run(tmp_path, n, "unlike", backend, kind)
    if of_others is not None:
        require_named(first[0], range(1, n), of_others)
    for found in others:
        require_named(found[0], [0], of_first)


@pytest.mark.slow
@BACKENDS
def test_a_rank_that_is_merely_late_is_waited_for(tmp_path, backend, n):
    for found in run(tmp_path, n, "late", backend):
        assert found == [{"sums": [n, n]}] * 2
