"""Backend choice, launch check and device assignment, as tables."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samestep.errors import InvalidArgumentError, UnavailableError
from samestep.world.choice import Facts, check_launch, choose
from samestep.world.making import assign_device

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
        (FOUR | {"launcher": "hydra", "can_meet": True}, "", "native", "native"),
        (FOUR | MPI | {"can_meet": True}, "", "mpi", "mpi"),
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
    choice = choose(Facts(**facts), requested)
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
        choose(Facts(**facts), requested)
    for part in parts:
        assert part in str(caught.value)


def test_a_backend_that_does_not_exist() -> None:
    with pytest.raises(InvalidArgumentError, match="no backend 'gloo'"):
        choose(Facts(), "gloo")


@pytest.mark.parametrize(
    ("launcher", "variable"),
    [
        ("openmpi", "OMPI_COMM_WORLD_SIZE"),
        ("hydra", "PMI_SIZE"),
        ("slurm", "SLURM_NTASKS"),
        ("srun", "SLURM_NTASKS"),
        ("samestep", "WORLD_SIZE"),
        ("torchrun", "WORLD_SIZE"),
    ],
)
def test_launcher_and_world_of_different_size(launcher: str, variable: str) -> None:
    facts = Facts(launcher=launcher, launcher_size=4)
    with pytest.raises(UnavailableError) as caught:
        check_launch(facts, 1, "/lib/libmpich.so.12")
    for part in [f"{variable}=4)", "has 1: /lib/libmpich.so.12", "samestep run -n 4 --mpi script.py"]:
        assert part in str(caught.value)


@pytest.mark.parametrize(("launched", "world"), [(4, 4), (1, 1), (1, 3)])
def test_launcher_and_world_that_agree(launched: int, world: int) -> None:
    check_launch(Facts(launcher="openmpi", launcher_size=launched), world, "")


def host(request: list[int] | str | None, local_size: int, visible: int) -> list[int | None]:
    """What each rank of one host is given."""
    return [
        assign_device("cuda", request, rank, local_size, visible, "nothing") for rank in range(local_size)
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
        ([2, 2, 9], 4, [2, 2]),
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
    ],
)
def test_every_rank_refuses_a_wrong_request(
    request_: list[int], visible: int, error: type, text: str
) -> None:
    for rank in range(3):
        with pytest.raises(error, match=text):
            assign_device("cuda", request_, rank, 3, visible, "nothing")
