"""Variables of the environment that have to be the same on all ranks: each tells what it was given, and all compare.

A difference would make ranks wait for ever for messages that nobody sends, or put bytes where they do not belong.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from samestep.errors import InvalidArgumentError, MismatchError

__all__ = ["ALGORITHM", "ENGINES", "GPU_AWARE", "OF_DEVICES", "OVER", "agreed", "asked", "meaning"]

ENGINES = {"mpi": "SAMESTEP_MPI_ENGINE", "native": "SAMESTEP_NATIVE_ENGINE"}
ALGORITHM = "SAMESTEP_ALGORITHM"
WINDOW_PIECE, MPI_PIECE = "SAMESTEP_WINDOW_PIECE", "SAMESTEP_MPI_PIECE"
GPU_AWARE = "SAMESTEP_GPU_AWARE_MPI"

_WORDS = {  # what a variable may say, first what it says where it is not set
    ENGINES["mpi"]: ("auto", "node", "hier", "direct"),
    ENGINES["native"]: ("auto", "node", "hier", "tcp"),
    ALGORITHM: ("auto", "direct", "halving", "doubling"),
    GPU_AWARE: ("0", "1", "auto"),
    "SAMESTEP_NCCL_CHECK": ("beside", "before"),
}
_NBYTES = (WINDOW_PIECE, MPI_PIECE, "SAMESTEP_STAGING_PIECE", "SAMESTEP_PACK_BELOW")
_UNSET = ""  # of a number: what the library makes of it is the same on all ranks

OVER = {
    "mpi": (ENGINES["mpi"], ALGORITHM, WINDOW_PIECE, MPI_PIECE, GPU_AWARE),
    "native": (ENGINES["native"], ALGORITHM, WINDOW_PIECE),
}
"""Of each backend, the variables that its groups go by."""

OF_DEVICES = ("SAMESTEP_NCCL_CHECK", "SAMESTEP_STAGING_PIECE", "SAMESTEP_PACK_BELOW")
"""Those that groups with devices go by."""


def asked(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What this rank was given, for `agreed`; right or wrong.

    Example:
      >>> asked({"SAMESTEP_ALGORITHM": "ring", "HOME": "/root"})
      {'SAMESTEP_ALGORITHM': 'ring'}
    """
    return {name: env[name] for name in (*_WORDS, *_NBYTES) if name in env}


def agreed(table: Sequence[Mapping[str, str]], names: Sequence[str]) -> dict[str, str]:
    """What all ranks go by. Pure, so that where it raises it raises on all ranks.

    Args:
      table: what `asked` said, by rank.
      names: of the variables that matter.

    Raises:
      InvalidArgumentError: a rank was given what means nothing.
      MismatchError: ranks were given different things; names them.

    Example:
      >>> agreed([{"SAMESTEP_ALGORITHM": "halving"}] * 2, ["SAMESTEP_ALGORITHM", "SAMESTEP_WINDOW_PIECE"])
      {'SAMESTEP_ALGORITHM': 'halving', 'SAMESTEP_WINDOW_PIECE': ''}
    """
    return {name: _agreed(name, [given.get(name) for given in table]) for name in names}


def meaning(name: str, text: str | None) -> str:
    """What a variable that was given `text` says; None: it is not set.

    Raises:
      InvalidArgumentError: `text` means nothing for it.

    Example:
      >>> meaning("SAMESTEP_MPI_PIECE", "01000"), meaning("SAMESTEP_ALGORITHM", None)
      ('1000', 'auto')
    """
    if name in _WORDS:
        words = _WORDS[name]
        if text is None or text in words:
            return words[0] if text is None else text
        raise InvalidArgumentError(f"{name} must be {', '.join(words[:-1])} or {words[-1]}, got {text!r}")
    if text is None:
        return _UNSET
    if text.isascii() and text.isdigit():
        no_piece = name.endswith("_PIECE") and int(text) == 0  # as if it were not set
        return _UNSET if no_piece else str(int(text))
    raise InvalidArgumentError(f"{name} must be a number of bytes, got {text!r}")


def _agreed(name: str, given: Sequence[str | None]) -> str:
    said: dict[str, list[int]] = {}
    for rank, text in enumerate(given):
        try:
            said.setdefault(meaning(name, text), []).append(rank)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{error} on rank {rank}") from None
    if len(said) > 1:
        from samestep.launch.ending import ranks_text  # not for every import of samestep

        told = ", ".join(f"{text or 'not set'} on {ranks_text(ranks)}" for text, ranks in said.items())
        raise MismatchError(f"{name} has to be the same on all ranks, but is {told}")
    return next(iter(said))
