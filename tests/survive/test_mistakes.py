"""What users get wrong, or do in a way of their own, is right or refused on all ranks."""

import gc
import json
import re
import signal
import subprocess

import numpy as np
import pytest
import samestep as ss
from running import RUN_COMMAND, program


def run(function, *values, n=2, words=("--min-ranks", "1"), timeout=60):
    command = [*RUN_COMMAND, "-n", str(n), "--raw", *words, *program("survive/mistakes", function, *values)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    found = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("result ")]
    return done.returncode, found, done.stderr


def test_tensors_that_the_program_knows_by_other_names():
    pytest.importorskip("torch")
    assert run("torch_under_other_names", n=3)[:2] == (0, [[0.0, 0.0, 0.0, True]])


def test_only_the_world_goes_on():
    code, _, err = run("subgroup")
    assert code == 1
    assert "cannot go on after a loss; give it what initialize() returns" in err


def test_a_failure_after_others_have_ended_is_one():
    code, _, err = run("raises_after_the_loop", n=3)
    assert code == 1
    assert "root cause: rank 0" in err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_result_that_rank_0_did_not_live_to_write_is_missed(rank):
    code, _, err = run("is_killed_after_the_loop", rank, n=3)
    assert (code != 0) == (rank == 0)
    said = "rank 0, the first of those that were left, was lost behind the loop"
    assert (said in err) == (rank == 0)


def test_parts_are_set_back_after_a_step_error():
    one = [[[0.0, 0.0], [0.0, 0.0]], [4.0, 4.0]]
    assert run("goes_on_after_step_error", n=3)[:2] == (0, [[one] * 3])


@pytest.mark.parametrize(("n_items", "mode"), [(3, "drop"), (0, "exact"), (0, "pad")])
def test_a_sampler_without_steps(n_items, mode):
    backend = ss.initialize()
    sampler = ss.DistributedSampler(backend, n_items, batch_size=4, shards=2, mode=mode)
    state = ss.TrainState(backend, w=0.0, sampler=sampler)
    with pytest.raises(ss.InvalidArgumentError, match=f"{n_items} items make no step of batch_size=4"):
        state.steps(epochs=2)


def test_what_follows_the_group_is_forgotten_with_its_object():
    backend = ss.initialize()
    known = len(backend._changed)
    for _ in range(3):
        ss.Accumulator(backend, shards=2)
        ss.DistributedSampler(backend, 5)
    gc.collect()
    assert len(backend._changed) == known


def test_a_loss_before_the_beginning(tmp_path):
    assert run("is_lost_before_it_begins", n=3)[:2] == (0, [[[[8.0, 8.0], 6]] * 2])
    path = tmp_path / "state"
    state = ss.TrainState(ss.initialize(), w=np.zeros(2))
    state.load_state_dict({**state.state_dict(), "step": 4})
    state.save(path)
    assert run("is_lost_before_it_begins", str(path), n=3)[:2] == (0, [[[[2.0, 2.0], 6]] * 2])


@pytest.mark.slow
def test_groups_are_made_anew_by_newcomers_too():
    words = ["--min-ranks", "1", "--max-restarts", "1"]
    assert run("makes_groups_anew", n=3, words=words)[:2] == (0, [[60.0, 3, 3]])


@pytest.mark.slow
def test_a_newcomer_does_not_wait_for_ever(tmp_path):
    """The others are none the worse."""
    words = ["--min-ranks", "1", "--max-restarts", "1"]
    code, found, err = run("waits_in_vain", str(tmp_path), n=3, words=words)
    assert (code, found) == (0, [[[4.0, 4.0]] * 2]), err
    assert (
        "UnavailableError: TrainState: this rank was started later, and waits for the others to end a step"
        in err
    )
    assert "they have not within 1 s, the timeout of initialize" in err


def test_a_newcomer_of_another_version_is_refused_before_the_others_meet_it(tmp_path):
    words = ["--min-ranks", "1", "--max-restarts", "1"]
    code, found, err = run("has_another_version", "1.1", str(tmp_path), n=3, words=words)
    assert (code, found) == (0, [[[4.0, 4.0]] * 2]), err
    assert (
        "MismatchError: initialize: this rank was started later and runs samestep 9.9, but the others run "
        f"{ss.__version__}: install that version"
    ) in err


@pytest.mark.parametrize("words", [(), ("--min-ranks", "1")])
def test_ranks_of_several_versions_are_refused_at_the_start(words, tmp_path):
    code, found, err = run("has_another_version", "2.0", str(tmp_path), n=3, words=words)
    assert (code, found) == (1, [])
    text = f"MismatchError: all ranks need the same version of samestep, but have {ss.__version__} on ranks 0-1, 9.9"
    assert len(re.findall(f"^samestep.{re.escape(text)} on rank 2$", err, re.M)) == 3


@pytest.mark.slow
def test_a_newcomer_that_cannot_be_connected_does_not_end_the_others(monkeypatch, tmp_path):
    monkeypatch.setenv("SAMESTEP_NATIVE_TRANSPORT", "tcp")
    words = ["--min-ranks", "1", "--max-restarts", "1"]
    code, found, err = run("cannot_be_connected", str(tmp_path), n=3, words=words)
    assert (code, found) == (0, [[[200.0, 200.0], [2, 3]]]), err
    assert "UnavailableError: no port is free" in err


@pytest.mark.slow
def test_training_begins_anew_where_no_rank_is_left_that_had_the_state(tmp_path):
    words = ["--min-ranks", "1", "--max-restarts", "1"]
    code, found, err = run("loses_all_that_had_the_state", str(tmp_path), words=words)
    assert (code, found) == (0, [[1.5**40, 40]])
    assert "no rank that had the state is left: training begins anew" in err


def test_a_rank_is_lost_in_save(tmp_path):
    path = str(tmp_path / "state.npz")
    assert run("loses_the_writer", path, n=3)[:2] == (0, [[[6.0, 6.0], 6, 2]])
    state = ss.TrainState(ss.initialize(), w=np.zeros(2), save=path)
    assert (state.step, state.w.tolist()) == (6, [6.0, 6.0])


@pytest.mark.parametrize("call", ["save", "restore"])
@pytest.mark.parametrize(
    "how", ["passed", *(pytest.param(h, marks=pytest.mark.slow) for h in ("file", "before"))]
)
def test_a_rank_is_lost_in_a_call_between_steps(tmp_path, call, how):
    path = str(tmp_path / "state.npz")
    if call == "restore":
        state = ss.TrainState(ss.initialize(), w=np.full(2, 10.0))
        state.load_state_dict({**state.state_dict(), "step": 2})
        state.save(path)
    w = 6.0 if call == "save" else 14.0
    code, found, err = run("is_lost_between_steps", call, how, path, n=3)
    assert (code, found) == (0, [[[[w, w], 6]] * 2]), err
    state = ss.TrainState(ss.initialize(), w=np.zeros(2), save=path)
    assert (state.step, state.w[0]) == ((4, 4.0) if call == "save" else (2, 10.0))


@pytest.mark.parametrize(
    "call", ["restore", *(pytest.param(c, marks=pytest.mark.slow) for c in ("save", "allreduce"))]
)
def test_a_newcomer_makes_the_calls_that_the_others_make(tmp_path, call):
    path = str(tmp_path / "state.npz")
    state = ss.TrainState(ss.initialize(), w=np.full(2, 10.0))
    state.load_state_dict({**state.state_dict(), "step": 10})
    state.save(path)
    code, found, err = run("comes_back", path, call, n=3, words=["--min-ranks", "1", "--max-restarts", "1"])
    assert (code, found) == (0, [[[40.0, 40.0], 40, [2, 3]]]), err


def test_signals_do_what_they_did_when_the_state_is_gone(tmp_path):
    heard = []
    kept = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        signal.signal(signal.SIGUSR1, lambda *_: heard.append("before"))
        state = ss.TrainState(ss.initialize(), w=0.0, save=tmp_path / "state.npz")
        signal.raise_signal(signal.SIGUSR1)  # between steps
        with pytest.raises(SystemExit, match="143"):
            for step in state.steps(steps=3):
                with step:
                    state.w += 1.0
        assert (state.step, heard) == (1, [])
        signal.raise_signal(signal.SIGUSR1)  # while the process ends
        assert heard == []
        signal.signal(signal.SIGUSR1, lambda *_: heard.append("before"))
        state = ss.TrainState(ss.initialize(), w=0.0, save=tmp_path / "state.npz")
        del state
        gc.collect()
        for _ in "12":
            signal.raise_signal(signal.SIGUSR1)
        assert heard == ["before"] * 2
    finally:
        for signum, handler in kept.items():
            signal.signal(signum, handler)


def test_a_job_has_one_state():
    code, _, err = run("has_two_states")
    assert code == 1
    assert "a job that goes on after a loss has one" in err


@pytest.mark.parametrize("how", ["assigns", "in place", pytest.param("by gradients", marks=pytest.mark.slow)])
def test_what_has_changed_in_place_is_not_repeated(how):
    code, found, err = run("changes", how, n=3)
    if how == "assigns":
        assert (code, found) == (0, [[[4.0, 4.0]]])
    else:
        assert code != 0
        assert "TrainState: step 3 cannot be repeated" in err


def test_a_state_of_other_steps_is_refused():
    backend, states = ss.initialize(), []
    for how in (
        {"batch_size": 4, "shards": 2, "seed": 7},
        {"batch_size": 6, "shards": 2},
        {"batch_size": 4, "shards": 2},
    ):
        states.append(ss.TrainState(backend, w=0.0, sampler=ss.DistributedSampler(backend, 12, **how)))
    saved = states[0].state_dict()
    with pytest.raises(ss.InvalidArgumentError, match="batch_size=4, not 6"):
        states[1].load_state_dict(saved)
    states[2].load_state_dict(saved)
    assert states[2]._sampler.seed == 7
    with pytest.raises(ss.MismatchError, match="sampler"):
        ss.TrainState(backend, w=0.0).load_state_dict(saved)
