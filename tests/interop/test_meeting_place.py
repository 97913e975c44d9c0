"""samestep, torch.distributed and jax.distributed in one program: their ranks meet at one address, in any order."""

import importlib.util
import itertools
import os
import subprocess
import sys

import pytest
from running import RUN_COMMAND, script
from samestep.launch import network

NEEDS = {"torch_samestep": "torch", "torch_gloo": "torch", "jax_processes": "jax"}
USERS = ("world", "closed", "face", *NEEDS)
ONE_OF_A_KIND = ({"world", "face"}, {"torch_samestep", "torch_gloo"})  # a process has one such world
ENDED = {("world", "closed"), ("face", "closed")}  # the second ends the world of the first, which is its own
QUICK = {
    ("world", "torch_gloo"),
    ("torch_samestep", "world"),
    ("world", "jax_processes"),
    ("jax_processes", "world"),
}
ORDERS = [
    pytest.param(pair, id="-".join(pair), marks=() if pair in QUICK else pytest.mark.slow)
    for pair in itertools.permutations(USERS, 2)
    if set(pair) not in ONE_OF_A_KIND and pair not in ENDED
]
AGAIN = ("closed", "torch_gloo", "destroy_torch", "world")
PATIENCE_S = 120


def need(*users):
    for user in users:
        if user in NEEDS and importlib.util.find_spec(NEEDS[user]) is None:
            pytest.skip(f"needs {NEEDS[user]}")


def run(command, *users, **variables):
    done = subprocess.run(
        [*command, script("interop/meeting"), *users],
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.count("all work")


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("users", ORDERS)
def test_under_samestep_run(users, n):
    need(*users)
    assert run([*RUN_COMMAND, "-n", str(n)], *users) == n


@pytest.mark.parametrize(
    "users", [*ORDERS, pytest.param(("world", "torch_gloo", "destroy_torch", "closed"), id="again")]
)
def test_where_rank_0_keeps_the_store(users):
    """As with the variables of other launchers, and of torchrun where it does not share its store."""
    if users[0] == "jax_processes" or users[1] == "jax_processes":
        pytest.skip("jax.distributed finds its job by itself under `samestep run` only")
    need(*users)
    with network.reserve_port() as holder:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(holder.getsockname()[1]), "WORLD_SIZE": "2"}
        ranks = [
            subprocess.Popen(
                [sys.executable, script("interop/meeting"), *users],
                env={**os.environ, **place, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            printed = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert ["all work" in text for text in printed] == [True, True], printed


@pytest.mark.parametrize(
    "users",
    [
        ("torch_gloo", "closed", "destroy_torch", "world"),
        pytest.param(("torch_elsewhere", "closed", "world"), marks=pytest.mark.slow),
        pytest.param(("torch_elsewhere", "world", "destroy_torch", "torch_gloo"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_a_group_of_torch_that_ends_or_has_met_elsewhere(users, tmp_path):
    need("torch_gloo")
    assert run([*RUN_COMMAND, "-n", "2"], *users, OTHER_PLACE=f"file://{tmp_path}/store") == 2


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["0", "1"], ids=["store-of-agent", "store-of-rank-0"])
@pytest.mark.parametrize("users", ORDERS)
def test_under_torchrun(users, shared):
    need(*users, "torch_gloo")
    if "jax_processes" in users:
        pytest.skip("jax.distributed finds its job by itself under `samestep run` only")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    assert run(command, *users, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=shared) == 2


@pytest.mark.slow
@pytest.mark.parametrize("users", ORDERS)
def test_under_samestep_run_with_mpi(users):
    need(*users)
    pytest.importorskip("mpi4py")
    assert run([*RUN_COMMAND, "--mpi", "-n", "2"], *users) == 2


@pytest.mark.parametrize(
    ("user", "transport"),
    [
        ("world", "shm"),
        ("closed", "tcp"),
        ("face", "tcp"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in [("world", "tcp"), ("closed", "shm"), ("face", "shm")]
        ),
    ],
)
def test_the_port_is_free_when_the_ranks_have_met(user, transport):
    again = [user] if user == "closed" else []
    users = [user, "port_is_free", *again]
    assert run([*RUN_COMMAND, "-n", "3"], *users, SAMESTEP_NATIVE_TRANSPORT=transport) == 3
