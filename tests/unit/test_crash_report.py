"""What an uncaught exception leaves for the launcher."""

import json
import os
import subprocess
import sys
import time

import pytest
import samestep as ss
from samestep.world import crash_report


def run(script, folder, **env):
    path = folder / "record.json"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from samestep.world import crash_report; crash_report.install(); crash_report.install()\n"
            + script,
        ],
        env={**os.environ, "SAMESTEP_ERROR_FILE": str(path), **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done, json.loads(path.read_text()) if path.exists() else None


def test_time_class_rank_text_pid(tmp_path):
    before = time.time()
    done, record = run("import os; print(os.getpid()); raise KeyError('k')", tmp_path, RANK="3")
    assert before < record.pop("time") < time.time()
    assert record == {"class": "builtins.KeyError", "rank": 3, "text": "'k'", "pid": int(done.stdout)}
    assert (tmp_path / "record.json").stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]


def test_the_traceback_is_shown_as_ever_and_once(tmp_path):
    done, _ = run("raise KeyError('k')", tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1 and done.stderr.endswith("KeyError: 'k'\n")


def test_a_hook_that_was_there_before_is_called(tmp_path):
    script = "import sys; sys.excepthook = lambda *_: print('mine')\n"
    done, record = run(
        "import importlib; importlib.reload(crash_report)\n" + script + "crash_report.install(); 1 / 0",
        tmp_path,
    )
    assert done.stdout == "mine\n" and record["class"] == "builtins.ZeroDivisionError"


def test_it_is_remembered_for_the_farewell(tmp_path):
    script = "import atexit; atexit.register(lambda: print(repr(crash_report.last_uncaught())))\n"
    assert run(script + "1 / 0", tmp_path)[0].stdout == "ZeroDivisionError('division by zero')\n"
    assert run(script, tmp_path)[0].stdout == "None\n"


@pytest.mark.parametrize(
    "script",
    [
        "raise SystemExit(7)",
        "pass",
        "import threading; t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()",
    ],
)
def test_what_does_not_end_the_process_with_an_exception_writes_nothing(script, tmp_path):
    assert run(script, tmp_path)[1] is None


def test_an_error_that_cannot_be_told_and_a_file_that_cannot_be_written(tmp_path):
    done, record = run("class E(Exception):\n  def __str__(self): raise OSError\nraise E", tmp_path)
    assert record["text"] == "(its text cannot be made: OSError)" and record["class"] == "__main__.E"
    done, _ = run("1 / 0", tmp_path, SAMESTEP_ERROR_FILE="/no/such/folder/file")
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1


class _NoText(Exception):
    def __str__(self):
        raise SystemExit(7)


class _NoChain(Exception):
    @property
    def __cause__(self):
        raise RuntimeError

    def __eq__(self, other):
        raise RuntimeError

    __hash__ = Exception.__hash__


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad \ud800 name\0"), "bad \\ud800 name\\x00"),
        (ValueError("é" * 5000), "é" * 2000),
        (_NoText(), "(its text cannot be made: SystemExit)"),
        (_NoChain("x"), "x"),
    ],
)
def test_whatever_an_exception_is_its_record_can_be_sent(error, text):
    record = crash_report.record_of(error)
    assert record["text"] == text
    json.dumps(record, ensure_ascii=False).encode()
    assert not crash_report.is_of_lost_peer(error)


def test_an_exception_that_another_hook_has_taken_is_remembered_too(tmp_path):
    script = "import atexit; atexit.register(lambda: print(repr(crash_report.last_uncaught())))\n"
    script += "import sys; sys.excepthook = lambda *_: None\n"
    assert run(script + "1 / 0", tmp_path)[0].stdout == "ZeroDivisionError('division by zero')\n"


def test_its_own_errors_by_their_public_names(tmp_path):
    _, record = run("from samestep.errors import PeerLostError; raise PeerLostError('rank 1')", tmp_path)
    assert record["class"] == "samestep.PeerLostError"


def test_the_error_beneath_another_one_is_told_too():
    """A library that wraps the loss of a peer in an exception of its own is not its cause."""

    def raised(suppress, below):
        try:
            try:
                raise below
            except Exception as error:
                if suppress:
                    raise ValueError("wrapped") from None
                raise KeyError("wrapped") from error
        except Exception as error:
            return crash_report.record_of(error)

    lost = ss.PeerLostError("rank 1 has left")
    assert raised(False, lost)["because"] == {"class": "samestep.PeerLostError", "text": "rank 1 has left"}
    assert raised(False, lost)["class"] == "builtins.KeyError"
    assert "because" not in raised(True, lost)
    assert "because" not in raised(False, OSError())
