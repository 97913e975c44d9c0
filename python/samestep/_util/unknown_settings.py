"""Warnings about `SAMESTEP_*` variables that do not exist: misspelt names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from samestep import _settings

_warned: set[str] = set()


def unknown(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the `SAMESTEP_*` variables of `env` that do not exist, each with the closest existing name or ""."""
    known = {*_settings.SETTINGS, *_settings.OF_TESTS}
    names = sorted(name for name in env if name.startswith(_settings.PREFIX) and name not in known)
    return {name: _closest(name, known) for name in names}


def _closest(name: str, known: set[str]) -> str:
    import difflib  # needed only if there is such a variable

    ends = {existing.removeprefix(_settings.PREFIX): existing for existing in known}
    nearest = difflib.get_close_matches(name.removeprefix(_settings.PREFIX), list(ends), n=1)
    return ends[nearest[0]] if nearest else ""


def warning(name: str, meant: str) -> str:
    """Return the text of the warning about the variable `name`; `meant` is the closest name, or ""."""
    advice = f"did you mean {meant}?" if meant else "docs/launching.md lists all"
    return f"{name} is set, but there is no such variable; {advice}"


def warn_unknown(warn: Callable[[str], object], env: Mapping[str, str] = os.environ) -> list[str]:
    """Calls `warn` once per process for each unknown variable, unless the launcher has already warned about it.

    Returns:
      The names of all unknown variables.
    """
    found = unknown(env)
    for name, meant in found.items():
        if name not in _warned and name not in (_settings.get(_settings.REPORTED, env) or "").split(","):
            _warned.add(name)
            warn(warning(name, meant))
    return list(found)
