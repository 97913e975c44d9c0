"""Environment variables that must be the same on all ranks, and the comparison between the ranks.

A difference would make ranks wait for ever for messages that nobody sends, or put bytes where they do not belong.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from samestep._settings import SETTINGS, get, parse
from samestep._util.text import ranks_text
from samestep.errors import InvalidArgumentError, MismatchError


def local_settings(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What this rank was given, for `require_equal`; right or wrong.

    Example:
      >>> local_settings({"SAMESTEP_ALGORITHM": "ring", "HOME": "/root"})
      {'SAMESTEP_ALGORITHM': 'ring'}
    """
    return {
        name: text
        for name, setting in SETTINGS.items()
        if setting.must_agree and (text := get(name, env)) is not None
    }


def require_equal(table: Sequence[Mapping[str, str]], names: Sequence[str]) -> dict[str, str]:
    """The settings that all ranks use. Pure: it raises on all ranks or on none.

    Args:
      table: the `local_settings` of each rank.
      names: of the variables that matter.

    Raises:
      InvalidArgumentError: a rank was given what means nothing.
      MismatchError: ranks were given different things; names them.

    Example:
      >>> require_equal([{"SAMESTEP_ALGORITHM": "two_shot"}] * 2, ["SAMESTEP_ALGORITHM", "SAMESTEP_SEGMENT_BYTES"])
      {'SAMESTEP_ALGORITHM': 'two_shot', 'SAMESTEP_SEGMENT_BYTES': ''}
    """
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
