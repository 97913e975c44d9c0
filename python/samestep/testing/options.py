"""Settings of the plugin, in pytest.ini or pyproject.toml."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from samestep.testing.world import WorldHolder

HOLDER: pytest.StashKey[WorldHolder] = pytest.StashKey()
EXPECTED_INI = "samestep_ranks_expected"
EXPECTED_NAME: pytest.StashKey[str] = pytest.StashKey()
"""Name of another ini option to read instead, for a suite that can be run at several lengths."""
TIMEOUT_INI = "samestep_ranks_timeout"
BACKENDS_INI = "samestep_backends"


def default_timeout(config: pytest.Config) -> float:
    """Seconds a test may take whose mark says nothing."""
    text = config.getini(TIMEOUT_INI)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise pytest.UsageError(f"{TIMEOUT_INI} must be a positive number of seconds, got {text!r}")
    return seconds


def expected(config: pytest.Config) -> dict[int, int]:
    """Number of tests promised for each number of ranks.

    Raises:
      pytest.UsageError: an entry is not `size:count`.
    """
    promised = {}
    name = config.stash.get(EXPECTED_NAME, EXPECTED_INI)
    for entry in config.getini(name):
        size, _, count = entry.partition(":")
        if not (size.isdigit() and count.isdigit()):
            raise pytest.UsageError(f"{name}: entries are size:count, as in 2:40, got {entry!r}")
        promised[int(size)] = int(count)
    return promised
