"""The state of a torch `ShardedOptimizer(copies=2)` in a training state: as `copies` keeps that of other optimizers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from samestep.arrays.pickling import dumps
from samestep.errors import UnavailableError
from samestep.group.group import Group
from samestep.optimizer.torch_sharded_state import joined

_State = dict[int, dict[str, Any]]
"""By index of the parameter, what one rank has of its state."""


class DividedByTorch:
    """The state of one optimizer, which is in the object itself, whatever is passed as `part`.

    `step`: what `torch_sharded` gives the optimizer.
    """

    def __init__(self, backend: Group, step: Any) -> None:
        self._backend, self._step = backend, step
        self.state_dict, self.load_state_dict = step.part_dict, step.load_part  # for a `TrainState`

    def kept(self, part: Any) -> _State:
        """This rank's part, to which later divisions do nothing."""
        found: _State = self._step.part_state()
        return found

    def held(self, division: Any, rank: int, name: str) -> dict[int, _State]:
        """What rank `rank` of a division holds of it, by rank."""
        return {(rank - 1) % len(division.members): division.copies[name], rank: division.parts[name]}

    def passed_on(self, part: Any) -> _State:
        """The part of the rank before this one. Collective."""
        rank, size = self._backend.rank, self._backend.size
        if size == 1:
            return {}
        mine = np.frombuffer(dumps(self._step.part_state()), np.uint8)
        counts = [0] * size
        counts[(rank + 1) % size] = len(mine)
        data, _ = self._backend.alltoallv(mine, counts)
        found: _State = pickle.loads(data.data)
        return found

    def made_for_now(self, part: Any) -> Any:
        """`part`, divided among the ranks that there are before the first step."""
        if not self._step._exchange.is_current():
            if self._step.part_state():
                raise UnavailableError(
                    f"ShardedOptimizer: the state was divided among other ranks than the {self._backend.size} that "
                    "there are before the first step: a rank was lost, and its part with it"
                )
            self._step.divide({})
        return part

    def common(self, part: Any) -> dict[str, Any]:
        """What all ranks have alike."""
        return {**self._step.part_dict(), "state": {}}

    def with_common(self, part: Any, common: dict[str, Any]) -> dict[str, Any]:
        """The reverse of it."""
        return {**common, "state": self._step.part_state()}

    def whole(self, part: Any, root: int | None) -> Any:
        """The whole state, as the optimizer gives it. Collective."""
        return self._step.state_dict(root=root)

    def divide(self, whole: dict[str, Any], part: Any) -> tuple[dict[str, Any], _State]:
        """This rank's part of a whole state, and the copy that it keeps."""
        return self._step.part_of(whole), self._copy_of(whole["state"])

    def divided_anew(
        self, part: Any, held: dict[int, _State], holders: list[int]
    ) -> Callable[[], tuple[Any, _State]]:
        """What gives the optimizer its part among the ranks of now, and the copy that it keeps. Collective.

        See `copies` for the arguments.
        """
        step, whole = self._step, dict(self._step.idle)
        before = step.partition(len(holders))
        for i, parameter in enumerate(step.parameters):
            mine = {r: of[i] for r, of in held.items() if holders[r] == self._backend.rank and i in of}
            found = {r: of for theirs in self._backend.allgather_object(mine) for r, of in theirs.items()}
            if found:
                whole[i] = joined([(len(before.part(i, r)), found[r]) for r in sorted(found)], parameter)

        def end() -> tuple[Any, _State]:
            step.divide(whole)
            return part, self._copy_of(whole)

        return end

    def _copy_of(self, whole: Mapping[int, dict[str, Any]]) -> _State:
        """The part of the rank before this one."""
        size = self._backend.size
        if size == 1:
            return {}
        found: _State = self._step.sliced(whole, (self._backend.rank - 1) % size)
        return found
