"""One rank ends with an exception: the others end soon, with an error that names it."""

import re

import jobs
import pytest
from running import program

SOON = 60.0  # seconds for a whole job, start included, on a very busy machine; half of every deadline inside


def run(n, function, *values, **environ):
    return jobs.run(n, program("faults/uncaught_exception", function, *values), **environ)


def test_peers_in_a_collective():
    ended = run(3, "raise_before_a_collective")
    assert ended.code != 0
    assert ended.seconds < SOON
    assert "KeyError: 'no such batch'" in ended.text
    found = re.findall(r"<(\d) ([^>]*)>", ended.text)
    for rank, text in found:
        assert rank in "02"
        assert "rank 1" in text, text
        assert "KeyError" in text, text
    assert found, ended.text


@pytest.mark.slow
def test_peers_that_communicate_only_later():
    ended = run(2, "raise_while_others_compute")
    assert ended.code != 0
    assert ended.seconds < SOON
    assert "ValueError: bad value" in ended.text


@pytest.mark.slow
def test_in_a_group_that_others_wait_in():
    ended = run(3, "raise_while_others_wait_in_a_group")
    assert ended.code != 0
    assert ended.seconds < SOON


@pytest.mark.parametrize(
    "how", ["sys.exit", "os._exit", pytest.param("KeyboardInterrupt", marks=pytest.mark.slow)]
)
def test_other_ways_to_leave(how):
    ended = run(2, "leave", how)
    assert ended.code != 0
    assert ended.seconds < SOON


@pytest.mark.parametrize(
    ("mpi_by", "finalize"),
    [
        ("us", False),
        ("the application", True),
        pytest.param("us", True, marks=pytest.mark.slow),
        pytest.param("the application", False, marks=pytest.mark.slow),
    ],
)
def test_a_clean_end(mpi_by, finalize):
    ended = run(3, "end_well", mpi_by == "the application", finalize, SAMESTEP_WARN_AFTER="5")
    assert ended.code == 0, ended.text
    assert "".join(ended.text.split()) == "end" * 3  # a launcher may join lines of several ranks
    assert ended.seconds < SOON


def test_one_process_that_fails_says_only_that():
    ended = jobs.run(0, ["-c", "import samestep as ss; ss.initialize(); raise ValueError('bad value')"])
    assert ended.code == 1
    assert ended.text.rstrip().endswith("ValueError: bad value")
    assert "samestep" not in ended.text.replace("import samestep as ss", "")
