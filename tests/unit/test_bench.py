"""`samestep bench`, and the data that the programs in `benchmarks` measure with."""

import importlib
import subprocess
from pathlib import Path

import numpy as np
import pytest
from running import RUN_COMMAND, script
from samestep.bench import VERBS, ranks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch):
    if not BENCHMARKS.is_dir():
        pytest.skip("the benchmarks are not part of this tree")
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("nbytes", [8, 1024])
def test_every_call_of_the_table_is_timed(group, monkeypatch, verb, nbytes):
    monkeypatch.setattr(ranks, "_BURST", 1e-4)
    times = ranks.measure(group, ranks.calls(group, verb, nbytes))
    assert list(times) == ["samestep", "shared"] + ["mpi4py"] * ranks.has_mpi4py(group)
    assert all(0 < seconds < 10 for seconds in times.values())
    assert f"{verb} of float32, {group.size} rank(s)" in ranks.title(group, verb)


@pytest.mark.ranks(2)
def test_mpi4py_stands_beside_wherever_there_is_mpi(group):
    assert ranks.has_mpi4py(group) == (group.kind == "mpi")


def test_a_line_has_times_speed_and_ratios():
    times = {"samestep": 2e-6, "shared": 1e-6, "mpi4py": 4e-6}
    assert ranks.row(1024, times).split() == ["1", "KiB", "2.00", "1.00", "4.00", "1.02", "2.00", "4.00"]
    assert ranks.head(times).split() == [
        "size",
        *times,
        "GB/s",
        "mpi4py/samestep",
        "mpi4py/shared",
    ]
    assert ranks.row(8, {"samestep": 1e-6, "shared": 2e-6}).split() == ["8", "B", "1.00", "2.00", "0.01"]


def test_columns_do_not_run_together_and_stand_under_their_names():
    times = {"samestep": 1234.5, "shared": 1e-6, "mpi4py": 12345.6}
    line = ranks.row(64 << 20, times)
    assert line.split() == [
        "64",
        "MiB",
        "1234500000.00",
        "1.00",
        "12345600000.00",
        "67108.86",
        "10.00",
        "12345600000.00",
    ]
    usual = dict.fromkeys(times, 1e-3)
    assert len(ranks.head(usual)) == len(ranks.row(8, usual))


def test_one_rank_has_no_speed():
    times = {"samestep": 1e-6, "shared": 2e-6}
    assert ranks.row(1 << 20, times, speed=False).split() == ["1", "MiB", "1.00", "2.00"]
    assert ranks.head(times, speed=False).split() == ["size", "samestep", "shared"]


@pytest.mark.parametrize("n", [1, 2])
def test_a_run_says_what_its_columns_are_and_where_its_picture_is(n, tmp_path):
    pytest.importorskip("matplotlib")
    program = script("unit/short_bench")
    line = [
        *RUN_COMMAND,
        "--raw",
        "-n",
        str(n),
        program,
    ]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == f"plot: {tmp_path / 'a.svg'}"
    assert ("GB/s: bytes that each rank passes in, per second" in done.stdout) == (n == 2)
    assert ("One rank exchanges nothing" in done.stdout) == (n == 1)
    assert ("faster than" in done.stdout) == (n == 2)


@pytest.mark.parametrize(
    ("faster", "where"),
    [
        ([], "nowhere"),
        ([8, 16, 32, 64], "at every size"),
        ([8], "at 8 B"),
        ([16, 32, 64], "from 16 B to 64 B"),
        ([8, 32, 64], "at 8 B, from 32 B to 64 B"),
    ],
)
def test_crossings_are_the_runs_of_sizes_at_which_one_is_faster(faster, where):
    times = {nbytes: {"a": 1.0 if nbytes in faster else 2.0, "b": 2.0} for nbytes in (8, 16, 32, 64)}
    assert ranks.faster_where(times, "a", "b") == where


def test_times_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from samestep.bench.ranks import draw

    draw(
        {8: {"samestep": 1e-6, "shared": 1e-6}, 64: {"samestep": 2e-6, "shared": 1e-6}},
        "t",
        tmp_path / "a.svg",
    )
    assert "<svg" in (tmp_path / "a.svg").read_text()


def do(verb, sent):
    """What each rank must hold after one call in which rank r passed `sent[r]`."""
    size = len(sent)
    return {
        "allreduce": lambda: [sum(sent)] * size,
        "increment": lambda: [x + x.dtype.type(1) for x in sent],
        "bcast": lambda: [sent[0]] * size,
        "allgather": lambda: [np.stack(sent)] * size,
        "reduce_scatter": lambda: list(sum(sent)),
        "alltoall": lambda: [np.stack([x[rank] for x in sent]) for rank in range(size)],
        "sendrecv": lambda: [sent[rank - 1] for rank in range(size)],
    }[verb]()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("nbytes", [4, 8, 4096])
@pytest.mark.parametrize(
    "verb", ["allreduce", "increment", "bcast", "allgather", "reduce_scatter", "alltoall", "sendrecv"]
)
def test_right_results_pass_and_a_wrong_element_is_found(module, verb, nbytes, size, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    problems = module("problems")
    everyone = [problems.build(verb, nbytes, rank, size, dtype) for rank in range(size)]
    for problem, right in zip(everyone, do(verb, [problem.fresh[0] for problem in everyone]), strict=True):
        buffers = problem.buffers(np.empty)
        problem.rewrite(buffers)
        if size > 1 and not (verb == "bcast" and problem.rank == 0):
            assert problem.check(buffers, 1)  # nothing has been done yet
        buffers.results[0][...] = right
        assert problem.check_all(buffers, 1) == "" == problem.check(buffers, 1)
        buffers.results[0].reshape(-1)[-1] += 1
        assert f"element {right.size - 1} is" in problem.check_all(buffers, 1)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("calls", [2, 60, 1000])
def test_repeated_sums_in_place_are_checked_until_they_overflow(module, size, calls):
    problems = module("problems")
    problem = problems.build("allreduce", 4096, 0, size)
    buffers = problem.buffers(np.empty)
    buffers.x[...] = problem.answers()[0]
    with np.errstate(over="ignore"):
        for _ in range(calls - 1):
            buffers.x[...] *= np.float32(size)
    assert problem.check_all(buffers, calls) == ""
    buffers.x[5] = 0
    assert "element 5 is 0.0" in problem.check_all(buffers, calls)
