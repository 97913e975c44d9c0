"""The `samestep` command itself."""

import pytest
from samestep.__main__ import main
from samestep.launch import arguments, run


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("samestep ")
    assert main(["--help"]) == 0
    assert "samestep run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"), [([], "samestep run"), (["jump"], "there is no command 'jump'")]
)
def test_what_is_no_command_is_an_error(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_an_interrupt_before_the_start_leaves_no_traceback(monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "main", interrupted)
    assert main(["run", "-n", "2", "x"]) == 130
    assert capsys.readouterr().err == ""


OF_MPIRUN = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}


@pytest.mark.parametrize(
    ("env", "words", "says"),
    [
        (OF_MPIRUN, [], True),
        ({**OF_MPIRUN, "OMPI_COMM_WORLD_RANK": "1"}, [], False),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, [], False),
        (OF_MPIRUN, ["--nnodes", "4", "--node-rank", "0", "--master-addr", "a"], False),
        ({"WORLD_SIZE": "2", "RANK": "0"}, [], True),
        ({}, [], False),
    ],
)
def test_a_launcher_that_another_launcher_has_started_several_times_says_so_once(env, words, says):
    text = run._note_of_outer_launcher(arguments.parse(["-n", "2", *words, "x"]), env)
    assert bool(text) == says
    if says:
        assert "starts 2 ranks of its own" in text
