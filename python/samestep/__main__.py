"""The `samestep` command."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from samestep import _settings

COMMANDS = {
    "run": ("samestep.launch.run", "start a program on several ranks and end them together"),
    "doctor": ("samestep.doctor", "show what was found on this machine and which backend is chosen"),
    "bench": ("samestep.bench", "time a collective on this machine, beside mpi4py's"),
    "same": ("samestep.testing.compare_bits", "compare the bits of a program on several numbers of ranks"),
}
"""Command -> module with `main(arguments) -> exit code` and `parser`, and what it does."""


_HELP_FLAGS = ("-h", "--help", "help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `samestep COMMAND ...`; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = words[0] if words else ""
    if command in COMMANDS:
        try:
            return int(importlib.import_module(COMMANDS[command][0]).main(words[1:]))
        except KeyboardInterrupt:
            return 130
    if command == "--version":
        print(f"samestep {_settings.VERSION}")
        return 0
    if command in _HELP_FLAGS:
        print(_usage())
        return 0
    print(
        _usage() if not command else f"samestep: there is no command {command!r}\n{_usage()}", file=sys.stderr
    )
    return 2


def _usage() -> str:
    rows = "\n".join(f"  samestep {name:<10} {text}" for name, (_, text) in COMMANDS.items())
    return f"{rows}\n  samestep --version\nEach command explains its flags with --help."


if __name__ == "__main__":
    sys.exit(main())
