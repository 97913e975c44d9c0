"""`samestep bench`, and the data that the programs in `benchmarks` measure with."""

import importlib
import re
from pathlib import Path

import numpy as np
import pytest
from samestep.bench import allreduce

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch):
    if not BENCHMARKS.is_dir():
        pytest.skip("the benchmarks are not part of this tree")
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.mark.ranks(1, 2)
def test_table_has_a_line_for_each_size(group, monkeypatch):
    monkeypatch.setattr(allreduce, "_SIZES", ((8, "8 B"), (1024, "1 KiB")))
    monkeypatch.setattr(allreduce, "_BURST", 1e-4)
    title, heads, *lines = allreduce.rows(group)
    assert f"{group.size} rank(s), engine {group.engine}" in title
    assert ("mpi4py" in heads) == (group.engine == "mpi")
    assert [re.split(r" {2,}", line.strip())[0] for line in lines] == ["8 B", "1 KiB"]


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
    ranks = [problems.build(verb, nbytes, rank, size, dtype) for rank in range(size)]
    for problem, right in zip(ranks, do(verb, [problem.fresh[0] for problem in ranks]), strict=True):
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
