"""Whose fault a failure was, as tables."""

import signal

import pytest
from samestep._util.text import ranks_text
from samestep.launch.causes import Cause, ProcessExit, describe, others, ranks_named, root_cause

KILL, TERM = int(signal.SIGKILL), int(signal.SIGTERM)


def ending(rank, status, time, **more):
    return ProcessExit(f"rank {rank}", 40 + rank, status, time, rank=rank, **more)


def raised(time, name="builtins.ValueError", text="", **more):
    return {"time": time, "class": name, "rank": 0, "text": text, "pid": 1, **more}


def ended(rank, time=2.0, status=-TERM, asked=1.5):
    return ending(rank, status, time, signalled_at=asked, signals=(TERM,))


LOST = "samestep.PeerLostError"
LATE = "samestep.TimeoutError"


def lost(rank, time, peer, group="world"):
    text = f"barrier (operation 2 of group '{group}'): rank {peer} has left group '{group}': its process has ended"
    return ending(rank, 1, time + 0.1, error=raised(time, LOST, text))


def waited(rank, time, peers):
    text = f"rank {rank}: barrier (operation 2 of group 'world') has waited 2 s for {peers}; arrived: rank {rank}"
    return ending(rank, 1, time + 0.1, error=raised(time, LATE, text))


@pytest.mark.parametrize(
    ("endings", "root", "code"),
    [
        # the first in time, not in rank order
        ([ending(0, 3, 1.2), ending(1, 7, 1.1), ended(2)], 1, 7),
        ([ending(0, 0, 0.5), ending(1, -KILL, 1.0), ended(2)], 1, 137),
        ([ending(0, -11, 1.0), ended(1)], 0, 139),
        # ending later, because the exception was earlier
        ([ending(0, 1, 1.0, error=raised(0.9)), ending(1, 1, 1.1, error=raised(0.2))], 1, 1),
        # a consequence is no cause while another rank failed otherwise, even later
        ([ending(0, 1, 1.0, error=raised(0.9, LOST)), ending(1, -KILL, 1.3)], 1, 137),
        ([ending(0, 1, 1.0, error=raised(0.9, LATE)), ending(1, 4, 1.3)], 1, 4),
        # ... even if that one had to be ended by us
        (
            [
                ending(0, 1, 1.0, error=raised(0.9, LOST)),
                ending(1, -TERM, 9.0, error=raised(0.1), signalled_at=1.1, signals=(TERM,)),
            ],
            1,
            1,
        ),
        # ... or crashed by a signal that nobody sent
        (
            [
                ending(0, 1, 1.0, error=raised(0.9, LOST)),
                ending(1, -11, 9.0, signalled_at=1.1, signals=(TERM,)),
            ],
            1,
            139,
        ),
        # only consequences: the first of them
        ([ending(0, 1, 1.0, error=raised(0.9, LATE)), ending(1, 1, 1.0, error=raised(0.8, LATE))], 1, 1),
        # the builtin TimeoutError is nobody's consequence
        (
            [
                ending(0, 1, 1.0, error=raised(0.9, "builtins.TimeoutError")),
                ending(1, 1, 1.1, error=raised(0.5, LOST)),
            ],
            0,
            1,
        ),
        # an error that came because we asked it to end
        (
            [ending(0, 7, 1.0), ending(1, 1, 2.0, error=raised(1.9), signalled_at=1.5, signals=(TERM,))],
            0,
            7,
        ),
        # lost from sight
        ([ending(0, None, 1.0), ended(1)], 0, 1),
    ],
)
def test_root_cause_and_exit_code(endings, root, code):
    found = root_cause(endings)
    assert found.ending is endings[root]
    assert found.noticed is None
    assert found.exit_code == code


@pytest.mark.parametrize(
    ("endings", "root", "noticed"),
    [
        # it left with code 0, which is no failure of its own, and the others missed it
        ([lost(0, 1.0, 1), ending(1, 0, 0.9), lost(2, 0.95, 1)], 1, 2),
        # it hangs, and those who waited are innocent, also one who only lost the first of them
        ([waited(0, 1.0, "rank 1"), ended(1), lost(2, 1.1, 0)], 1, 0),
        # two of three are named, and one of them waits in vain, too
        ([waited(0, 1.0, "ranks 1, 2"), waited(1, 1.1, "rank 2"), ended(2)], 2, 0),
        # an independent failure after that is not the first, even if it is one of its own
        ([waited(0, 1.0, "rank 1"), ended(1), ending(2, 3, 1.2)], 1, 0),
        # the rank that is named has left with code 0 long after another one failed: the other one
        ([ending(0, 3, 0.5), ending(1, 0, 0.9), lost(2, 1.0, 1)], 0, None),
        # raised as something else, while the error of the peer's loss was handled
        (
            [
                ending(0, 1, 1.1, error=raised(1.0, because=lost(0, 1.0, 1).error)),
                ending(1, 0, 0.9),
            ],
            1,
            0,
        ),
    ],
)
def test_the_cause_is_whom_the_errors_name(endings, root, noticed):
    found = root_cause(endings)
    assert found.ending is endings[root]
    assert found.noticed is (None if noticed is None else endings[noticed])
    assert found.exit_code == (1 if noticed is not None else endings[root].exit_code)


def test_a_death_elsewhere_is_not_put_on_a_rank_of_this_run():
    here = [lost(0, 1.0, 3), lost(1, 1.1, 0)]
    found = root_cause(here)
    assert (found.ending, found.noticed, found.rank) == (None, here[0], 3)
    assert str(found).startswith(
        "rank 3, which another run has started; rank 0 raised PeerLostError: barrier"
    )
    assert [line.partition(",")[2] for line in others(here, found)] == [" in consequence (PeerLostError)"] * 2


def test_ranks_that_only_name_each_other_are_a_circle():
    """A deadlock: the first that noticed it is named, and nobody is followed for ever."""
    endings = [waited(0, 1.0, "rank 1"), waited(1, 0.9, "rank 0")]
    found = root_cause(endings)
    assert (found.ending, found.noticed) == (endings[1], None)


@pytest.mark.parametrize(
    ("failure", "named"),
    [
        (lost(0, 1.0, 7), [7]),
        (lost(0, 1.0, 1, "world/split 0 color 0"), []),  # numbers of another group
        (lost(0, 1.0, "1 (rank 5 of the world, node1)", "pair"), [5]),
        (lost(0, 1.0, 1, "pair' because of rank 3 of the world: 'x"), [3]),
        (waited(0, 1.0, "ranks 1 (rank 4 of the world), 2 (rank 5 of the world, b)"), [4, 5]),
        (waited(0, 1.0, "ranks 1 (node1), 12 (node2)"), [1, 12]),
        (waited(0, 1.0, "data from ranks that have arrived"), []),
        (
            ending(0, 1, 1.0, error=raised(0.5, LATE, "ranks 1-2, 4 of 5 did not join at tcp://a:1")),
            [1, 2, 4],
        ),
        (ending(0, 1, 1.0, error=raised(0.5, LATE)), []),
        (ending(0, 1, 1.0), []),
    ],
)
def test_whom_an_error_names(failure, named):
    assert ranks_named(failure) == named


@pytest.mark.parametrize("endings", [[], [ending(0, 0, 1.0)], [ending(0, 0, 1.0), ended(1)]])
def test_no_failure_no_cause(endings):
    assert root_cause(endings) is None


def test_texts():
    assert str(ending(1, 7, 1.0)) == "rank 1 (pid 41) exit code 7"
    assert str(ending(1, -KILL, 1.0, host="b")) == "rank 1 (pid 41 on b) signal SIGKILL"
    assert str(ending(1, None, 1.0)) == "rank 1 (pid 41) lost: its connection broke"
    assert describe(-200) == "signal 200"
    found = ending(1, 1, 1.0, error=raised(0.9, text="on purpose\nand more"))
    assert str(Cause(found)) == "rank 1 (pid 41) exit code 1: ValueError: on purpose"
    left = str(Cause(ending(1, 0, 0.9), lost(0, 1.0, 1)))
    assert left.startswith(
        "rank 1 (pid 41) exit code 0 while others still waited for it; rank 0 raised PeerL"
    )


def test_the_kernel_had_no_memory_left():
    killed = ending(1, -KILL, 1.0, out_of_memory=True)
    assert str(killed).endswith(
        "signal SIGKILL, perhaps because the host or its control group was out of memory"
    )
    by_us = ending(1, -KILL, 1.0, out_of_memory=True, signalled_at=0.5, signals=(TERM, KILL))
    assert str(by_us).endswith("signal SIGKILL")
    assert str(ending(1, -11, 1.0, out_of_memory=True)).endswith("signal SIGSEGV")


@pytest.mark.parametrize("name", ["builtins.EOFError", "bdb.BdbQuit"])
def test_a_rank_that_wants_input_is_told_that_it_has_none(name):
    hint = "(only the first rank has standard input; debug with -n 1)"
    assert str(root_cause([ending(1, 1, 1.0, error=raised(0.9, name))])).endswith(hint)
    assert hint not in str(root_cause([ending(0, 1, 1.0, error=raised(0.9, name))]))


def test_ranks_that_do_not_agree_are_the_cause_together():
    text = (
        "operation 2 of group 'world': the ranks do not agree. ranks 0, 2: allreduce; rank 1: barrier. All ranks must "
        "call the same operations."
    )
    error = raised(0.9, "samestep.MismatchError", text)
    endings = [
        ending(0, 1, 1.0, error=error),
        ending(1, -TERM, 2.0, error=error, signalled_at=1.5, signals=(TERM,)),
    ]
    root = root_cause(endings)
    agreed = "the ranks do not agree (operation 2 of group 'world'): ranks 0, 2: allreduce; rank 1: barrier"
    assert str(root) == agreed and root.exit_code == 1
    assert others(endings, root) == [
        "rank 0 (pid 40) exit code 1, with the same MismatchError",
        "rank 1 (pid 41) uncaught exception, with the same MismatchError",
    ]
    other = raised(0.9, "samestep.MismatchError", "initialize: SAMESTEP_ALGORITHM differs")
    root = root_cause([ending(0, 1, 1.0, error=other)])
    assert str(root) == "the ranks do not agree: initialize: SAMESTEP_ALGORITHM differs"


def test_one_line_for_each_that_was_ended_or_failed_later():
    root = ending(1, 7, 1.0)
    following = [
        ending(0, 1, 1.2, error=raised(1.1, LOST)),
        ending(2, 0, 0.5),
        ending(3, 9, 1.3),
        ended(4),
        ending(5, -KILL, 4.0, signalled_at=1.5, signals=(TERM, KILL), ended_by="mpirun"),
    ]
    assert others([root, *following], Cause(root)) == [
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
