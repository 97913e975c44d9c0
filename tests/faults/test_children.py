"""Processes that a rank starts have its variables, and do not take its place."""

import json
import re

import pytest
from launching import Run
from running import program
from samestep.launch import mpirun

LAUNCHERS = ["--native", pytest.param("--mpi", marks=pytest.mark.slow)]


@pytest.fixture(params=LAUNCHERS)
def launcher(request):
    if request.param == "--mpi":
        try:
            mpirun.find()
        except mpirun.LaunchError as error:
            pytest.skip(str(error))
    return request.param


def found_by(folder, launcher, *words, n=2):
    """What each rank has printed, by rank; nothing else is printed, and no process is left."""
    run = Run(folder, launcher, program("faults/children", *words), n=n)
    assert run.wait() == 0, run.out + run.err
    assert run.left() == []
    assert "Traceback" not in run.err
    lines = [re.fullmatch(r"\[(\d+)\] (.*)", line).groups() for line in run.out.splitlines()]
    return {int(rank): json.loads(text) for rank, text in lines}


@pytest.mark.parametrize("n", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["executor", "pool"])
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_pool_works_though_its_processes_import_the_script(tmp_path, launcher, method, kind, n):
    found = found_by(tmp_path, launcher, "pool", method, "square", kind, n=n)
    assert found == {rank: [[9, rank, n]] for rank in range(n)}


@pytest.mark.parametrize("act", ["use", "ask"])
def test_what_such_a_process_does_with_the_world_is_refused(tmp_path, launcher, act):
    for answers in found_by(tmp_path, launcher, "pool", "spawn", act).values():
        assert "multiprocessing has started this process" in answers[0]
        assert "under `if __name__ == '__main__':`" in answers[0]
        assert "\n" not in answers[0]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_function_of_such_a_process_does_not_join_in_place_of_its_parent(tmp_path, launcher, method):
    for rank, answers in found_by(tmp_path, launcher, "pool", method, "begin").items():
        assert re.match(
            rf"initialize: process \d+ is rank {rank} of 2, and this one, which it has", answers[0]
        )


def test_a_process_with_variables_of_its_own_is_a_rank(tmp_path, launcher):
    assert found_by(tmp_path, launcher, "pool", "spawn", "join_alone") == {0: [1], 1: [1]}


def test_another_program_does_not_join_in_place_of_the_rank_that_has_started_it(tmp_path, launcher):
    for rank, (code, text) in found_by(tmp_path, launcher, "start_again").items():
        assert code == 1
        assert f" is rank {rank} of 2, and this one, which it has started, has its variables" in text
