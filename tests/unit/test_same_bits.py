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


@pytest.mark.slow
def test_a_program_is_run_at_every_size(capfd):
    assert len(same_bits(PROGRAM, [1, 2, 3])) == 32
    with pytest.raises(AssertionError, match=r"step 1: leaf \['w'\] on 2 ranks differs from that on 1 rank"):
        same_bits(PROGRAM, [1, 2], args=["by-rank"])
    assert main(["-n", "1,2", PROGRAM]) == 0
    assert "the same bits on 1, 2 ranks" in capfd.readouterr().out


@pytest.mark.slow
def test_a_program_that_fails_or_has_no_means(tmp_path, capfd):
    program = tmp_path / "train.py"
    program.write_text("raise SystemExit(3)")
    assert main(["-n", "1", str(program)]) == 1
    assert "exit code 3" in capfd.readouterr().err
    program.write_text("pass")
    with pytest.raises(AssertionError, match=r"has called no Accumulator\.mean"):
        same_bits(program, [1])
