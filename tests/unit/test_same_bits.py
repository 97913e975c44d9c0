"""The bits of a program at several numbers of ranks: the first step and leaf that differ."""

import pytest
from running import script
from samestep.testing.compare_bits import Run, compare, main, same_bits

PROGRAM = script("unit/train_by_shard")


def run(n_ranks, *hashes, weight="0x1p+2"):
    return Run(n_ranks, [(f"step {i}", weight, [("['w']", h)]) for i, h in enumerate(hashes)])


def test_the_first_difference_is_named():
    assert compare(run(1, "a", "b"), run(3, "a", "b")) == ""
    assert compare(run(1, "a", "b", "c"), run(3, "a", "x", "y")) == (
        "step 1: leaf ['w'] on 3 ranks differs from that on 1 rank"
    )
    assert compare(run(2, "a", "b"), run(3, "a")) == "1 steps on 3 ranks, 2 on 2 ranks"
    assert (
        compare(run(1, "a"), run(2, "a", weight="0x1p+3"))
        == "step 0: the weight on 2 ranks is 8, on 1 rank 4"
    )

    assert (
        compare(run(1, "f4 " + "0" * 32), run(2, "f8 " + "0" * 32))
        == "step 0: leaf ['w'] is f8 on 2 ranks and f4 on 1 rank"
    )


@pytest.mark.slow
def test_a_program_is_run_at_every_size(capfd):
    assert len(same_bits(PROGRAM, [1, 2, 3])) == 32
    assert main(["-n", "1,2", PROGRAM]) == 0
    assert "the same bits on 1, 2 ranks" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("by rank", r"step 1: leaf ['w'] on 2 ranks differs from that on 1 rank"),
        ("dtype", r"step 0: leaf ['v'] is float32 on 2 ranks and float64 on 1 rank"),
        ("leaf", r"step 0: leaf ['x'] is in the tree on 2 ranks, not on 1 rank"),
        ("weight", "step 0: the weight on 2 ranks is 8, on 1 rank 4"),
        ("fewer steps", "4 steps on 2 ranks, 6 on 1 rank"),
        ("is killed", "on 2 ranks ended with exit code 137"),
    ],
)
def test_what_differs_is_named(mode, why, capfd):
    assert main(["-n", "1,2", PROGRAM, mode]) == 1
    assert why in capfd.readouterr().err


@pytest.mark.slow
def test_a_run_that_takes_too_long_is_named_with_its_output(capfd):
    assert main(["-n", "2", "--timeout", "30", PROGRAM, "hangs"]) == 1
    text = capfd.readouterr().err
    assert "on 2 ranks needed more than 30 s:" in text
    assert "[0] so far" in text


@pytest.mark.slow
def test_a_program_that_fails_or_has_no_means(capfd):
    assert main(["-n", "1", PROGRAM, "exits"]) == 1
    assert "on 1 rank ended with exit code 3" in capfd.readouterr().err
    with pytest.raises(AssertionError, match=r"on 1 rank has called no Accumulator\.mean"):
        same_bits(PROGRAM, [1], args=["has no steps"])
