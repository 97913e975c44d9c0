"""`samestep run` on a terminal: progress bars, questions and Ctrl-C."""

import contextlib
import os

import pytest
from launching import PATIENCE_S, on_terminal, until
from running import RUN_COMMAND, program


def on_pseudo_terminal(folder, waits, **env):
    """What `samestep run` writes to its terminal; where it `waits`, each state of the bar stays until it is shown."""
    for i in [] if waits else [1, 2, 3]:
        (folder / f"seen{i}").touch()
    line = [
        *RUN_COMMAND,
        "-n",
        "2",
        *program("faults/launch_run", "draw_a_progress_bar"),
    ]
    process, ours = on_terminal(line, env=env, cwd=folder)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while data := os.read(ours, 4096):
            shown += data
            for i in [i for i in (1, 2, 3) if b"%d/3" % i in shown]:
                (folder / f"seen{i}").touch()
    os.close(ours)
    assert process.wait(PATIENCE_S) == 0
    return shown


def test_a_progress_bar_stays_in_its_line_of_a_terminal(tmp_path):
    clear = b"\r\x1b[K"
    shown = [b"[0] 1/3", b"[0] 2/3", b"[0] 3/3", b"[0] 3/3\r\n[0] rank 0 has ended\r\n"]
    assert on_pseudo_terminal(tmp_path, waits=True) == clear.join(shown)


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"CI": "true"}, {"JPY_PARENT_PID": "7"}])
def test_a_terminal_that_nobody_looks_at_gets_whole_lines(tmp_path, env):
    """As of a notebook or a CI service: what is written over an unfinished line would be shown behind it."""
    shown = b"[0] 3/3\r\n[0] rank 0 has ended\r\n"
    assert on_pseudo_terminal(tmp_path, waits=False, **env) == shown


def test_on_a_terminal(launcher):
    """A question without a newline is shown, what is typed reaches rank 0, and Ctrl-C ends the run."""
    process, terminal = on_terminal(
        [*RUN_COMMAND, launcher, "-n", "2", *program("faults/launch_run", "greet")]
    )
    os.set_blocking(terminal, False)
    shown = bytearray()

    def shows(text):
        with contextlib.suppress(BlockingIOError):
            shown.extend(os.read(terminal, 4096))
        return text in shown

    try:
        until(lambda: shows(b"[0] name? "), PATIENCE_S, "no question")
        os.write(terminal, b"you\n")
        until(lambda: shows(b"[0] name? hello you\r\n"), PATIENCE_S, "no answer")
        os.write(terminal, b"\x03")
        until(lambda: shows(b"SIGINT: ranks 0-1 still running, ended"), PATIENCE_S, "no end")
        assert process.wait() == 130
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
