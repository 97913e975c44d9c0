"""What users get wrong, or do in a way of their own, is right or refused on all ranks."""

import gc
import json
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
