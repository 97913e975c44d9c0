"""The `samestep` command itself."""

import pytest
from samestep.__main__ import main
from samestep.launch import run


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
