"""The programs that tests launch: files in `tests/*/programs`, most of which have a program in each function."""

import json
import sys
from pathlib import Path

TESTS = Path(__file__).parent
RUN_COMMAND = [sys.executable, "-m", "samestep", "run"]


def processes_with(variable):
    """Processes that have `variable`, as in "NAME=value", in their environment; zombies do not count."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environ = (entry / "environ").read_bytes()
            state = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:  # it ended meanwhile
            continue
        if state not in b"ZX" and variable.encode() in environ.split(b"\0"):
            found.append(int(entry.name))
    return found


def script(name):
    """The path of a program that takes its arguments as they are: `script("faults/print_arguments")`."""
    folder, _, file = name.partition("/")
    path = TESTS / folder / "programs" / f"{file}.py"
    assert path.is_file(), f"there is no {path}"
    return str(path)


def program(name, function, *values):
    """What follows `python` on a command line: the file, the function in it, and its arguments as JSON.

    `program("faults/endings", "exit_with", 7)` calls `exit_with(7)` in `tests/faults/programs/endings.py`, whose last
    lines are

        if __name__ == "__main__":
            globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))
    """
    path = script(name)
    assert f"def {function}(" in Path(path).read_text(), f"{path} has no function {function}"
    return [path, function, *map(json.dumps, values)]
