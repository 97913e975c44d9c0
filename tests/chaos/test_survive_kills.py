"""50 random kills, as a slow test; `python tests/chaos/survive.py --kills 1000` does more."""

import pytest
import survive


@pytest.mark.slow
def test_the_result_stays(capsys):
    assert survive.main(["--kills", "50", "--seed", "1"]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_another_result_and_a_job_that_fails_count(monkeypatch, capsys):
    monkeypatch.setattr(survive, "undisturbed", lambda shards: "0" * 64)
    assert survive.main(["--kills", "1", "--seed", "1", "--jobs", "1"]) == 1
    assert "Outcome(job=Job(seed=1," in capsys.readouterr().out


def test_a_plan_leaves_a_rank():
    for seed in range(500):
        job = survive.plan(seed, ["shm"])
        assert len({place.partition(".")[0] for place in job.planned}) < job.n
        assert survive.plan(seed, ["shm"]) == job
