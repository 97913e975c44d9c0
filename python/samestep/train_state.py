"""A training state that outlives the loss of ranks: the survivors repeat the step, and the result keeps its bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from samestep import state_file
from samestep._util.text import error_line, warn
from samestep.backend import Backend
from samestep.data.sampler import DistributedSampler
from samestep.errors import InvalidArgumentError, MismatchError, UnavailableError
from samestep.group.backend_argument import require_backend
from samestep.internal import facts
from samestep.optimizer import sharded
from samestep.optimizer.copies import Copies
from samestep.rendezvous.membership import Record
from samestep.step.audit import Audited
from samestep.step.together import Together
from samestep.train_step import SIGNALS, Step, are_all_of_jax, hear_signals, listens, next_step
from samestep.trees.divided import refusals
from samestep.trees.fill import fill
from samestep.world.member import is_loss, member

__all__ = ["Step", "TrainState"]

_STOPPED = 128 + signal.SIGTERM  # exit code: launchers and clusters start what ends so again
_CALL = 1 << 40  # calls between steps count more than steps, of which `restore` may go back some
_MOST_IN_VAIN = 5  # times that the same ranks meet again without having finished a step


class TrainState:
    """What training changes, kept by all ranks, and the loop over its steps.

    A step is divided into shards, and its result does not depend on who computes them (see `Accumulator`). So if ranks
    die, the others divide the same step anew, and the parameters at the end have the bits of a run without a loss. It
    needs `samestep run --min-ranks K`; started otherwise, the loop is the same, and a loss ends the job as always.

    A rank that was started again runs the script from its top, as a group of one, until it comes here; it is taken in
    between two steps, and gets the state of a member. All ranks begin with the state of rank 0.

    Args:
      backend: of `initialize`; to go on after a loss, the native one.
      parts: what to keep: trees of arrays and numbers (NumPy, torch, JAX), or objects with `state_dict` and
        `load_state_dict`, as torch modules and optimizers have them. They become attributes, which may be set.
      sampler: gives each step its shards; made with `batch_size` and `shards`.
      audit: what part of all shards a second rank computes again, 0 to 1; 0.01 costs one hundredth of the time. In some
        steps each rank gets a shard of another one as one more of the step, and `Accumulator.add` compares a hash
        of the gradients instead of adding them. If they differ, the step is repeated with a third rank, and all ranks
        raise a StepError of a MismatchError that names the rank and host that computed something else. Bits of a shard
        are equal everywhere, so there is no false alarm, if the program's are: all ranks need equal processors and
        libraries.
      undo: keep a copy of what is changed in place, so that any step can be repeated. Takes memory and time for one
        copy of the state in each step. Needed where a collective follows the update within the step, and for
        `ShardedOptimizer(copies=2)` unless all parts are arrays of JAX.
      save: a file. If it exists, training goes on from it. Rank 0 writes it if the job is asked to stop, by SIGTERM or
        SIGUSR1 to any rank: then all ranks end after the same step, with exit code 143. A signal between steps or loops
        is heard at the end of the next step, as long as the state exists. None: signals do what they did.

    Raises:
      InvalidArgumentError: the sampler has no `batch_size`, a part cannot be kept (`ShardedOptimizer` without copies=2:
        what a dead rank held of its state is gone), or a part is called like an attribute of this class.

    Example:
      >>> import numpy as np, samestep as ss
      >>> backend = ss.initialize()
      >>> x = np.arange(6.0)
      >>> sampler = ss.DistributedSampler(backend, x, batch_size=2, shards=2)
      >>> total = ss.Accumulator(backend, shards=2)
      >>> state = ss.TrainState(backend, mean=np.zeros(()), sampler=sampler)
      >>> for step in state.steps(epochs=2):
      ...     with step:
      ...         for shard in step:
      ...             total.add(x[shard.items].mean() - state.mean, shard=shard.index, weight=len(shard))
      ...         state.mean = state.mean + 0.5 * total.mean()
      >>> state.step
      6
    """

    def __init__(
        self,
        backend: Backend,
        *,
        sampler: DistributedSampler | None = None,
        audit: float = 0.0,
        undo: bool = False,
        save: str | os.PathLike[str] | None = None,
        **parts: Any,
    ) -> None:
        require_backend(TrainState, backend)
        if sampler is not None and sampler.batch_size is None:
            raise InvalidArgumentError(
                "TrainState: give the sampler batch_size and shards, which make its steps"
            )
        self._copies = Copies(backend, parts)
        for name, part in parts.items():
            if hasattr(TrainState, name) or name.startswith("_"):
                raise InvalidArgumentError(
                    f"TrainState: no part can be called {name!r}, which is a name of the class"
                )
            self._require_whole(name, part)
        if self._copies and not undo and not are_all_of_jax(parts):
            raise InvalidArgumentError("TrainState: ShardedOptimizer(copies=2) needs undo=True")
        here = member()
        if here is not None and backend._regroup is None:
            raise InvalidArgumentError(
                f"TrainState: group {backend.name} cannot go on after a loss; give it what initialize() returns, "
                "without init_method and not over MPI"
            )
        if here is not None and here.has_state:
            raise InvalidArgumentError(
                "TrainState: a job that goes on after a loss has one, where lost ranks come in again; give it all parts"
            )
        self._backend, self._sampler, self._parts, self._undo = backend, sampler, parts, undo
        if not 0 <= audit <= 1 or (audit and sampler is None):
            raise InvalidArgumentError(f"TrainState: audit must be 0 to 1, and needs a sampler; got {audit}")
        self._audit = audit
        self._audited_again: Audited | None = None  # with a third rank, because two have differed
        self._on_change: list[Callable[[Backend], object]] = []
        self._path = None if save is None else os.fspath(save)
        self._finished = 0
        self._epoch = 0 if sampler is None else sampler.epoch
        self._visited = 0 if sampler is None else sampler.state_dict()["visited"]
        """Items of the epoch that finished steps have seen."""
        self._in_vain = 0
        self._has_begun = False
        """Whether the ranks have one state, rather than each its own."""
        self._n_made = self._n_passed = 0
        """Calls of `save` and `restore` that this rank has come to, and those that one rank at least has finished."""
        self._has_stepped = self._is_behind = False
        """Whether this rank has come to a step; and whether the others had when it was taken in, and it has not."""
        self._is_joined = False
        """Newcomers are to be taken in before the next step, where all have the same calls before them."""
        self._asked_to_stop = self._stops = self._changed_in_place = False
        self._begin()
        hear_signals(self)
        if here is not None:
            here.has_state = True

    # ---- the parts

    def __getattr__(self, name: str) -> Any:
        parts = self.__dict__.get("_parts", {})
        if name in parts:
            return parts[name]
        raise AttributeError(
            f"TrainState has no part {name!r}; it has {', '.join(map(repr, parts)) or 'none'}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        elif name in self._parts:
            # `state.w += 1` has changed the array; what cannot be written is another object then.
            self._changed_in_place |= value is self._parts[name]
            self._require_whole(name, value)
            self._parts[name] = value
        else:
            raise AttributeError(f"TrainState has no part {name!r}: name it when the state is made")

    def _require_whole(self, name: str, part: Any) -> None:
        if name in self._copies:
            return
        if why := next(iter(refusals(part).values()), ""):
            raise InvalidArgumentError(f"TrainState: {name} has {why}")
        if sharded.is_sharded(part):
            raise InvalidArgumentError(
                f"TrainState: {name} is a ShardedOptimizer: the part of its state that a dead rank held is gone; use "
                "DistributedOptimizer, or keep the state of one with copies=2"
            )

    @property
    def step(self) -> int:
        """How many steps have been finished."""
        return self._finished

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        return self._epoch

    def on_change(self, function: Callable[[Backend], object]) -> None:
        """Call `function` with the backend now, and whenever its ranks have changed: to make groups or buffers, say.

        Call it on all ranks right after the state is made, as a rank that comes later does.
        """
        function(self._backend)
        self._on_change.append(function)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, for any number of ranks. To be called between steps.

        Collective with a `ShardedOptimizer`, whose whole state is in it.
        """
        return self._state(self._copies.whole(self._values(), None))

    def _state(self, parts: dict[str, Any]) -> dict[str, Any]:
        state = {"step": self.step, "sampler": None, "parts": parts}
        if self._sampler is not None:
            at = {"epoch": self._epoch, "visited": self._visited}
            state["sampler"] = {**self._sampler.state_dict(consumed=0), **at}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, on all ranks alike.

        Raises:
          MismatchError: it has other parts, or one of them has a sampler.
          InvalidArgumentError: the sampler is of other data, or divides them into other steps.
        """
        self._load(state, self._copies.divide)

    def _load(self, state: dict[str, Any], divided: Callable[[str, Any, Any], Any]) -> None:
        """`divided`: of the name, the part and the value of a state that ranks divide, this rank's part."""
        if state["parts"].keys() != self._parts.keys():
            raise MismatchError(
                f"TrainState: the state has the parts {list(state['parts'])}, not {list(self._parts)}"
            )
        at = state["sampler"]
        if (at is None) != (self._sampler is None):
            raise MismatchError("TrainState: the state has no sampler, or this program has none")
        if self._sampler is not None:
            self._sampler.load_state_dict(at)
            self._epoch, self._visited = at["epoch"], at["visited"]
        self._finished = state["step"]
        values = {
            name: divided(name, self._parts[name], value) if name in self._copies else value
            for name, value in state["parts"].items()
        }
        kept = {name: part for name, part in self._parts.items() if not _has_state_dict(part)}
        for name, part in self._parts.items():
            if name not in kept:
                self._copies.seen(name, part).load_state_dict(values[name])
        self._parts.update(fill(kept, {name: values[name] for name in kept}))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a file, on rank 0: another state or the old one is there, whatever happens. Collective.

        Arrays and numbers are written as NumPy does (`numpy.savez`), parts of torch as `torch.save` does.

        Raises:
          UnavailableError: on all ranks, if the file cannot be written.
        """
        self._between(lambda: self._save(path))

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Go on from a file that `save` has written, on any number of ranks; rank 0 reads it. Collective.

        Raises:
          UnavailableError: on all ranks, if the file cannot be read, or is of another program.
        """
        self._between(lambda: self._restore(path))

    def _restore(self, path: str | os.PathLike[str]) -> None:
        like, state, problem = self._copies.whole(self._values(), 0), None, ""
        if self._backend.rank == 0:
            try:
                state = state_file.read(os.fspath(path), like)
                self.load_state_dict(state)
            except Exception as error:  # half a file has many
                problem = f"{os.fspath(path)}: {error_line(error)}"
        self._tell("restore", problem)
        self._take(0, state)

    def _tell(self, verb: str, problem: str) -> None:
        """Raise on all ranks what went wrong on rank 0, if anything did. Collective."""
        if problem := self._backend._bcast_facts(problem, str, 0):
            raise UnavailableError(f"TrainState.{verb}: {problem}")

    def _between(self, call: Callable[[], None]) -> None:
        """Make a collective call between steps; if a rank is lost in it, again with those that are left.

        Those may have finished it already, and be in a step. Then this rank has got their state, and is done. So is
        one that was taken in later and makes the calls that they have made before their steps.
        """
        if self._is_behind:
            return
        self._n_made += 1
        while self._n_made > self._n_passed:
            if self._or_regroup(call):
                self._n_passed = self._n_made

    def _or_regroup(self, call: Callable[[], None], *, admits: bool = False) -> bool:
        """Make a collective call; False if a rank was lost in it, after which those that are left have met again."""
        try:
            call()
        except Exception as error:
            if not self._outlives(error):
                raise
            self._regroup(clean=True, admits=admits)
            return False
        return True

    def _save(self, path: str | os.PathLike[str]) -> None:
        values, problem = self._copies.whole(self._values(), 0), ""
        if self._backend.rank == 0:
            try:
                state_file.write(os.fspath(path), self._state(values))
            except Exception as error:  # of whatever the parts are made of
                problem = error_line(error)
        self._tell("save", problem)

    def _save_and_stop(self, path: str) -> None:
        """All ranks stop here, and end only when all know it."""

        def call() -> None:
            self._save(path)
            self._backend.barrier()

        while not self._or_regroup(call, admits=True):
            pass

    def _values(self) -> dict[str, Any]:
        """What each part holds; of states that ranks divide this rank's part."""
        seen = {name: self._copies.seen(name, part) for name, part in self._parts.items()}
        return {name: part.state_dict() if _has_state_dict(part) else part for name, part in seen.items()}

    # ---- steps

    def steps(self, epochs: int | None = None, *, steps: int | None = None) -> Iterator[Step]:
        """The steps that are left, each to be entered: `with step:`.

        Args:
          epochs: until so many epochs of the sampler are finished, counted from the beginning of training.
          steps: until so many steps are finished, likewise.

        Raises:
          InvalidArgumentError: neither is given, or `epochs` without a sampler; the sampler has no step; or a step was
            not entered.
        """
        if epochs is None and steps is None:
            raise InvalidArgumentError("TrainState.steps: give epochs= or steps=")
        if epochs is not None and self._sampler is None:
            raise InvalidArgumentError("TrainState.steps: epochs are those of a sampler, and there is none")
        if self._sampler is not None and not self._sampler._has_step_from(0):
            raise InvalidArgumentError(
                f"TrainState.steps: {self._sampler.n_items} items make no step of batch_size="
                f"{self._sampler.batch_size} in mode {self._sampler.mode!r}"
            )
        return self._steps(epochs, steps)

    def _steps(self, epochs: int | None, steps: int | None) -> Iterator[Step]:
        hear_signals(self)  # other code may have taken them since
        while not self._stops:
            step = next_step(self, epochs, steps)
            if step is None:
                return
            if self._is_joined:
                self._regroup(clean=True, admits=True)
                continue
            self._has_stepped, self._is_behind = True, False
            yield step
            if not step._entered:
                raise InvalidArgumentError("TrainState.steps: enter each step: `with step:`")
        assert self._path is not None
        self._save_and_stop(self._path)
        if listens(self):
            for signum in SIGNALS:  # another one would end the process with another code
                signal.signal(signum, signal.SIG_IGN)
        raise SystemExit(_STOPPED)

    def _finish_step(self) -> None:
        self._copies.settle()
        self._finished, self._in_vain, self._changed_in_place = self._finished + 1, 0, False
        if self._audited_again is not None:
            for shard, ranks in self._audited_again.ranks.items():
                warn(
                    f"audit of shard {shard} of step {self.step}: the gradients of ranks {list(ranks[:2])} differed, "
                    "and are equal now: one of them has computed wrongly"
                )
            self._audited_again = None
        if self._sampler is not None:
            self._visited = self._sampler._after_step(self._visited)

    # ---- losses and newcomers

    def _begin(self) -> None:
        """Begin with the state of rank 0, or of the ranks that have begun before."""
        here = member()
        if here is not None:
            here.let_others_in()
            if here.is_newcomer:
                self._regroup(clean=True, admits=True)
                return

        def call() -> None:
            self._begin_from_rank_0()
            Together(self._backend, None).prepare()

        self._or_regroup(call, admits=True)
        self._has_begun = True

    def _begin_from_rank_0(self) -> None:
        """Take the state of the file, or else that which rank 0 was made with. Collective."""
        path, here = self._path, member()
        self._parts.update(self._copies.prepare(self._parts))
        if path is not None and self._backend.any(self._backend.rank == 0 and os.path.exists(path)):
            self._restore(path)
        else:
            self._take(0)
        if here is not None:
            self._copies.begin(self._parts, here.record.epoch, here.record.members)

    def _regroup(
        self, *, clean: bool, admits: bool = False, reached: Callable[[bool], None] | None = None
    ) -> None:
        """Go on with the ranks that there are, from the state of the one that has finished most steps.

        Args:
          clean, admits: as in `Post`. A newcomer comes out of the constructor, so it is admitted by ranks that are in
            it, too, or before a step: what the program calls behind a step is not before it.
          reached: this rank has come to the end of a step, and others may not have: it is told whether the step holds.
        """
        here = member()
        assert here is not None
        self._is_joined = False
        while True:
            before = here.record.members
            try:
                assert self._backend._regroup is not None
                place = self._n_passed * _CALL + self.step if self._has_begun else -1
                self._backend._regroup(step=place, clean=clean, admits=admits)
                if reached is not None:
                    reached(here.record.step > place)
                    reached = None
                self._require_repeatable(here.record, before)
                Together(self._backend, None).prepare()
                if here.record.step < 0:
                    if self._backend.rank == 0 and here.is_restarted:
                        warn("no rank that had the state is left: training begins anew")
                    self._begin_from_rank_0()
                else:
                    if not here.record.equal:
                        self._take(here.record.root)
                        clean = True
                    epoch, members = here.record.epoch, here.record.members
                    self._parts.update(self._copies.divide_anew(self._parts, epoch, members))
                # If a rank is lost at the end of a step, only some of the others may have heard that they stop.
                self._stops = self._backend.any(self._stops or self._asked_to_stop)
                for function in self._on_change:
                    function(self._backend)
            except Exception as error:
                if not is_loss(error):
                    raise
            else:
                self._has_begun = True
                return

    def _require_repeatable(self, record: Record, before: Sequence[str]) -> None:
        if record.root < 0:
            raise UnavailableError(
                f"TrainState: step {self.step + 1} cannot be repeated: all ranks that are left may have changed "
                "parameters in place already; call what follows the update outside of the step, or use "
                "TrainState(undo=True)"
            )
        self._in_vain = self._in_vain + 1 if record.members == before else 0
        if self._in_vain > _MOST_IN_VAIN:
            raise UnavailableError(
                f"TrainState: step {self.step + 1} has failed {self._in_vain} times although no rank was lost"
            )

    def _outlives(self, error: BaseException) -> bool:
        """Whether the ranks that are left go on after `error`."""
        return member() is not None and is_loss(error)

    def _take(self, root: int, state: dict[str, Any] | None = None) -> None:
        """Take the state of rank `root`, or `state` there; else all keep their parts of states of it. Collective."""
        here, copies = self._backend.rank == root, self._copies
        is_whole = state is not None
        if here and state is None:
            state = self._state(copies.without_parts(self._values()))
        given = (state, self._n_passed, self._has_stepped, is_whole) if here else None
        state, self._n_passed, have_stepped, is_whole = self._backend.bcast_object(given, root)
        problem = ""
        try:
            if not here:
                self._load(state, copies.divide if is_whole else copies.with_parts)
        except Exception as error:  # of whatever the parts are made of
            problem = error_line(error)
        problems = facts(self._backend, problem, str)
        if found := [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]:
            raise UnavailableError(f"TrainState: the state of rank {root} cannot be taken on {found[0]}")
        if not self._has_begun:
            self._n_made, self._is_behind = self._n_passed, have_stepped


def _has_state_dict(part: Any) -> bool:
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))
