"""What the shells offer: run in bash, and in zsh as far as it is there."""

import shutil
import subprocess

import pytest
from samestep.__main__ import main
from samestep.bench import VERBS

MASTER = ["--master-addr", "--master-port"]


@pytest.fixture
def script(capsys):
    """The script for a shell."""

    def made(shell):
        assert main(["completion", shell]) == 0
        return capsys.readouterr().out

    return made


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        (["samestep", "d"], ["doctor"]),
        (["samestep", "completion", ""], ["-h", "--help", "bash", "zsh"]),
        (
            ["samestep", "run", "-n", "2", "--m"],
            ["--module", "--mpi", "--max-restarts", *MASTER],
        ),
        (["samestep", "run", "-n", "2", "--raw", "train.py", "--m"], []),  # flags of the script
        (["samestep", "run", ""], []),  # files
        (["samestep", "run", "--logs", "/us"], ["/usr"]),
        (["samestep", "run", "--restarted"], []),  # hidden
        (["samestep", "bench", "--verb", ""], list(VERBS)),
    ],
)
def test_bash(script, line, offered):
    words = " ".join(f"'{word}'" for word in line)
    ask = f"COMP_WORDS=({words}); COMP_CWORD={len(line) - 1}; _samestep; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", script("bash") + ask], capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == (offered, "")


def test_zsh(script):
    """Each flag has its meaning, and what zsh reads as syntax is escaped."""
    text = script("zsh")
    assert text.startswith("#compdef samestep\n")
    assert "'--logs[also write DIR/rank_<r>.out and .err]:DIR:_files -/'" in text
    assert "'--hosts[hosts and ranks on each, in rank order]:A\\:2,B\\:2: '" in text
    assert f"'--verb[what to time (allreduce)]:verb:({' '.join(VERBS)})'" in text
    assert "restarted" not in text
    if zsh := shutil.which("zsh"):
        subprocess.run([zsh, "-n"], input=text, text=True, check=True)


def test_other_shells_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["completion", "fish"])
    assert "choose from" in capsys.readouterr().err
