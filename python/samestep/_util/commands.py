"""The commands of `samestep`."""

from __future__ import annotations

COMMANDS = {
    "run": ("samestep.launch.run", "start a program on several ranks and end them together"),
    "doctor": ("samestep.doctor", "show what was found on this machine and which backend is chosen"),
    "bench": ("samestep.bench", "time a collective on this machine, beside mpi4py's"),
    "same": ("samestep.testing.compare_bits", "compare the bits of a program on several numbers of ranks"),
}
"""Command -> module with `main(arguments) -> exit code` and `parser`, and what it does."""
