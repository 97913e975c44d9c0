"""Whose fault a failure was, as tables."""

import signal

import pytest
from samestep.launch.ending import Ending, describe, others, ranks_text, root_cause

KILL, TERM = int(signal.SIGKILL), int(signal.SIGTERM)


def ending(rank, status, time, **more):
    return Ending(f"rank {rank}", 40 + rank, status, time, **more)


def uncaught(time, name="builtins.ValueError"):
    return {"time": time, "class": name, "rank": 0, "text": "", "pid": 1}


def ended(rank, time=2.0, status=-TERM, asked=1.5):
    return ending(rank, status, time, signalled_at=asked, signals=(TERM,))


LOST = "samestep.PeerLostError"
LATE = "samestep.TimeoutError"


@pytest.mark.parametrize(
    ("endings", "root", "code"),
    [
        # the first in time, not in rank order
        ([ending(0, 3, 1.2), ending(1, 7, 1.1), ended(2)], 1, 7),
        ([ending(0, 0, 0.5), ending(1, -KILL, 1.0), ended(2)], 1, 137),
        ([ending(0, -11, 1.0), ended(1)], 0, 139),
        # ending later, because the exception was earlier
        ([ending(0, 1, 1.0, error=uncaught(0.9)), ending(1, 1, 1.1, error=uncaught(0.2))], 1, 1),
        # a consequence is no cause while another rank failed otherwise, even later
        ([ending(0, 1, 1.0, error=uncaught(0.9, LOST)), ending(1, -KILL, 1.3)], 1, 137),
        ([ending(0, 1, 1.0, error=uncaught(0.9, LATE)), ending(1, 4, 1.3)], 1, 4),
        # ... even if that one had to be ended by us
        (
            [
                ending(0, 1, 1.0, error=uncaught(0.9, LOST)),
                ending(1, -TERM, 9.0, error=uncaught(0.1), signalled_at=1.1, signals=(TERM,)),
            ],
            1,
            1,
        ),
        # ... or crashed by a signal that nobody sent
        (
            [
                ending(0, 1, 1.0, error=uncaught(0.9, LOST)),
                ending(1, -11, 9.0, signalled_at=1.1, signals=(TERM,)),
            ],
            1,
            139,
        ),
        # only consequences: the first of them
        ([ending(0, 1, 1.0, error=uncaught(0.9, LATE)), ending(1, 1, 1.0, error=uncaught(0.8, LATE))], 1, 1),
        # the builtin TimeoutError is nobody's consequence
        (
            [
                ending(0, 1, 1.0, error=uncaught(0.9, "builtins.TimeoutError")),
                ending(1, 1, 1.1, error=uncaught(0.5, LOST)),
            ],
            0,
            1,
        ),
        # an error that came because we asked it to end
        (
            [ending(0, 7, 1.0), ending(1, 1, 2.0, error=uncaught(1.9), signalled_at=1.5, signals=(TERM,))],
            0,
            7,
        ),
        # lost from sight
        ([ending(0, None, 1.0), ended(1)], 0, 1),
    ],
)
def test_root_cause_and_exit_code(endings, root, code):
    found = root_cause(endings)
    assert found is endings[root]
    assert found.exit_code == code


@pytest.mark.parametrize("endings", [[], [ending(0, 0, 1.0)], [ending(0, 0, 1.0), ended(1)]])
def test_no_failure_no_cause(endings):
    assert root_cause(endings) is None


def test_texts():
    assert str(ending(1, 7, 1.0)) == "rank 1 (pid 41) exit code 7"
    assert str(ending(1, -KILL, 1.0, host="b")) == "rank 1 (pid 41 on b) signal SIGKILL"
    assert str(ending(1, None, 1.0)) == "rank 1 (pid 41) lost: its connection broke"
    assert describe(-200) == "signal 200"


def test_one_line_for_each_that_was_ended_or_failed_later():
    root = ending(1, 7, 1.0)
    rest = [
        ending(0, 1, 1.2, error=uncaught(1.1, LOST)),
        ending(2, 0, 0.5),
        ending(3, 9, 1.3),
        ended(4),
        ending(5, -KILL, 4.0, signalled_at=1.5, signals=(TERM, KILL), ended_by="mpirun"),
    ]
    assert others([root, *rest], root) == [
        "rank 0 (pid 40) exit code 1, in consequence (PeerLostError)",
        "rank 3 (pid 43) exit code 9, later",
        "rank 4 (pid 44) signal SIGTERM, ended by the launcher",
        "rank 5 (pid 45) signal SIGKILL, ended by mpirun",
    ]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], "no rank"), ([2], "rank 2"), ([0, 1], "ranks 0-1"), ([0, 2, 3, 4, 9], "ranks 0, 2-4, 9")],
)
def test_names_of_ranks(numbers, text):
    assert ranks_text(numbers) == text
