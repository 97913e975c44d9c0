"""Messages in device memory that MPI takes as they lie, and who asks for it.

The stand-in of the runtime lets the host, and so MPI, reach them.
"""

from __future__ import annotations

import os
import subprocess
import sys

import fake_arrays
import fake_libraries
import numpy as np
import pytest
import samestep as ss
from samestep import fluxmpi, gpu_aware, levels

ranks = pytest.mark.ranks(2, 3, backends=["aware"])
COUNTS = (0, 1, 1023, 1024, 1025, 300_001)  # around the 4 KiB from which MPI is given the memory itself


@pytest.fixture
def reachable(monkeypatch):
    monkeypatch.setenv("FAKE_GPU_HOST_ACCESS", "1")


def values(rank, count):
    return (np.arange(count) % 97 + 1000 * rank).astype("float32")


@ranks
def test_messages_arrive_whole_and_in_order(group, reachable):
    stream, n = fake_arrays.Stream(), group.size
    right, left = (group.rank + 1) % n, (group.rank - 1) % n
    works, received = [], []
    for count in COUNTS:
        sent = fake_arrays.Array.of(values(group.rank, count), stream)
        works.append(group.isend(sent, right, tag=3))  # one tag: only the order tells them apart
        received.append(fake_arrays.Array.of(np.zeros(count, "float32"), stream))
    for count, array in zip(COUNTS, received, strict=True):
        status = group.recv(array, left, tag=3)
        assert (status.source, status.count) == (left, count)
        np.testing.assert_array_equal(array.get(), values(left, count))
    for work in works:
        work.wait()


@ranks
def test_each_side_chooses_its_memory(group, reachable):
    stream = fake_arrays.Stream()
    if group.rank == 0:
        group.send(fake_arrays.Array.of(values(0, 5000), stream), 1)
        group.send(values(0, 5000), 1)
    if group.rank == 1:
        host, array = np.zeros(5000, "float32"), fake_arrays.Array.of(np.zeros(5000, "float32"), stream)
        group.recv(host, 0)
        group.recv(array, 0)
        np.testing.assert_array_equal(host, values(0, 5000))
        np.testing.assert_array_equal(array.get(), values(0, 5000))


@ranks
def test_a_message_waits_for_those_who_use_its_memory(group, reachable):
    """The sender's kernels come first, and so do those that still read what a receive will overwrite."""
    stream, n = fake_arrays.Stream(), 5000
    x, copy = (fake_arrays.Array.of(np.full(n, -1.0, "float32"), stream) for _ in range(2))
    stream.synchronize()
    stream.delay(60_000)
    if group.rank == 0:
        x.set(values(0, n))
        work = group.isend(x, 1)
        assert not work.done()
        work.wait()
    if group.rank == 1:
        copy._copy(copy.address, x.address)
        group.irecv(x, 0).wait()
        np.testing.assert_array_equal(x.get(), values(0, n))
        np.testing.assert_array_equal(copy.get(), np.full(n, -1.0))


@ranks
def test_what_does_not_fit_is_an_error_and_the_group_goes_on(group, reachable):
    stream = fake_arrays.Stream()
    if group.rank == 0:
        group.send(fake_arrays.Array.of(values(0, 5000), stream), 1)
        group.send(fake_arrays.Array.of(values(0, 5000), stream), 1)
    if group.rank == 1:
        with pytest.raises(ss.MismatchError, match="5000"):
            group.recv(fake_arrays.Array.of(values(1, 4999), stream), 0)
        array = fake_arrays.Array.of(values(1, 5000), stream)
        group.recv(array, 0)
        np.testing.assert_array_equal(array.get(), values(0, 5000))


PROGRAM = """
import numpy as np, fake_arrays, samestep as ss
with ss.initialize("mpi") as world:
    x = fake_arrays.Array.of(np.ones(5000, "float32"), fake_arrays.Stream())
    {call}
    world.barrier()
    print("alive")
"""
CALLS = {"messages": "world.send(x, 1) if world.rank == 0 else world.recv(x, 0)", "bcast": "world.bcast(x)"}


@pytest.mark.parametrize("what", CALLS)
def test_the_memory_itself_is_given_to_mpi(tmp_path, what):
    """Where MPI cannot reach it the job dies; through the host it lives."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(call=CALLS[what]))
    env = {k: v for k, v in os.environ.items() if not k.startswith("OMPI_COMM") and not k.startswith("PMIX")}
    env |= fake_libraries.environment() | {
        "PYTHONPATH": os.pathsep.join([str(fake_libraries.HERE), *sys.path])
    }
    alive = {}
    for asked in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-m", "samestep", "run", "--mpi", "-n", "2", str(program)],
            env=env | {"SAMESTEP_GPU_AWARE_MPI": asked, "SAMESTEP_MPI_ENGINE": "direct"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        alive[asked] = done.returncode == 0 and done.stdout.count("alive") == 2
    assert alive == {"0": True, "1": False}


# ---- who asks for it


def test_asking_for_it_puts_all_ranks_on_mpi(monkeypatch):
    monkeypatch.delenv("SAMESTEP_MPI_ENGINE", raising=False)
    monkeypatch.setenv("SAMESTEP_GPU_AWARE_MPI", "1")
    assert levels.describe("mpi") == "direct (SAMESTEP_MPI_ENGINE=direct)"
    monkeypatch.setenv("SAMESTEP_MPI_ENGINE", "node")
    assert "SAMESTEP_MPI_ENGINE=node" in levels.describe("mpi")
    monkeypatch.setenv("SAMESTEP_GPU_AWARE_MPI", "yes")
    assert "0, 1 or auto" in levels.describe("mpi")
    assert "0, 1 or auto" in gpu_aware.describe("cuda")


def test_fluxmpi_turns_it_off(monkeypatch):
    monkeypatch.setenv("SAMESTEP_GPU_AWARE_MPI", "1")
    fluxmpi.disable_cudampi_support()
    assert gpu_aware.decide("cuda", 0) == (False, "SAMESTEP_GPU_AWARE_MPI=0")
    fluxmpi.disable_cudampi_support(disable=False)
    assert gpu_aware.wanted(os.environ) == "auto"


def test_this_library_is_asked_first(monkeypatch):
    monkeypatch.setenv("SAMESTEP_GPU_AWARE_MPI", "auto")
    gpu_aware._tried.cache_clear()
    assert gpu_aware.decide("cuda", 0) == (False, "the MPI library says that it cannot")
    assert "cannot" in gpu_aware.describe("cuda")


@pytest.mark.parametrize("reaches", [True, False])
def test_a_library_that_says_yes_is_tried(monkeypatch, reaches):
    monkeypatch.setenv("SAMESTEP_GPU_AWARE_MPI", "auto")
    monkeypatch.setattr(gpu_aware, "query", lambda kind: True)
    for name, value in fake_libraries.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FAKE_GPU_HOST_ACCESS", str(int(reaches)))
    gpu_aware._tried.cache_clear()
    can, why = gpu_aware.decide("cuda", 0)
    gpu_aware._tried.cache_clear()
    assert can is reaches, why
    assert ("a trial failed" in why) is not reaches
