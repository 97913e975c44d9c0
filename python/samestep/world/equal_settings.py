"""The version of samestep and the environment variables that must be the same on all ranks, and their comparison.

A difference would make ranks wait for ever for messages that nobody sends, or put bytes where they do not belong.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from samestep import _settings
from samestep._settings import SETTINGS, get, parse
from samestep._util.text import ranks_text
from samestep.errors import InvalidArgumentError, MismatchError

_VERSION = "version"


def local_settings(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What this rank is and was given, for `require_equal`; right or wrong.

    Example:
      >>> sorted(local_settings({"SAMESTEP_ALGORITHM": "ring", "HOME": "/root"}))
      ['SAMESTEP_ALGORITHM', 'version']
    """
    given = {
        name: text
        for name, setting in SETTINGS.items()
        if setting.must_agree and (text := get(name, env)) is not None
    }
    return {_VERSION: _settings.VERSION} | given


def require_equal(table: Sequence[Mapping[str, str]], names: Sequence[str]) -> dict[str, str]:
    """The settings that all ranks use. Pure: it raises on all ranks or on none.

    Args:
      table: the `local_settings` of each rank.
      names: of the variables that matter.

    Raises:
      InvalidArgumentError: a rank was given what means nothing.
      MismatchError: ranks run different versions of samestep, or were given different things; names them.

    Example:
      >>> require_equal([{"SAMESTEP_ALGORITHM": "two_shot"}] * 2, ["SAMESTEP_ALGORITHM", "SAMESTEP_SEGMENT_BYTES"])
      {'SAMESTEP_ALGORITHM': 'two_shot', 'SAMESTEP_SEGMENT_BYTES': ''}
    """
    versions: dict[str, list[int]] = {}
    for rank, given in enumerate(table):
        versions.setdefault(given.get(_VERSION, "unknown"), []).append(rank)
    if len(versions) > 1:
        found = ", ".join(f"{version} on {ranks_text(ranks)}" for version, ranks in versions.items())
        raise MismatchError(f"all ranks need the same version of samestep, but have {found}")
    return {name: _equal(name, [given.get(name) for given in table]) for name in names}


def _equal(name: str, given: Sequence[str | None]) -> str:
    said: dict[str, list[int]] = {}
    for rank, text in enumerate(given):
        try:
            said.setdefault(parse(name, text), []).append(rank)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{error} on rank {rank}") from None
    if len(said) > 1:
        values = ", ".join(f"{text or 'not set'} on {ranks_text(ranks)}" for text, ranks in said.items())
        raise MismatchError(f"{name} has to be the same on all ranks, but is {values}")
    return next(iter(said))
