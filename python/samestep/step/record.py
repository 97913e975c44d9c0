"""Hashes of the means of a run, by step and leaf, for `samestep same`."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from typing import IO, Any

from samestep import _settings, arrays
from samestep.group.group import Group
from samestep.step.state_hash import leaf_hash

NAME = "means"
"""The file in the folder that the environment names."""

_numbers = itertools.count()
_lock = threading.Lock()  # of the numbers, held for moments only


class Recorder:
    """Writes a line for each mean of one accumulator: its number, the step, the weight, and the hash of each leaf."""

    def __init__(self, folder: str) -> None:
        with _lock:
            self._number = next(_numbers)
        self._step = 0
        self._file: IO[str] = open(  # noqa: SIM115 - closed with the recorder
            os.path.join(folder, NAME), "a", encoding="utf-8", buffering=1
        )

    @classmethod
    def wanted(cls, group: Group) -> Recorder | None:
        """A recorder on rank 0 of the group, if that is rank 0 of all, and if the environment names a folder."""
        folder = _settings.get(_settings.RECORD)
        if not folder or group.rank > 0:
            return None
        whole = group
        while whole._parent is not None and (parent := whole._parent()) is not None:
            whole = parent
        return cls(folder) if whole.rank == 0 else None

    def add(self, weight: float, names: Sequence[str], leaves: Sequence[Any]) -> None:
        """Write the line of one mean."""
        import json  # not needed by `import samestep`

        hashes = [[name, _hash_of(leaf)] for name, leaf in zip(names, leaves, strict=True)]
        self._file.write(json.dumps([self._number, self._step, weight.hex(), hashes]) + "\n")
        self._step += 1


def _hash_of(leaf: Any) -> str:
    if not arrays.is_array(leaf):
        return repr(leaf)
    info = arrays.info(leaf)
    return f"{info.dtype} {leaf_hash(leaf, info).hex()}"
