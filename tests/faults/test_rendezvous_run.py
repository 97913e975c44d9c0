"""Ranks that `samestep run` started meet, as processes."""

import re

import pytest
from launching import reports
from running import program
from samestep.launch import network


@pytest.fixture
def start(begin):
    """Starts a run of a function of the programs."""
    return lambda function, *values, launcher="--native", words=(), n=2: begin(
        launcher, program("faults/rendezvous_run", function, *values), *words, n=n
    )


def test_ranks_meet_with_a_secret_that_nobody_chose(start, launcher):
    run = start("exchange_ranks", launcher=launcher, n=3)
    found = reports(run)
    secret = found[0][3]
    assert re.fullmatch("[0-9a-f]{32}", secret)
    assert found == {r: ["0", "1", "2", secret] for r in range(3)}


def test_rank_0_is_killed(start):
    run = start("kill_rank_0")
    assert run.wait() == 137
    assert re.search(
        r"^\[1\] lost: rank 0, which keeps the store at 127\.0\.0\.1:\d+, has ended", run.out, re.M
    )


@pytest.mark.slow
def test_a_second_job_on_the_port_is_refused_and_the_first_goes_on(start, tmp_path):
    with network.reserve_port() as holder:
        port = holder.getsockname()[1]
        one = start("meet_and_wait", words=["--master-port", str(port)])
        one.until_all_say("ready")
        refused = reports(start("meet_on_a_port_in_use", words=["--master-port", str(port)]))
        (tmp_path / "go").touch()
        assert one.wait() == 0, one.err
    assert refused[0].startswith(
        f"rank 0 of 2 cannot join: cannot listen at 127.0.0.1:{port}: the port is taken"
    )
    assert refused[1].startswith(f"rank 1 of 2 cannot join: the store at 127.0.0.1:{port} is another job's")


def test_shared_memory_is_for_one_host(start):
    found = reports(start("initialize_over_shared_memory_of_two_hosts"))
    assert found[0] == found[1]
    assert "SAMESTEP_NATIVE_TRANSPORT=shm needs all ranks on one host, but there are 2" in found[0]


@pytest.mark.parametrize("name", ["rank", "world_size"])
def test_a_claim_that_differs_from_the_launcher(start, name):
    run = start("initialize_with_another", name)
    assert all(
        re.search(rf"{name}=\d was given but the launcher \(samestep\)", text)
        for text in reports(run).values()
    )


def test_the_native_world_opens_ends_and_opens_again(start):
    found = reports(start("initialize_three_times", n=3))
    assert found == {rank: ["native", [6.0] * 5, True] for rank in range(3)}
