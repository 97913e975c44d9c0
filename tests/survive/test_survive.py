"""Ranks die anywhere, and the result has the bits of a run without a loss."""

import json
import os
import re
import subprocess
import sys

import pytest
from running import RUN_COMMAND, program, script
from samestep.step.audit import choose
from surviving import PATIENCE_S, elastic, result, run

FILE = "survive/train"


@pytest.fixture(scope="module")
def undisturbed():
    """Hash and steps of a run of one rank, by function and further arguments."""
    known = {}

    def of(function, *values):
        key = json.dumps([function, *values])
        if key not in known:
            first = [] if function == "audited" else [[]]
            command = [sys.executable, *program(FILE, function, *first, *values)]
            env = {name: value for name, value in os.environ.items() if not name.startswith("SAMESTEP_")}
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=PATIENCE_S, check=True, env=env
            )
            known[key] = result((0, done.stdout, done.stderr))[:2]
        return known[key]

    return of


slow = pytest.mark.slow  # each starts several jobs of some seconds; some of each kind always run


@pytest.mark.parametrize(
    ("rank", "where"),
    [
        (0, "mean"),
        (2, "updated"),
        *(
            pytest.param(rank, where, marks=slow)
            for rank, where in [
                (0, "begin"),
                (0, "added"),
                (0, "updated"),
                (2, "begin"),
                (2, "added"),
                (2, "mean"),
            ]
        ),
    ],
)
def test_a_rank_is_killed_in_a_step(undisturbed, rank, where):
    done = run("numpy", [f"{rank}.0@5:{where}"], n=3, words=elastic())
    assert result(done) == [*undisturbed("numpy"), "2"]
    assert f"rank {rank} (pid " in done[2]
    assert "2 of 3 ranks are left, the others go on" in done[2]


@pytest.mark.parametrize(
    "planned",
    [
        ["0.0@3:begin", "1.0@3:change"],  # as the others go on
        ["2.0@0:import", "1.0@0:initialize"],
        pytest.param(["0.0@3:mean", "1.0@3:mean"], marks=slow),
        pytest.param(["0.0@3:begin", "3.0@3:change", "1.0@3:change"], marks=slow),
        pytest.param(["0.0@1:begin", "1.0@2:begin", "2.0@3:added"], marks=slow),
        pytest.param(["0.0@0:initialize"], marks=slow),
    ],
)
def test_several_are_killed(undisturbed, planned):
    done = run("numpy", planned, words=elastic())
    assert result(done) == [*undisturbed("numpy"), str(4 - len(planned))]


@slow
def test_a_rank_is_stopped(undisturbed):
    done = run("numpy", ["1.0@4:stop"], 8, 2.0, n=3, words=elastic())
    assert result(done) == [*undisturbed("numpy"), "2"]


@slow
@pytest.mark.parametrize("shards", [1, 3, 7])
def test_shards_that_do_not_divide_evenly(undisturbed, shards):
    done = run("numpy", ["1.0@2:mean", "0.0@9:added"], shards, words=elastic())
    assert result(done) == [*undisturbed("numpy", shards), "2"]


@pytest.mark.parametrize(
    "planned",
    [
        pytest.param(["0.0@2:updated", "0.1@0:import", "0.2@0:initialize"], marks=slow),
        pytest.param(["1.0@2:begin"], marks=slow),
        pytest.param(["0.0@2:mean", "1.0@2:mean", "0.1@9:begin"], marks=slow),
        pytest.param(["0.0@2:updated", "1.0@4:change"], marks=slow),
    ],
)
def test_lost_ranks_are_started_again(undisturbed, planned):
    """How many there are at the end depends on time: a newcomer may come too late."""
    done = run("numpy", planned, 8, 20.0, 0.01, n=3, words=elastic(1, 10))
    assert result(done)[:2] == undisturbed("numpy")


def test_a_newcomer_takes_part(undisturbed):
    code, out, err = run("numpy", ["0.0@2:begin"], 8, 20.0, 0.03, n=2, words=elastic(1, 1))
    assert result((code, out, err)) == [*undisturbed("numpy"), "2"]


@slow
@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize("planned", [["0.0@3:added"], ["0.0@3:updated", "1.0@7:added"]])
def test_libraries(undisturbed, library, planned):
    pytest.importorskip(library)
    pytest.importorskip("optax" if library == "jax" else "torch")
    done = run(library, planned, n=3, words=elastic(1, 5))
    assert result(done)[:2] == undisturbed(library)


@pytest.mark.parametrize(
    "verb", ["allreduce", *(pytest.param(v, marks=slow) for v in ("allgather", "tree", "gradient"))]
)
def test_programs_with_collectives_are_compiled_anew(undisturbed, verb):
    pytest.importorskip("jax")
    done = run("compiled", ["1.0@3:begin", "0.0@7:updated"], verb, words=elastic())
    assert result(done) == [*undisturbed("compiled", verb), "2"]


def test_arrays_that_a_program_was_given_for_good(undisturbed):
    """Its results take their memory, so they are gone when it fails."""
    pytest.importorskip("jax")
    code, out, err = run("compiled", ["1.0@3:begin"], "allreduce", None, ["donates"], n=3, words=elastic())
    assert (code != 0, "result" in out) == (True, False)
    assert "TrainState: step 3 cannot be repeated" in err
    done = run("compiled", ["1.0@3:begin"], "allreduce", None, ["donates", "undo"], n=3, words=elastic())
    assert result(done) == [*undisturbed("compiled", "allreduce"), "2"]


@pytest.mark.parametrize("library", ["jax", "numpy"])
def test_a_collective_follows_the_update_by_a_program(undisturbed, library):
    """Arrays of JAX are what they were, whatever the program has computed; others may have changed in place."""
    pytest.importorskip("jax")
    done = run("compiled", ["0.0@5:updated"], "allreduce", None, [f"then {library}"], n=3, words=elastic())
    if library == "jax":
        assert result(done) == [*undisturbed("compiled", "allreduce"), "2"]
    else:
        assert (done[0] != 0, "result" in done[1]) == (True, False)
        assert "TrainState: step 5 cannot be repeated" in done[2]


@slow
@pytest.mark.parametrize("verb", ["allreduce", "allgather", "gradient"])
def test_programs_with_collectives_and_a_newcomer(undisturbed, verb, tmp_path):
    pytest.importorskip("jax")
    done = run("compiled", ["1.0@3:begin"], verb, str(tmp_path), n=3, words=elastic(1, 1))
    assert result(done)[:2] == undisturbed("compiled", verb)
    assert [line for line in done[1].splitlines() if line == "ranks 3"] == ["ranks 3"] * 6


def test_arrays_changed_in_place(undisturbed):
    done = run("in_place", ["0.0@3:updated"], n=3, words=elastic())
    assert result(done) == [*undisturbed("in_place"), "2"]


def test_a_step_that_cannot_be_repeated_is_refused_or_undone(undisturbed):
    """All ranks have changed their parameters when one of them does not come to the metric."""
    code, out, err = run("in_place", ["0.0@3:updated"], False, True, n=3, words=elastic())
    assert code != 0
    assert "result" not in out
    assert "TrainState: step 3 cannot be repeated" in err
    done = run("in_place", ["0.0@3:updated"], True, True, n=3, words=elastic())
    assert result(done) == [*undisturbed("in_place"), "2"]


def test_too_few_ranks_end_the_job():
    code, out, err = run("numpy", ["0.0@3:begin", "1.0@4:begin"], n=3, words=elastic(2))
    assert code != 0
    assert "result" not in out
    assert "1 of 2 ranks are left, fewer than --min-ranks 2" in err


@slow
def test_without_min_ranks_a_loss_ends_the_job():
    code, out, _ = run("numpy", ["0.0@3:begin"], n=3)
    assert result((code, out, "")) == [
        *result(run("numpy", n=1))[:2],
        "3",
    ]  # nobody has a uid, so nobody dies


def test_an_exception_is_no_loss():
    code, _, err = run("raises", n=3, words=elastic())
    assert code == 1
    assert "StepError: together() in group world: rank 2 raised ValueError: on purpose" in err


def test_shrink():
    done = run("shrink", ["1.0@2:begin"], n=3, words=elastic())
    assert result(done) == ["[6.0,", "6.0,", "4.0,", "4.0,", "4.0,", "4.0,", '"closed"]', "2"]


@pytest.mark.slow
def test_stop_together_and_go_on(tmp_path):
    whole = result(run("stops", str(tmp_path / "whole.npz"), n=1))
    path = str(tmp_path / "state.npz")
    for at, n, planned in ((3, 3, []), (7, 2, ["0.0@5:begin"])):
        code, out, err = run("stops", path, at, planned, n=n, words=elastic())
        assert code == 143, err
        assert "result" not in out
        assert os.listdir(tmp_path) == ["state.npz"]
    assert result(run("stops", path, n=4)) == [*whole[:2], "4"]


@pytest.mark.slow
@pytest.mark.parametrize(("leave_at", "code"), [(5, 143), (30, 0)])
def test_a_loop_that_is_left_as_all_are_to_stop(tmp_path, leave_at, code):
    """The program has ended this loop: it goes on behind it, and stops where it asks for another step."""
    path = str(tmp_path / "state.npz")
    file = script("survive/interrupted")

    def stopped(n, path, planned, words=()):
        command = [*RUN_COMMAND, "-n", str(n), "--raw", *words, file]
        values = map(json.dumps, [path, planned, 8, leave_at, 0.0])
        done = subprocess.run(
            [*command, *values], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        return done.returncode, {line.split()[1] for line in done.stdout.splitlines() if line[:6] == "result"}

    whole = stopped(1, "", [])
    found = stopped(3, path, [f"1@{leave_at}:mean:SIGTERM"], elastic())
    assert found == ((0, whole[1]) if code == 0 else (code, set()))
    assert os.listdir(tmp_path) == ([] if code == 0 else ["state.npz"])
    assert stopped(2, path, []) == whole


def test_audits_find_nothing_where_all_is_right(undisturbed):
    done = run("audited", 1.0, n=3)
    assert result(done)[:2] == undisturbed("audited", 0.0)
    n_audits = sum(len(choose(1.0, 1, step, 8, 3).ranks) for step in range(1, int(result(done)[1]) + 1))
    assert f"audits {n_audits}\n" in done[1]


@pytest.mark.parametrize("n", [2, 3])
def test_a_rank_that_computes_wrongly_is_named(n):
    code, out, err = run("audited", 1.0, [f"1@{step}" for step in range(5, 30)], n=n)
    assert code == 1
    assert "result" not in out
    (named,) = set(
        re.findall(r"MismatchError: audit of shard \d of step \d+ in group world: (.*?) ha[sv]e? comp", err)
    )
    assert "rank 1 (" in named
    assert ("rank 0 (" in named) == (n == 2)  # without a third rank nobody can tell which


def test_a_bit_that_flips_once_changes_nothing(undisturbed):
    flips = [f"1@{step}:once" for step in range(1, 40, 3)]
    code, out, err = run("audited", 1.0, flips, n=3)
    hashes = re.findall("^result .*", out, re.M)
    assert code == 0, err
    assert "differed, and are equal now" in err
    assert len(hashes) == 1
