"""Optimizers whose state is partitioned among the ranks: the first stage of ZeRO for any init/update pair."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from samestep import _core, arrays, trees
from samestep._util.dtypes import numpy_dtype
from samestep.errors import InvalidArgumentError
from samestep.group import compiled
from samestep.group.group import Group
from samestep.optimizer.extra_arguments import StateFacts, reduce_all, with_bits
from samestep.optimizer.flat_exchange import (
    FlatExchange,
    Plan,
    cut_part,
    from_elements,
    partition_of,
    require_elementwise,
    tree_specs,
)
from samestep.optimizer.probe import part_shape
from samestep.step.leaves import Flat, LeafSpec
from samestep.step.state_hash import Verifier
from samestep.trees import signature
from samestep.trees.divided import note_form, note_part
from samestep.trees.facts import NO_FACTS, Facts

_ACT = "ShardedOptimizer"
_UPDATE = f"{_ACT}.update"
_ONLY_PARTS = (
    "which the optimizer would call with this rank's part of the parameters; use DistributedOptimizer"
)
_UNLIKE = 1000  # elements of the first of the arrays by which leaves of a state are distinguished


def distribute(backend: Group, opt: Any, op: Any, *, elementwise: bool, copies: int = 1) -> Any:
    """Return what is used as `opt` was; a named tuple, as optax has, comes back as the same type."""
    sharded = ShardedTransformation(backend, opt, op, elementwise=elementwise, copies=copies)
    if isinstance(opt, tuple) and hasattr(opt, "_replace"):
        return opt._replace(init=sharded.init, update=sharded.update)
    return sharded


def sharded_of(opt: Any) -> ShardedTransformation:
    """What `distribute` made `opt` of; raises InvalidArgumentError if it did not."""
    found = opt if isinstance(opt, ShardedTransformation) else getattr(opt.update, "__self__", None)
    if not isinstance(found, ShardedTransformation):
        raise InvalidArgumentError(f"{_ACT}: {opt!r} is not what ShardedOptimizer returned")
    return found


def is_sharded(opt: Any) -> bool:
    """Whether `ShardedOptimizer` has made it."""
    of = getattr(getattr(opt, "update", None), "__self__", opt)
    return isinstance(of, ShardedTransformation) or hasattr(opt, "_samestep_parts")


class ShardedTransformation:
    """An optimizer object that keeps this rank's part of the state; all other attributes are the inner's."""

    def __init__(self, backend: Group, inner: Any, op: Any, *, elementwise: bool, copies: int) -> None:
        self.inner = inner
        self.copies = copies
        self.divided_among = 0
        """Ranks, when `init`, `shard_state` or a `TrainState` has divided the state last; 0: never."""
        self._backend = backend
        self._op = op
        self._elementwise = elementwise
        self._facts = StateFacts(inner)
        self._plans: dict[Any, Plan] = {}
        self._plan: Plan | None = None  # of the last parameters seen
        self._verifier = Verifier.wanted(backend, f"{_ACT}({type(inner).__name__})")

    def init(self, params: Any) -> Any:
        """The state of this rank's part of the parameters. No communication."""
        flat = trees.flatten(params)
        if compiled.is_traced(flat.leaves):
            raise InvalidArgumentError(f"{_ACT}: call init outside of compiled functions")
        plan, self.divided_among = self._plan_for(flat), self._backend.size
        given = params if self._backend.size == 1 else plan.cut(flat, f"{_ACT}.init")
        return self.noted(self.inner.init(given), plan, params, made_of=params)

    def noted(self, state: Any, plan: Plan, of: Any, *, made_of: Any = None, one: bool = False) -> Any:
        """`state`, marked as this rank's part; a whole one only where others are to have copies of its parts."""
        known = (self, plan, made_of) if self.copies > 1 else None
        if not one and self._backend.size > 1 and not plan.is_whole():
            note_form(self, plan, state, plan.names)
        return note_part(state, of, one=one, by=known) if known or self._backend.size > 1 else state

    def update(
        self, grads: Any, state: Any, params: Any = None, *, weight: float | None = None, **extra: Any
    ) -> Any:
        """Updates of all parameters, and the new state of this rank's part. Collective."""
        others = () if params is None else (params,)
        if self.divided_among not in (0, self._backend.size):
            raise InvalidArgumentError(
                f"{_UPDATE}: the group has {self._backend.size} ranks now, and the state was divided among "
                f"{self.divided_among}; make one by init or shard_state, or keep it in a TrainState, with copies=2"
            )
        if self._verifier is not None:
            self._verifier.before_step({"params": params})
        if weight is not None and self._op is None:
            raise InvalidArgumentError(
                f"{_ACT}: weight is for gradients that are averaged here, not for op=None"
            )
        facts = self._facts.of(state, of_parts=True) if self._backend.size > 1 else NO_FACTS
        if self._backend.size > 1 and self._op is None:
            facts = with_bits(facts, grads, "with op=None the gradient")
        by_all = bool(extra) or weight is not None or self._op is None or self._backend.size == 1
        if by_all:
            grads, extra = reduce_all(
                self._backend,
                _UPDATE,
                grads,
                extra,
                self._op,
                weight=weight,
                no_functions=_ONLY_PARTS,
                facts=facts,
            )
        flat = trees.flatten(grads)
        is_traced = compiled.is_traced(flat.leaves)
        if self._backend.size == 1:
            updates, state = self.inner.update(grads, state, *others, **extra)
            if self.copies > 1 and not is_traced:
                state = self.noted(state, self._plan_of_update(flat, params), None, one=True)
            return updates, state
        plan = self._plan_of_update(flat, params)
        if "grad" in extra:
            extra["grad"] = plan.cut(trees.flatten(extra["grad"]), f"{_UPDATE}: grad")
        parts = plan.cut(flat, _UPDATE) if by_all else self._reduced(plan, flat, facts)
        others = () if params is None else (plan.cut(trees.flatten(params), _UPDATE),)
        updates, state = self.inner.update(parts, state, *others, **extra)
        joined = self._joined(plan, trees.flatten(updates))
        return joined, state if is_traced else self.noted(state, plan, None, one=True)

    # ---- plans

    def _plan_for(self, flat: trees.Flat) -> Plan:
        specs = tree_specs(flat)
        key = self._backend.size, tuple(flat.names), tuple((spec.dtype, spec.shape) for spec in specs)
        if key not in self._plans:
            others = [None if spec.group else leaf for spec, leaf in zip(specs, flat.leaves, strict=True)]
            partition = partition_of(specs, self._backend.size)
            exchange = FlatExchange(self._backend, partition, flat.names)
            plan = Plan(flat.names, specs, flat.rebuild, others, exchange)
            if not self._elementwise and not compiled.is_traced(flat.leaves):
                require_elementwise(self.inner, plan)
            self._plans[key] = plan
        self._plan = self._plans[key]
        return self._plan

    def _plan_of_update(self, grads: trees.Flat, params: Any) -> Plan:
        if params is not None:
            return self._plan_for(trees.flatten(params))
        known = self._plan
        if known is not None and known.names == grads.names and known.exchange.is_current():
            return known
        return self._plan_for(grads)

    # ---- gradients in, updates out

    def _reduced(self, plan: Plan, flat: trees.Flat, facts: Facts) -> Any:
        """This rank's part of the reduced gradients."""
        if flat.names != plan.names:
            raise InvalidArgumentError(
                f"{_ACT}.update: the leaves of the gradients are not those of the parameters"
            )
        specs = tree_specs(flat)
        split = [i for i in plan.split() if not arrays.is_float0(flat.leaves[i])]
        for i in split:
            if specs[i].group and specs[i].shape != plan.specs[i].shape:
                raise InvalidArgumentError(
                    f"{_ACT}.update: the gradient of {signature.leaf_text(plan.names[i])} has shape "
                    f"{specs[i].shape}, the parameter {plan.specs[i].shape}"
                )
        kinds = {i: specs[i].what for i in split}
        others = [(name, _kind_of_whole(specs[i])) for i, name in enumerate(plan.names) if i not in kinds]

        def run_on_host(given: dict[int, Any], beside: Sequence[Any]) -> dict[int, Any]:
            with _core.UserCall(_UPDATE):
                dtypes = plan.exchange.agreed_dtypes(_UPDATE, kinds, others, facts.with_values(beside))
                own = plan.exchange.reduce_scatter(given, dtypes, self._op)
            parts = {}
            for i, data in own.items():
                held, library = data if plan.exchange.part(i) else None, _library(specs[i], plan.specs[i])
                shape, device = plan.part_shape(i), self._backend.device
                parts[i] = arrays.from_bytes(held, library, dtypes[i], shape, device, like=given.get(i))
            return parts

        shapes = {i: plan.part_shape(i) for i in plan.split()}
        leaves = [np.asarray(x) if spec.is_number else x for x, spec in zip(flat.leaves, specs, strict=True)]
        beside = [value for _, value in facts.traced]
        return flat.rebuild(self._run(run_on_host, leaves, split, shapes, beside=beside))

    def _joined(self, plan: Plan, flat: trees.Flat) -> Any:
        """The updates of all ranks."""
        if flat.names != plan.names:
            raise InvalidArgumentError(
                f"{_ACT}: the optimizer returned updates with other leaves than the gradients"
            )
        specs = tree_specs(flat)
        split = [i for i in plan.split() if specs[i].group]
        for i in split:
            if specs[i].shape != plan.part_shape(i):
                raise InvalidArgumentError(
                    f"{_ACT}: the optimizer returned an update of shape {specs[i].shape} for the part "
                    f"{plan.part_shape(i)} of {signature.leaf_text(plan.names[i])}"
                )

        def run_on_host(parts: dict[int, Any], _: Sequence[Any]) -> dict[int, Any]:
            with _core.UserCall(_UPDATE):
                whole = plan.exchange.allgather(parts)
            device = self._backend.device
            return {i: _whole(data, specs[i], plan.specs[i], device, parts[i]) for i, data in whole.items()}

        shapes = {i: plan.specs[i].shape for i in plan.split()}
        return flat.rebuild(self._run(run_on_host, flat.leaves, split, shapes))

    def _run(
        self,
        function: Callable[[dict[int, Any], Sequence[Any]], dict[int, Any]],
        leaves: Sequence[Any],
        split: list[int],
        shapes: dict[int, tuple[int, ...]],
        *,
        beside: Sequence[Any] = (),
    ) -> list[Any]:
        """`leaves` with the results of `function` in the places `split`; in a compiled program when that runs.

        Of the others, those in `shapes` that hold nothing get their shape. In a program, `function` gets the values of
        `beside`, too.
        """
        results = list(leaves)
        for i, shape in shapes.items():
            if arrays.is_float0(leaves[i]):
                results[i] = np.zeros(shape, leaves[i].dtype)
        given = {i: leaves[i] for i in split if leaves[i] is not None}
        if not compiled.is_traced(list(given.values())):
            made = function(given, ())
        else:

            def run_on_host(*values: Any) -> list[Any]:
                more = values[len(given) :]
                done = function(dict(zip(given, values, strict=False)), more)
                return [*(np.asarray(done.get(i)) for i in given), *more]

            values = compiled.call_function(
                _UPDATE,
                run_on_host,
                [*given.values(), *beside],
                shapes=[*(shapes[i] for i in given), *(x.shape for x in beside)],
            )
            made = dict(zip(given, values, strict=False))
        for i in split:
            results[i] = made.get(i)
        return results

    # ---- checkpoints

    def plan_of(self, params: Any) -> Plan:
        """The parts of these parameters."""
        return self._plan_for(trees.flatten(params))

    def renewed(self, plan: Plan) -> Plan:
        """The plan for the ranks that the group has now."""
        if plan.exchange.is_current():
            return plan
        partition = partition_of(plan.specs, self._backend.size)
        return plan._replace(exchange=FlatExchange(self._backend, partition, plan.names))

    def gather_state(self, state: Any, plan: Plan, root: int | None) -> Any:
        """See `samestep.optimizer.gather_state`."""
        if self._backend.size == 1:
            return state
        flat = trees.flatten(state)
        values = list(flat.leaves)
        with _core.UserCall("gather_state"):
            for k, i in enumerate(self.owners(plan, flat.names)):
                if i is not None:
                    leaf, dtype = values[k], arrays.info(values[k]).dtype
                    data = plan.exchange.gather(i, leaf, dtype, root)
                    values[k] = None if data is None else arrays.like_bytes(data, leaf, plan.specs[i].shape)
        is_here = root is None or self._backend.rank == root
        return flat.rebuild(values) if is_here else None

    def shard_state(self, state: Any, plan: Plan) -> Any:
        """See `samestep.optimizer.shard_state`."""
        self.divided_among = self._backend.size
        if self._backend.size == 1:
            return self.noted(state, plan, None)
        flat = trees.flatten(state)
        values = list(flat.leaves)
        for k, i in enumerate(self.owners(plan, flat.names)):
            if i is not None:
                shape = arrays.info(values[k]).shape
                if shape != plan.specs[i].shape:
                    raise InvalidArgumentError(
                        f"shard_state: {signature.leaf_text(flat.names[k])} has shape {shape}, its parameter "
                        f"{plan.specs[i].shape}; pass the whole state, as gather_state returns it"
                    )
                part = cut_part(values[k], shape, plan.held(i), flat.names[k])
                # A view would keep the whole.
                values[k] = part.copy() if isinstance(part, np.ndarray) else part
        return self.noted(flat.rebuild(values), plan, state)

    def owners(self, plan: Plan, names: list[str]) -> list[int | None]:
        """By leaf of the state, the leaf of the parameters whose shape it has, as arrays of unlike lengths show."""

        def unlike(i: int, spec: LeafSpec) -> Any:
            shape = part_shape(spec.shape, _UNLIKE + i)
            return from_elements(np.zeros(math.prod(shape)), spec, shape)

        flat = trees.flatten(self.inner.init(plan.with_leaves(unlike)))
        if flat.names != names:
            raise InvalidArgumentError(
                f"{_ACT}: this is not a state of {type(self.inner).__name__} for these parameters"
            )
        owners: list[int | None] = []
        for name, leaf in zip(flat.names, flat.leaves, strict=True):
            shape = arrays.info(leaf).shape if arrays.is_array(leaf) else ()
            owner = next((n - _UNLIKE for n in shape if n >= _UNLIKE), None)
            of = plan.specs[owner : owner + 1] if owner is not None else []
            if owner is not None and [shape] != [part_shape(spec.shape, _UNLIKE + owner) for spec in of]:
                raise InvalidArgumentError(
                    f"{_ACT}: {signature.leaf_text(name)} of the state has the shape of no parameter, as if it held "
                    "several; only states of the shapes of parameters can be joined"
                )
            owners.append(owner)
        return owners

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not yet there while being unpickled or copied
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"ShardedTransformation({self.inner!r})"


def _kind_of_whole(gradient: LeafSpec) -> str:
    """What a gradient is that all ranks keep whole, because its parameter is not split. An array is not among them."""
    if not gradient.group and gradient.what.partition(" ")[0] not in ("bool", "float8_e4m3fn", "float8_e5m2"):
        return gradient.what
    why = (
        f"an array of {gradient.what}, which is not split as its parameter is no array of numbers; pass None"
    )
    return signature.with_refusals([""], {0: why})[0]


def _library(spec: LeafSpec, otherwise: LeafSpec) -> str:
    library = spec.library or otherwise.library
    return "numpy" if library == "number" else library


def _whole(data: Flat, spec: LeafSpec, of: LeafSpec, device: int | None, like: Any) -> Any:
    """A leaf of the library of `spec` and the shape of the parameter from the bytes of its elements."""
    if spec.library == "numpy" and not of.is_number:
        return data.view(numpy_dtype(spec.dtype)).reshape(of.shape)
    leaf = arrays.from_bytes(data, _library(spec, of), spec.dtype, of.shape, device, like=like)
    return leaf.item() if of.is_number else leaf
