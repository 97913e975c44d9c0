"""Messages in device memory that MPI takes as they lie, and who asks for it.

The stand-in of the runtime lets the host, and so MPI, reach them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import fake_arrays
import fake_libraries
import numpy as np
import pytest
import samestep as ss
from running import RUN_COMMAND, program
from samestep import _settings, fluxmpi
from samestep._util import mpi_library
from samestep.gpu import mpi_support
from samestep.world import transports

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
        works.append(group.isend(sent, right, tag=3))  # one tag: only the order distinguishes them
        received.append(fake_arrays.Array.of(np.zeros(count, "float32"), stream))
    for count, array in zip(COUNTS, received, strict=True):
        status = group.recv(array, left, tag=3)
        assert (status.source, status.count) == (left, count)
        np.testing.assert_array_equal(array.get(), values(left, count))
    for work in works:
        work.wait()


@ranks
def test_a_longer_buffer_keeps_what_the_message_does_not_fill(group, reachable):
    """Also where the host reads a short message with its header, and MPI would write a long one."""
    stream, n = fake_arrays.Stream(), group.size
    right, left = (group.rank + 1) % n, (group.rank - 1) % n
    for count in (0, 3, 1000, 5000, 70_000):
        for room in (7, 5000):
            work = group.isend(fake_arrays.Array.of(values(group.rank, count), stream), right)
            array = fake_arrays.Array.of(np.full(count + room, -1.0, "float32"), stream)
            assert group.recv(array, left) == (left, 0, count)
            np.testing.assert_array_equal(array.get()[:count], values(left, count))
            np.testing.assert_array_equal(array.get()[count:], np.full(room, -1.0))
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


PLACES = {
    "host": lambda stream, count: np.zeros(count, "float32"),
    "device": lambda stream, count: fake_arrays.Array.of(np.zeros(count, "float32"), stream),
}


@ranks
@pytest.mark.parametrize("count", [10, 5000])  # the first is staged where it is received on the device
@pytest.mark.parametrize("place", PLACES)
def test_receives_get_messages_in_the_order_of_their_calls(group, reachable, place, count):
    """Also while kernels still use the memory of the first."""
    if group.rank == 0:
        for work in [group.isend(values(0, 5000), 1, tag=3), group.isend(values(1, count), 1, tag=3)]:
            work.wait()
    if group.rank == 1:
        busy, free = fake_arrays.Stream(), fake_arrays.Stream()
        first = fake_arrays.Array.of(np.full(5000, -1.0, "float32"), busy)
        second = PLACES[place](free, count)
        for stream in (busy, free):
            stream.synchronize()
        with busy.held():
            works = [group.irecv(first, 0, tag=3), group.irecv(second, 0, tag=3)]
            if place == "host":
                assert works[1].wait() == (0, 3, count)
            assert not works[0].done()
        assert [work.wait() for work in works] == [(0, 3, 5000), (0, 3, count)]
        np.testing.assert_array_equal(first.get(), values(0, 5000))
        np.testing.assert_array_equal(second if place == "host" else second.get(), values(1, count))
    group.barrier()


@ranks
def test_a_receive_that_is_given_up_before_its_memory_is_free_takes_no_message(group, reachable):
    if group.rank == 1:
        busy = fake_arrays.Stream()
        given_up = fake_arrays.Array.of(np.full(5000, -1.0, "float32"), busy)
        busy.synchronize()
        with busy.held(), pytest.raises(ss.TimeoutError, match="this rank's device"):
            group.recv(given_up, 0, tag=3, timeout=0.05)
    group.barrier()
    if group.rank == 0:
        group.send(values(0, 5000), 1, tag=3)
    if group.rank == 1:
        x = np.zeros(5000, "float32")
        group.recv(x, 0, tag=3)
        np.testing.assert_array_equal(x, values(0, 5000))
        np.testing.assert_array_equal(given_up.get(), np.full(5000, -1.0))


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


@pytest.mark.parametrize("operation", ["messages", "bcast"])
def test_the_memory_itself_is_given_to_mpi(operation):
    """Where MPI cannot reach it the job dies; through the host it lives."""
    call = program("devices/device_launched", "call_mpi_on_device_memory", operation)
    env = {k: v for k, v in os.environ.items() if not k.startswith("OMPI_COMM") and not k.startswith("PMIX")}
    env |= fake_libraries.environment() | {
        "PYTHONPATH": os.pathsep.join([str(fake_libraries.HERE), *sys.path])
    }
    alive = {}
    for asked in ("0", "1"):
        done = subprocess.run(
            [*RUN_COMMAND, "--mpi", "-n", "2", *call],
            env=env | {"SAMESTEP_GPU_AWARE_MPI": asked, "SAMESTEP_MPI_TRANSPORT": "mpi"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        alive[asked] = done.returncode == 0 and done.stdout.count("alive") == 2
    assert alive == {"0": True, "1": False}


# ---- who asks for it


def test_asking_for_it_puts_all_ranks_on_mpi(monkeypatch):
    monkeypatch.delenv("SAMESTEP_MPI_TRANSPORT", raising=False)
    monkeypatch.setenv("SAMESTEP_GPU_AWARE_MPI", "1")
    assert transports.describe("mpi") == "mpi (SAMESTEP_MPI_TRANSPORT=mpi)"
    monkeypatch.setenv("SAMESTEP_MPI_TRANSPORT", "shm")
    assert "SAMESTEP_MPI_TRANSPORT=shm" in transports.describe("mpi")
    monkeypatch.setenv("SAMESTEP_GPU_AWARE_MPI", "yes")
    assert "0, 1 or auto" in transports.describe("mpi")
    assert "0, 1 or auto" in mpi_support.describe("cuda")


def test_fluxmpi_turns_it_off(monkeypatch):
    monkeypatch.setenv("SAMESTEP_GPU_AWARE_MPI", "1")
    fluxmpi.disable_cudampi_support()
    assert mpi_support.decide("cuda", 0) == (False, "SAMESTEP_GPU_AWARE_MPI=0")
    fluxmpi.disable_cudampi_support(disable=False)
    assert _settings.read(mpi_support.VARIABLE) == "auto"


def test_this_library_is_asked_first(monkeypatch):
    monkeypatch.setenv("SAMESTEP_GPU_AWARE_MPI", "auto")
    mpi_support._tried.cache_clear()
    assert mpi_support.decide("cuda", 0) == (False, "the MPI library says that it cannot")
    assert "cannot" in mpi_support.describe("cuda")


@pytest.mark.parametrize("answer", [0, 1])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("cuda", "MPIX_Query_cuda_support"),
        ("hip", "MPIX_Query_rocm_support"),  # Open MPI
        ("hip", "MPIX_Query_hip_support"),  # MPICH
    ],
)
def test_the_library_answers_by_its_result(monkeypatch, tmp_path, kind, name, answer):
    """All three are `int f(void)`, in the headers of Open MPI and MPICH."""
    source, library = tmp_path / "mpi.c", tmp_path / "libmpi.so"
    source.write_text(f"int {name}(void) {{ return {answer}; }}")
    compiler = fake_libraries.compiler() or "c++"
    subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", source, "-o", library], check=True)
    monkeypatch.setattr(mpi_library, "load", lambda: SimpleNamespace(path=str(library)))
    assert mpi_support.query(kind) is bool(answer)


@pytest.mark.parametrize("reaches", [True, False])
def test_a_library_that_says_yes_is_tried(monkeypatch, reaches):
    monkeypatch.setenv("SAMESTEP_GPU_AWARE_MPI", "auto")
    monkeypatch.setattr(mpi_support, "query", lambda kind: True)
    for name, value in fake_libraries.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FAKE_GPU_HOST_ACCESS", str(int(reaches)))
    mpi_support._tried.cache_clear()
    can, why = mpi_support.decide("cuda", 0)
    mpi_support._tried.cache_clear()
    assert can is reaches, why
    assert ("a trial failed" in why) is not reaches
