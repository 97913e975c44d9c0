"""Backend choice, launch check and device assignment, as tables, through the binding."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samestep import _core
from samestep.errors import InvalidArgumentError, UnavailableError

MPI = {"mpi_loadable": True, "mpi_detail": "Open MPI 5 at /lib/libmpi.so.40"}
NCCL = {"nccl_loadable": True, "nccl_detail": "NCCL 2.28"}
DEVICES = {"devices": 2, "every_rank_has_device": True}
FOUR = {"launcher": "openmpi", "launcher_size": 4}


@pytest.mark.parametrize(
    ("facts", "requested", "backend", "host"),
    [
        ({}, "", "native", "native"),
        (MPI | NCCL | DEVICES, "", "native", "native"),
        (FOUR | MPI, "", "mpi", "mpi"),
        (FOUR | MPI | {"launcher": "hydra"}, "", "mpi", "mpi"),
        (FOUR | MPI | {"launcher": "slurm"}, "", "mpi", "mpi"),
        (FOUR | {"launcher_size": 1}, "", "native", "native"),
        (FOUR | {"launcher": "hydra", "has_pmi": True}, "", "native", "native"),
        (FOUR | MPI | {"launcher": "hydra", "has_pmi": True}, "", "mpi", "mpi"),
        (FOUR | MPI | NCCL | DEVICES, "", "nccl", "mpi"),
        (FOUR | MPI | NCCL | {"devices": 2}, "", "mpi", "mpi"),
        (FOUR | MPI | DEVICES, "", "mpi", "mpi"),
        (FOUR | MPI | {"launcher": "srun"}, "", "native", "native"),
        (FOUR | MPI | {"launcher": "samestep"}, "", "native", "native"),
        (FOUR | MPI | NCCL | DEVICES | {"launcher": "torchrun"}, "", "native", "native"),
        (MPI, "mpi", "mpi", "mpi"),
        (FOUR | MPI | NCCL | DEVICES, "mpi", "mpi", "mpi"),
        (FOUR | MPI, "native", "native", "native"),
        (NCCL | {"devices": 1}, "nccl", "nccl", "native"),
    ],
)
def test_choice(facts: dict, requested: str, backend: str, host: str) -> None:
    choice = _core.choose(_core.Facts(**facts), requested)
    assert (choice.backend, choice.host) == (backend, host)
    assert choice.reason


@pytest.mark.parametrize(
    ("facts", "requested", "parts"),
    [
        (FOUR | {"mpi_detail": "no mpi4py"}, "", ["Open MPI's mpirun", "no mpi4py", "pip install"]),
        ({"mpi_detail": "no libmpi"}, "mpi", ["'mpi' was asked for", "no libmpi", "pip install"]),
        (
            {"nccl_detail": "no libnccl.so.2", "device_detail": "no libcuda.so.1"},
            "nccl",
            ["no libnccl.so.2", "no libcuda.so.1", "nvidia-nccl"],
        ),
        (FOUR | MPI | NCCL | {"devices": 1}, "nccl", ["A rank of this job sees no device"]),
    ],
)
def test_what_cannot_be_used_is_named_with_a_cure(facts: dict, requested: str, parts: list[str]) -> None:
    with pytest.raises(UnavailableError) as caught:
        _core.choose(_core.Facts(**facts), requested)
    for part in parts:
        assert part in str(caught.value)


def test_a_backend_that_does_not_exist() -> None:
    with pytest.raises(InvalidArgumentError, match="no backend 'gloo'"):
        _core.choose(_core.Facts(), "gloo")


def test_facts_are_read_and_written() -> None:
    facts = _core.Facts(**(FOUR | MPI | NCCL | DEVICES), device_detail="two")
    assert (facts.launcher, facts.launcher_size, facts.device_detail) == ("openmpi", 4, "two")
    facts.mpi_loadable = False
    assert not facts.mpi_loadable


@pytest.mark.parametrize("launcher", ["openmpi", "hydra", "slurm", "srun", "samestep", "torchrun"])
def test_launcher_and_world_of_different_size(launcher: str) -> None:
    facts = _core.Facts(launcher=launcher, launcher_size=4)
    with pytest.raises(UnavailableError) as caught:
        _core.check_launch(facts, _core.World(size=1, library="/lib/libmpich.so.12"))
    for part in ["=4)", "has 1: /lib/libmpich.so.12", "samestep run -n 4 --mpi script.py"]:
        assert part in str(caught.value)


@pytest.mark.parametrize(("launched", "world"), [(4, 4), (1, 1), (1, 3)])
def test_launcher_and_world_that_agree(launched: int, world: int) -> None:
    _core.check_launch(
        _core.Facts(launcher="openmpi", launcher_size=launched), _core.World(size=world, library="")
    )


def host(request: list[int] | str | None, local_size: int, visible: int) -> list[int | None]:
    """What each rank of one host is given."""
    return [
        _core.assign_device("cuda", request, rank, local_size, visible, "nothing")
        for rank in range(local_size)
    ]


@pytest.mark.parametrize(
    ("request_", "visible", "devices"),
    [
        (None, 4, [0, 1, 2, 3]),
        (None, 4, [0, 1]),  # the other host of an unequal job
        (None, 2, [0, 1, 0]),
        (None, 1, [0, 0, 0]),  # a mask of one entry for each process
        (None, 0, [None, None]),
        ("missing", 4, [None, None]),
        ([3, 1], 4, [3, 1]),
        ((2, 2, 9), 4, [2, 2]),
    ],
)
def test_assignment(request_: list[int] | str | None, visible: int, devices: list[int | None]) -> None:
    assert host(request_, len(devices), visible) == devices


@given(local_size=st.integers(1, 40), visible=st.integers(1, 40))
def test_no_device_is_shared_while_one_is_free(local_size: int, visible: int) -> None:
    devices = host(None, local_size, visible)
    assert devices[0] == 0
    assert set(devices) <= set(range(visible))
    assert max(Counter(devices).values()) == -(-local_size // visible)


@pytest.mark.parametrize(
    ("request_", "visible", "error", "text"),
    [
        ([0], 4, InvalidArgumentError, "cuda_devices has 1 entries, but this host has 3 ranks"),
        ([], 4, InvalidArgumentError, "0 entries"),
        ([0, -1, 2], 4, InvalidArgumentError, r"cuda_devices\[1\] is -1"),
        ([0, 1, 4], 4, UnavailableError, r"cuda_devices\[2\] is 4, but this process sees 4"),
        ([0, 1, 2], 0, UnavailableError, "sees no cuda device: nothing"),
        ("all", 4, InvalidArgumentError, "not 'all'"),
        ([0.5, 1, 2], 4, InvalidArgumentError, "list of ints"),
        (3, 4, InvalidArgumentError, "not 3"),
    ],
)
def test_every_rank_refuses_a_wrong_request(request_: object, visible: int, error: type, text: str) -> None:
    for rank in range(3):
        with pytest.raises(error, match=text):
            _core.assign_device("cuda", request_, rank, 3, visible, "nothing")
