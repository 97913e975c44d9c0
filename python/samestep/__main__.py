"""The `samestep` command."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

# Command -> module with `main(arguments) -> exit code`, and what it does.
_COMMANDS = {
    "run": ("samestep.launch.run", "start a program on several ranks and end them together"),
    "doctor": ("samestep.doctor", "show what was found on this machine and which backend is chosen"),
    "bench": ("samestep.bench", "time a collective on this machine, beside mpi4py's"),
}
_HELP_FLAGS = ("-h", "--help", "help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `samestep COMMAND ...`; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = words[0] if words else ""
    if command in _COMMANDS:
        try:
            return int(importlib.import_module(_COMMANDS[command][0]).main(words[1:]))
        except KeyboardInterrupt:
            return 130
    if command == "--version":
        print(f"samestep {package_version()}")
        return 0
    if command in _HELP_FLAGS:
        print(_usage())
        return 0
    print(
        _usage() if not command else f"samestep: there is no command {command!r}\n{_usage()}", file=sys.stderr
    )
    return 2


def package_version() -> str:
    """The installed version, or "not installed" where the package is only in the path."""
    try:
        return version("samestep")
    except PackageNotFoundError:
        return "not installed"


def _usage() -> str:
    rows = "\n".join(f"  samestep {name:<8} {text}" for name, (_, text) in _COMMANDS.items())
    return f"{rows}\n  samestep --version\nEach command explains its flags with --help."


if __name__ == "__main__":
    sys.exit(main())
