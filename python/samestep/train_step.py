"""One step of `TrainState.steps`: a block that ranks leave together, or begin anew after a loss."""

from __future__ import annotations

import operator
import pickle
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

import numpy as np

from samestep import _core
from samestep.arrays import is_jax
from samestep.arrays.pickling import dumps
from samestep.data.sampler import Shard
from samestep.errors import MismatchError
from samestep.group import compiled
from samestep.step.audit import Audited, Differs, choose, with_another
from samestep.step.together import Together
from samestep.world.member import is_loss, member

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_FIXED = (type(None), bool, int, float, complex, str, np.generic)
_JOIN, _STOP = 1, 2  # what a rank says at the end of a step; the greatest holds


class Step:
    """One step of `TrainState.steps`: iterate over it for the shards of this rank.

    It is a block of `Backend.together`, so an exception on one rank ends it on all. If a rank is lost, the block is
    left without an exception, and the loop yields the step again.

    Args:
      audited: what is audited in this step.
    """

    def __init__(self, state: Any, shards: list[Shard], audited: Audited | None) -> None:
        self._state, self._shards, self._audited = state, shards, audited
        self._entered = False

    def __iter__(self) -> Iterator[Shard]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    def __enter__(self) -> Step:
        state = self._state
        self._entered = True
        self._before = dict(state._parts)
        self._leaves = _leaves_of_jax(state._parts)
        self._n_calls = _core.n_compiled_calls()
        self._copy = dumps(state._values(), for_others=False) if state._undo else b""
        self._copies = state._copies.held
        self._block = Together(state._backend, None)
        self._block.audited = self._audited
        self._block.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            try:
                compiled.await_programs()
            except BaseException as late:  # of the body, which had not ended
                if not self._exit(late):
                    raise
                return True
        return self._exit(error)

    def _exit(self, error: BaseException | None) -> bool:
        state, here = self._state, member()
        error = self._pass_copies_on() if error is None and here is not None else error
        if here is not None and state._backend.rank == 0 and here.are_called():
            self._block.says = _JOIN
        if state._asked_to_stop:
            self._block.says = _STOP
        if isinstance(error, Differs) and self._audited is not None:
            again, is_whole = with_another(self._audited, error.shards, state._backend.size), self._set_back()
            state._audited_again = again if is_whole else None
            if state._audited_again is not None:
                self._block.drop()  # as all ranks do
                return True
            error = MismatchError(str(error))
        if error is not None and here is not None and is_loss(error):
            state._audited_again = None
            self._block.drop()
            state._regroup(clean=self._set_back())
            return True
        try:
            self._block._exit(error)
        except Exception as raised:
            if error is not None or not state._outlives(raised):
                self._set_back()
                raise
            self._end_without_others()
            return False
        if error is None:
            state._finish_step()
            if self._block.hears == _STOP:
                state._stops = True
            elif self._block.hears == _JOIN:
                state._is_joined = True
        else:
            self._set_back()
        return False

    def _pass_copies_on(self) -> Exception | None:
        """Give the next rank this one's parts of states that ranks divide; what was raised. Collective."""
        try:
            self._state._copies.renew(self._state._parts)
        except Exception as error:  # ranks are lost, or have raised
            return error
        return None

    def _end_without_others(self) -> None:
        """A rank was lost after the body has ended, with the sums of all shards: this rank has finished the step."""
        state = self._state
        if not state._copies:
            state._finish_step()
            state._regroup(clean=True)
            return

        def end(holds: bool) -> None:
            if holds:
                state._finish_step()
            else:
                self._set_back()

        # But the parts that ranks divide may not be left of this step: it holds if one rank has seen all end it.
        state._regroup(clean=state._undo or not _are_gone(self._leaves), reached=end)

    def _set_back(self) -> bool:
        """Set the parts back; whether they are what they were before the step."""
        state = self._state
        changed, state._changed_in_place = state._changed_in_place, False
        state._parts.update(self._before)
        state._copies.held = self._copies
        if state._undo:
            values = pickle.loads(self._copy)
            state._load(state._state(values), lambda name, part, value: value)
            return True
        leaves = _leaves_of_jax(state._parts)
        if _are_gone(leaves):
            return False
        has_reduced = self._block.has_reduced or self._n_calls != _core.n_compiled_calls()
        return not (has_reduced or changed) or self._is_as_before(leaves)

    def _is_as_before(self, leaves: list[Any]) -> bool:
        """Whether these are the leaves that the state had before the step, and none can be changed in place."""
        same = 0 < len(leaves) == len(self._leaves) and all(map(operator.is_, leaves, self._leaves))
        return same and _are_fixed(leaves)


def next_step(state: Any, epochs: int | None, steps: int | None) -> Step | None:
    """The next step of a `TrainState`; None: there is none."""
    sampler = state._sampler
    if sampler is not None and not sampler._has_step_from(state._visited):
        state._epoch, state._visited = state._epoch + 1, 0
    if (steps is not None and state.step >= steps) or (epochs is not None and state._epoch >= epochs):
        return None
    if sampler is None:
        return Step(state, [], None)
    assert sampler.shards is not None
    sampler.set_epoch(state._epoch)
    shards, backend = sampler._step_from(state._visited), state._backend
    audited = state._audited_again
    if audited is None and state._audit:
        audited = choose(state._audit, sampler.seed, state.step + 1, sampler.shards, backend.size)
    for number, ranks in audited.ranks.items() if audited is not None else ():
        if backend.rank in ranks[1:]:
            of_owner = sampler._step_from(state._visited, ranks[0])
            shards.append(next(shard for shard in of_owner if shard.index == number))
    return Step(state, shards, audited)


def listens(state: Any) -> bool:
    """Whether signals ask for an end, which writes a file."""
    return state._path is not None and threading.current_thread() is threading.main_thread()


def hear_signals(state: Any) -> None:
    """Note signals that ask for an end from now on; the others are told at the end of the next step."""
    for signum in SIGNALS if listens(state) else ():
        before = signal.getsignal(signum)
        if not (isinstance(before, Listener) and before.state() is state):
            signal.signal(signum, Listener(state, before))


class Listener:
    """Notes a signal for a state; when that is gone, the signal does what it did before."""

    def __init__(self, state: Any, before: Any) -> None:
        self.state = weakref.ref(state)
        self._before = signal.SIG_DFL if before is None else before  # None: not made by Python

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        state = self.state()
        if state is not None:
            state._asked_to_stop = True
        else:
            signal.signal(signum, self._before)
            signal.raise_signal(signum)


def are_all_of_jax(parts: dict[str, Any]) -> bool:
    """Whether no part can be changed in place."""
    leaves = _leaves_of_jax(parts)
    return bool(leaves) and _are_fixed(leaves)


def _are_fixed(leaves: list[Any]) -> bool:
    return all(is_jax(leaf) or isinstance(leaf, _FIXED) for leaf in leaves)


def _are_gone(leaves: list[Any]) -> bool:
    """Whether a program has taken the memory of some for a result (`donate_argnums` of `jax.jit`)."""
    return any(is_jax(leaf) and leaf.is_deleted() for leaf in leaves)


def _leaves_of_jax(parts: dict[str, Any]) -> list[Any]:
    """What JAX sees as the leaves of the state: fast, and containers that it does not know are leaves themselves."""
    jax = sys.modules.get("jax")
    return [] if jax is None else list(jax.tree_util.tree_leaves(parts))
