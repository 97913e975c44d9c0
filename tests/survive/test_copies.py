"""Ranks divide the state of an optimizer, keep copies of each other's parts, and die."""

import pytest
import samestep as ss
from samestep.optimizer.copies import _newest
from surviving import elastic, result, run


@pytest.fixture(scope="module")
def undisturbed():
    """Hash and steps of a run of one rank, whose optimizer nobody divides."""
    known = {}

    def of(library):
        if library not in known:
            known[library] = result(run_of(library, [], n=1))[:2]
        return known[library]

    return of


def run_of(library, planned, *args, **kwargs):
    if library == "torch":
        pytest.importorskip("torch")
        return run("divided_by_torch", planned, *args, **kwargs)
    if library == "jax":
        pytest.importorskip("optax")
    return run("divided", planned, library, *args, **kwargs)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("library", "planned"),
    [
        ("numpy", []),
        ("numpy", ["0.0@3:updated", "2.0@3:change"]),  # as the others go on
        ("jax", ["1.0@5:updated"]),
        ("torch", []),
        ("torch", ["0.0@3:updated", "2.0@3:change"]),
        ("torch", ["3.0@5:copied", "1.0@5:interrupted"]),
        ("numpy", ["3.0@5:copied", "1.0@5:interrupted"]),  # some have all of the step, and others have not
        *(
            pytest.param(library, planned, marks=slow)
            for library in ["numpy", "torch"]
            for planned in [
                ["1.0@5:mean"],
                ["3.0@18:updated"],
                ["0.0@1:begin"],
                ["0.0@3:updated", "2.0@3:updated"],
                ["0.0@3:begin", "1.0@3:change"],
                ["0.0@3:begin", "1.0@9:begin", "2.0@10:begin"],
                ["2.0@0:made"],  # before anybody has a copy
            ]
        ),
        pytest.param("jax", ["0.0@3:begin", "2.0@3:change"], marks=slow),
    ],
)
def test_ranks_die_and_the_state_is_divided_anew(undisturbed, library, planned):
    done = run_of(library, planned, words=elastic())
    n_dead = sum("interrupted" not in place for place in planned)
    assert result(done) == [*undisturbed(library), str(4 - n_dead)]


@slow
def test_several_states_are_divided_anew_together():
    pytest.importorskip("torch")
    alone = result(run("two_divided", [], n=1))
    done = run("two_divided", ["1.0@5:mean", "3.0@5:between"], words=elastic())
    assert result(done) == [*alone[:2], "2"]


@slow
@pytest.mark.parametrize("planned", [["1.0@6:updated"], ["0.0@7:mean", "2.0@9:mean"]])
def test_a_parameter_is_trained_from_the_interrupted_step_on(planned):
    pytest.importorskip("torch")
    alone = result(run("thaws", [], n=1))
    assert result(run("thaws", planned, words=elastic())) == [*alone[:2], str(4 - len(planned))]


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("n", [pytest.param(2, marks=slow), 3])
def test_a_newcomer_gets_a_part(undisturbed, n, library, tmp_path):
    done = run_of(library, ["1.0@4:mean"], None, None, str(tmp_path), n=n, words=elastic(restarts=1))
    assert result(done) == [*undisturbed(library), str(n)]


@slow
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("words", [(), elastic()])
def test_a_file_holds_the_whole_state(undisturbed, words, library, tmp_path):
    file = str(tmp_path / "state")
    code, out, err = run_of(library, [], file, 5, n=3, words=words)
    assert (code, out) == (143, ""), err
    assert result(run_of(library, [], file, n=2, words=words)) == [*undisturbed(library), "2"]


def test_neighbours_that_are_lost_at_once_end_the_job():
    code, out, err = run("divided", ["1.0@3:updated", "2.0@3:updated"], "numpy", words=elastic())
    assert (code == 0, out) == (False, "")
    assert "neither the owner nor the copy is left of the parts of rank 1 of 4" in err


@pytest.mark.parametrize("gone", [["2.0"], pytest.param(["1.0", "2.0"], marks=slow)])
def test_a_group_that_has_shrunk_does_not_take_the_state_of_before(gone):
    pytest.importorskip("torch")
    code, out, err = run("shrunk", *gone, n=3, words=elastic())
    assert code == 0, err
    left = 3 - len(gone)
    assert (
        out.count(f"refused: ShardedOptimizer.update: the group has {left} ranks now, and the state") == left
    )
    assert out.count(f"refused: ShardedOptimizer: the group has {left} ranks now, and the state") == left
    assert out.count("updates [-0.025 -0.025 -0.025]") == left


def test_the_newest_division_that_is_whole_holds():
    """Ranks a to d; one may have got beyond a change of the ranks before the next was lost."""
    first, then = [1, ["a", "b", "c", "d"]], [2, ["a", "c", "d"]]
    assert _newest([[first], [then, first], [first]], ["a", "c", "d"]) == (1, first[1], [0, 1, 1, 2])
    assert _newest([[then, first], [then, first]], ["a", "d"]) == (2, then[1], [0, 1, 1])
    with pytest.raises(ss.UnavailableError, match="parts of rank 1 of 4"):
        _newest([[first], [first]], ["a", "d"])
    with pytest.raises(ss.UnavailableError, match="no rank has a part"):
        _newest([[], []], ["e", "f"])


def test_what_cannot_be_kept_is_refused():
    code, out, err = run("refused", n=2)
    assert code == 0, err
    assert out.count("copies must be 1 or 2, got 3") == 2
    assert out.count("ShardedOptimizer(copies=2) needs undo=True") == 2
    assert out.count("state has a part of the state of a ShardedOptimizer") == 2
    assert out.count("this is not a state of Momentum for these parameters") == 2
    assert out.count("kept after an update") == 2
