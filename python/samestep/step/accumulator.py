"""Gradients of the shards of a step, averaged with bits that do not depend on the number of ranks."""

from __future__ import annotations

import functools
import operator
import sys
import weakref
from typing import Any

import numpy as np

from samestep import _core, trees
from samestep._util.json_layout import Many
from samestep._util.text import error_line, numbers_text
from samestep.errors import InvalidArgumentError
from samestep.group import compiled
from samestep.group.backend_argument import require_backend
from samestep.group.group import Group
from samestep.step import agree, audit
from samestep.step.agree import require_same_order
from samestep.step.combine import Memory, Partial, Term, combine, combine_weights
from samestep.step.leaves import (
    Flat,
    Layout,
    LeafSpec,
    describe,
    examples,
    gradients_of,
    present_in,
    rebuild_of,
    require_weight,
    to_leaf,
)
from samestep.step.shards import Node, PairwiseTree, final_nodes, shards_of
from samestep.step.state_hash import Recorder
from samestep.step.together import audited_now, note_begun, note_reduced
from samestep.trees.allreduce import require_sum, weight_of
from samestep.trees.fusion import Timer, timer

__all__ = ["Accumulator"]


class Accumulator:
    """The weighted mean of gradients over all shards of a step, on all ranks.

    A step has `shards` parts, independently of the number of ranks. Their gradients are added in one
    pairwise tree over the shards, ((0 + 1) + (2 + 3)) + ..., half types in float32 and rounded once at the
    end. So the mean has the same bits on any number of ranks, if the gradients of each shard
    do.

    Rank r adds the shards of `indices`, a contiguous run, in any order; `DistributedSampler.steps` gives
    them. In ascending order no more than about log2(shards) partial sums are kept, in host memory. Without
    `shards` each rank adds any number of gradients, e.g. of micro-batches. The result is the same
    weighted mean, but its bits depend on which rank adds which gradients.

    Args:
      backend: the group.
      shards: the number of shards of a step, >= 1 and the same on all ranks; a power of two is the fastest. None: see
        above.
      like: a tree of the same structure, shapes and dtypes as the gradients, e.g. the parameters. Needed only
        if ranks have no shards and the containers cannot be pickled.

    Example:
      >>> import numpy as np, samestep as ss
      >>> total = ss.Accumulator(ss.initialize(), shards=2)
      >>> total.add({"w": np.array([1.0, 2.0])}, shard=0, weight=3)
      >>> total.add({"w": np.array([5.0, 6.0])}, shard=1, weight=1)
      >>> total.mean()
      {'w': array([2., 3.])}
    """

    def __init__(self, backend: Group, shards: int | None = None, *, like: Any = None) -> None:
        require_backend(Accumulator, backend)
        self._backend = backend
        self._shards = None if shards is None else operator.index(shards)
        self._fixed, self._n_shards = shards is not None, 1 if self._shards is None else self._shards
        if self._n_shards < 1:
            raise InvalidArgumentError(f"Accumulator: shards must be >= 1, got {shards}")
        self.weight = 0.0
        """The sum of all weights of the step that `mean` ended last."""
        self.all_finite = True
        """Whether all elements of the mean that `mean` returned last are finite. The same on all ranks, without a
        collective, because sums propagate the infinities and NaNs of every rank."""
        self._tree: agree.Tree | None = None
        # The digest of the tree that was described last, its leaves, and those present as a bit mask: a step adds equal
        # trees again and again.
        self._described: tuple[int, list[LeafSpec], int] | None = None
        self._memory = Memory(lambda count, dtype: backend.empty((count,), dtype))
        self._recorder = Recorder.wanted(backend)
        self._act = f"Accumulator(shards={shards}).mean()"
        self._divide(backend)
        backend._follow(self, Accumulator._divide)
        if like is not None:
            like = gradients_of(like)
            self._look_at(like, trees.flatten(like))

    def _divide(self, backend: Group) -> None:
        """Divide the shards among the ranks; a new step begins."""
        size = backend.size
        if not self._fixed:
            self._n_shards = size
        runs = [shards_of(self._n_shards, rank, size) for rank in range(size)]
        self._nodes = [final_nodes(self._n_shards, run) for run in runs]
        self.indices = runs[backend.rank] if self._fixed else range(sys.maxsize)
        """The shards that this rank adds."""
        self._headers = agree.StepHeaders(backend, max(map(len, self._nodes)))
        self._is_compared = False
        self._memory.forget()
        self.reset()

    def reset(self) -> None:
        """Discard the gradients added since the last `mean`."""
        self._added: set[int] = set()
        self._audit: dict[int, Any] = {}  # digests of the shards that other ranks compute as well
        self._failure = ""
        """Why gradients of this step could not be added; "" if all could."""
        n_leaves = self._n_shards if self._fixed else sys.maxsize
        # Weakly: what was added, perhaps in device memory, is freed with the accumulator, not when Python finds cycles.
        owner = weakref.ref(self)

        def merge(partial: Partial, siblings: list[Partial]) -> Partial:
            accumulator = owner()
            assert accumulator is not None  # it makes the call
            return accumulator._merge(partial, siblings)

        self._partials: PairwiseTree[Partial] = PairwiseTree(n_leaves, merge)

    def _refuse(self, why: str) -> None:
        """Let `mean` raise InvalidArgumentError on all ranks, for this reason. No communication."""
        self._failure = why

    def add(self, grads: Any, *, shard: int | None = None, weight: float = 1.0, copy: bool = True) -> None:
        """Add the gradients of one shard. No communication.

        Args:
          grads: tree of arrays: the mean gradients over the items of the shard. They are not changed. A leaf that is
            None counts as zeros; None on all shards stays None. A torch module stands for the `.grad` of its
            parameters. Ignored if `weight` is 0; it may be None then.
          shard: its number, one of `indices`; None if the accumulator has no `shards`.
          weight: of this shard, 0 or more; usually its number of items or tokens. For integer leaves it is a whole
            number; their mean is exact, rounded down.
          copy: False if nobody changes the arrays before `mean` has returned, for example because each shard has new
            ones. Saves a pass over memory for every other shard. The bits are the same.

        Raises:
          InvalidArgumentError: the shard belongs to another rank or has been added before, the weight is negative,
            infinite or NaN, or so large or small that products would overflow (whole numbers below 2**53 never are),
            the tree has changed, or `allreduce_tree` would refuse a leaf. Nothing has been added then. Or an array that
            was kept (`copy=False`) cannot be read any more: then `mean` will raise on all ranks, unless `reset` is
            called.
        """
        weight = weight_of(weight, "Accumulator.add")
        audited = audited_now()
        if audited is not None and shard is not None and self._backend.rank in audited.ranks.get(shard, ()):
            self._audit[shard] = audit.digest(
                gradients_of(grads, "Accumulator.add") if weight else None, weight
            )
            if self._backend.rank != audited.ranks[shard][0]:
                return
        index = self._index(shard)
        if weight > 0:
            leaves, specs, present = self._leaves_of(grads)
            assert self._tree is not None
            require_weight(specs, self._tree.layout.names, weight)
            partial = Partial(Term(leaves, weight), present)
        else:
            partial = Partial()
        if not self._added:
            note_begun(self)
        try:
            self._partials.add(Node(0, index), partial)
            if copy and partial.term is not None and self._tree is not None:
                partial.settled(self._tree.layout, self._memory)
        except BaseException as error:  # sums of earlier shards may be gone
            self._failure = error_line(error)
            raise
        self._added.add(index)

    def _merge(self, partial: Partial, siblings: list[Partial]) -> Partial:
        if siblings and self._tree is not None:
            partial.absorb(siblings, self._tree.layout, self._memory)
        return partial

    def _index(self, shard: int | None) -> int:
        if not self._fixed:
            if shard is not None:
                raise InvalidArgumentError("Accumulator.add: shard is for accumulators with shards=")
            return len(self._added)
        if shard is None:
            raise InvalidArgumentError("Accumulator.add: with shards= every call names its shard")
        index = operator.index(shard)
        if index not in self.indices:
            raise InvalidArgumentError(
                f"Accumulator.add: rank {self._backend.rank} adds shards {numbers_text(self.indices) or 'none'} of "
                f"{self._n_shards}, not {index}"
            )
        if index in self._added:
            raise InvalidArgumentError(f"Accumulator.add: shard {index} has been added already in this step")
        return index

    def _leaves_of(self, grads: Any) -> tuple[list[Any], list[LeafSpec], int]:
        """The leaves as arrays, what they are, and which of them hold elements."""
        grads = gradients_of(grads, "Accumulator.add")
        fast = _core.fast_tree(grads)
        if fast is not None and self._described is not None and fast.digest == self._described[0]:
            return fast.leaves, *self._described[1:]
        flat = trees.flatten(grads)
        specs = self._look_at(grads, flat)
        present = present_in(specs)
        self._described = (fast.digest, specs, present) if fast is not None else None
        leaves = [
            np.asarray(leaf) if spec.is_number else leaf
            for leaf, spec in zip(flat.leaves, specs, strict=True)
        ]
        return leaves, specs, present

    def _look_at(self, tree: Any, flat: trees.Flat) -> list[LeafSpec]:
        """What the leaves are; compares with the trees before."""
        if compiled.is_traced(flat.leaves):
            raise InvalidArgumentError("Accumulator: gradients are added outside of compiled functions")
        specs = describe(flat.names, flat.leaves, "Accumulator.add")
        if self._tree is None:
            self._tree = agree.Tree(
                Layout(flat.names, specs), rebuild_of(tree, flat), examples(flat.leaves, specs)
            )
            return specs
        old = self._tree.layout
        agree.require_like(old, flat.names, specs)
        new = old.with_absent_from(specs)
        if new is not old:
            known = [
                now if before is None else before
                for before, now in zip(self._tree.examples, examples(flat.leaves, specs), strict=True)
            ]
            self._tree = self._tree._replace(examples=known)
            self._set_layout(new, list(self._partials.nodes.values()))
        return specs

    def _set_layout(self, new: Layout, partials: list[Partial]) -> None:
        assert self._tree is not None
        old = self._tree.layout
        if new.specs != old.specs:
            self._memory.forget()
            for partial in partials:
                partial.move(old, new, self._memory)
        self._tree = self._tree._replace(layout=new)

    def mean(self, *, timeout: float | None = None) -> Any:
        """The weighted mean over all shards, on all ranks; a new step begins. Collective.

        Args:
          timeout: seconds for all of it; None for the timeout of the group.

        Returns:
          A tree of the containers of the first tree added, with new arrays of the same libraries and dtypes; the same
          bits on all ranks.

        Raises:
          InvalidArgumentError: on all ranks: shards have not been added (names them and their ranks) or could not be,
            or all weights are zero, or their sum is too large, as for `add`.
          MismatchError: on all ranks: they differ in the number of shards or in the tree.
        """
        try:
            with _core.UserCall(self._act):
                mean = self._mean(timer(timeout))
        finally:
            self.reset()
        note_reduced()
        return mean

    def _mean(self, left: Timer) -> Any:
        backend = self._backend
        if not self._is_compared:
            agree.agree_on_count(backend, self._n_shards if self._fixed else 0, left)
            require_same_order(backend, left())
            self._is_compared = True
        if self._fixed and (audited := audited_now()) is not None:
            audit.compare(backend, audited, self._audit, left)
        mine = self._finished()
        present = functools.reduce(operator.or_, (partial.present for partial in mine), 0)
        missing = self._missing()
        header = agree.Header(
            self._tree.layout.digest if self._tree is not None else 0,
            agree.header_of_present(present, self._tree),
            len(missing) + bool(self._failure),
            [partial.weight for partial in mine],
        )
        headers = self._headers.exchange(header, left)
        if any(entry.problem for entry in headers):
            self._tell_problems(missing, left)
        self.weight = combine_weights(self._n_shards, self._nodes, [entry.weights for entry in headers])
        where = f"{self._act} in group {backend.name}"
        require_sum((), self.weight, where)
        if len({entry.digest for entry in headers}) > 1:
            agreed = agree.agree_on_tree(backend, self._tree, self._act, left)
            self._tree = agreed._replace(layout=self._tree.layout) if self._tree is not None else agreed
            self._set_layout(agreed.layout, mine)
        assert self._tree is not None
        layout = self._tree.layout
        require_sum(layout.groups, self.weight, where)
        union = agree.union_of_present(backend, headers, present, self._tree, left)
        flats = [partial.settled(layout, self._memory) for partial in mine or [Partial()]]
        total = combine(backend, self._n_shards, self._nodes, flats, left)
        are_finite = [_core.divide_in_place(flat, self.weight) for flat in total.values()]
        self.all_finite = all(are_finite)
        result = self._leaves_from(total, union)
        for taken in flats:
            self._memory.release(
                {k: flat for k, flat in taken.items() if taken is not total or k not in layout.viewed}
            )
        return result

    def _finished(self) -> list[Partial]:
        """This rank's nodes, in order: those of `_nodes`, unless shards are missing or an array cannot be read."""
        partials = [partial for _, partial in self._partials.in_order()]
        try:
            while not self._fixed and len(partials) > 1:
                right = partials.pop()
                self._merge(partials[-1], [right])
            for partial in partials:
                if self._tree is not None and not partial.is_empty:
                    partial.settled(self._tree.layout, self._memory)
        except Exception as error:  # reported to the other ranks
            self._failure, partials = error_line(error), []
        n_nodes = len(self._nodes[self._backend.rank])
        return partials[:n_nodes] + [Partial() for _ in range(n_nodes - len(partials))]

    def _missing(self) -> list[int]:
        return [i for i in self.indices if i not in self._added] if self._fixed else []

    def _tell_problems(self, missing: list[int], left: Timer) -> None:
        everyone = self._backend._allgather_facts([self._failure, missing], [str, Many(int)], left())
        failures = [f"rank {rank}: {failure}" for rank, (failure, _) in enumerate(everyone) if failure]
        if failures:
            raise InvalidArgumentError(
                f"{self._act} in group {self._backend.name}: gradients could not be added; {'; '.join(failures)}"
            )
        text = ", ".join(
            f"shard{'s' * (len(rows) > 1)} {', '.join(map(str, rows))} of rank {rank}"
            for rank, (_, rows) in enumerate(everyone)
            if rows
        )
        raise InvalidArgumentError(
            f"{self._act} in group {self._backend.name}: not added: {text}; a shard without items is added with "
            "weight=0"
        )

    def _leaves_from(self, total: dict[str, Flat], present: int) -> Any:
        assert self._tree is not None
        layout, values, device = self._tree.layout, list(self._tree.examples), self._backend.device
        for i, spec in enumerate(layout.specs):
            if spec.group:
                is_here = present >> i & 1
                values[i] = (
                    to_leaf(layout.mean(total, i), spec, values[i], device=device) if is_here else None
                )
        if self._recorder is not None:
            self._recorder.add(self.weight, layout.names, values)
        return self._tree.rebuild(values)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: the number of shards, which must not change. To be called between steps.

        Raises:
          InvalidArgumentError: shards of a step have been added and `mean` has not been called.
        """
        if self._added:
            raise InvalidArgumentError("Accumulator.state_dict: in the middle of a step; save after mean()")
        return {"shards": self._shards}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that the resumed run has the same number of shards.

        Raises:
          InvalidArgumentError: it does not.
        """
        if state["shards"] != self._shards:
            raise InvalidArgumentError(
                f"Accumulator: the state is of shards={state['shards']}, not {self._shards}"
            )

    def __copy__(self) -> Accumulator:
        """Another accumulator of the same group, between steps: the sums of a step belong to one."""
        if self._added:
            raise InvalidArgumentError("Accumulator: no copies in the middle of a step; copy it after mean()")
        new = Accumulator(self._backend, self._shards)
        new._tree = self._tree
        return new

    def __deepcopy__(self, memo: Any) -> Accumulator:
        return self.__copy__()

    def __repr__(self) -> str:
        return f"Accumulator(shards={self._shards}: {len(self._added)} added, rank {self._backend.rank})"
