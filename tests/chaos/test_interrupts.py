"""Some interruptions of each kind; `python tests/chaos/interrupts.py --interrupts 200` does more."""

import random

import interrupts
import pytest

SHARDS = 4


@pytest.fixture(scope="module")
def expected():
    return interrupts.undisturbed(SHARDS)


def leg(*planned, n=3, elastic=True, target="rank", signum="SIGTERM", seconds=()):
    kill = any(place.endswith("SIGKILL") for place in planned)
    return interrupts.Leg(
        0, "shm", n, elastic, target, signum, "step", list(planned), "began", list(seconds), kill
    )


def resumed(path, expected):
    outcome = interrupts.strike(leg(n=2, target="none"), path, SHARDS, expected)
    assert (outcome.wrong, outcome.code) == ("", 0), outcome


@pytest.mark.parametrize(
    ("planned", "steps"),
    [
        (["1@1:between:SIGTERM"], 10),  # in a validation: heard at the end of the next step
        (["1@5:mean:SIGUSR1", "0@*:write:SIGKILL"], 5),  # the writer dies
        pytest.param(["1@5:mean:SIGUSR1", "0@*:rename:SIGKILL"], 5, marks=pytest.mark.slow),
        pytest.param(["2@4:after:SIGTERM", "0@*:write:SIGTERM"], 5, marks=pytest.mark.slow),
        pytest.param(["0@5:begin:SIGTERM", "1@5:updated:SIGKILL"], 5, marks=pytest.mark.slow),
        pytest.param(["2@36:begin:SIGTERM"], 36, marks=pytest.mark.slow),  # the last step
    ],
)
def test_all_stop_after_one_step_and_go_on(tmp_path, expected, planned, steps):
    path = str(tmp_path / "state.npz")
    outcome = interrupts.strike(leg(*planned), path, SHARDS, expected)
    assert (outcome.wrong, outcome.code, outcome.steps) == ("", interrupts.STOPPED, steps), outcome
    resumed(path, expected)


@pytest.mark.parametrize(
    ("target", "signum"),
    [
        ("launcher", "SIGUSR1"),
        pytest.param("all", "SIGTERM", marks=pytest.mark.slow),
        pytest.param("launcher", "SIGTERM", marks=pytest.mark.slow),
        pytest.param("all", "SIGUSR1", marks=pytest.mark.slow),
    ],
)
def test_the_launcher_or_all_processes_are_asked_twice(tmp_path, expected, target, signum):
    path = str(tmp_path / "state.npz")
    outcome = interrupts.strike(
        leg(target=target, signum=signum, seconds=(0.05, 0.06)), path, SHARDS, expected
    )
    assert (outcome.wrong, outcome.code) == ("", interrupts.STOPPED), outcome
    assert outcome.steps > 0
    resumed(path, expected)


@pytest.mark.slow
def test_random_interruptions(capsys):
    assert interrupts.main(["--interrupts", "12", "--seed", "1"]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_another_result_counts(monkeypatch, capsys):
    monkeypatch.setattr(interrupts, "undisturbed", lambda shards: "00")
    assert interrupts.main(["--interrupts", "1", "--seed", "1", "--jobs", "1"]) == 1
    assert "another result" in capsys.readouterr().out


def test_a_plan_is_that_of_its_seed():
    for seed in range(200):
        one, other = (interrupts.plan(random.Random(seed), seed, ["shm"], seed % 36) for _ in "12")
        assert one == other
        assert one.target != "rank" or one.planned


@pytest.mark.parametrize(
    ("code", "out"),
    [
        (None, ["began 0"]),
        (0, ["began 0", "result 11 36 1"]),
        (0, ["began 0"]),
        (1, ["began 0", "ended 0 4 143", "saved 0 4"]),
        (143, ["began 0", "ended 0 4 143", "saved 0 5"]),
        (143, ["began 0", "ended 0 4 143", "saved 0 4", "saved 0 4"]),
        (143, ["began 0"]),
        (1, []),
    ],
)
def test_what_should_not_be_is_told(code, out):
    assert interrupts.judge(leg(n=1), code, out, any("saved" in line for line in out), "22")
    assert not interrupts.judge(leg(n=1), 143, [], False, "22")
    assert not interrupts.judge(leg(n=1), 143, ["began 0", "saved 0 4", "ended 0 4 143"], True, "22")
