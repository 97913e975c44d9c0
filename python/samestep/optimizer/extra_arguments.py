"""Optimizers with init(params) -> state and update(grads, state, ...) -> (updates, state), as in optax.

Arguments of `update` besides the gradients, the state and the parameters are equal on all ranks, or refused. So is what
parameters drift apart by: numbers of the state (learning rates of `optax.inject_hyperparams`, counts that schedules go
by, random keys), and the numbers that functions of optax have captured, such as the learning rate of `optax.sgd(0.1)`.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from samestep import arrays, trees
from samestep.errors import InvalidArgumentError
from samestep.group import compiled
from samestep.group.backend_argument import takes_backend
from samestep.group.group import Group
from samestep.reduce_ops import Op, ReduceOp, is_mean
from samestep.step import state_hash
from samestep.step.gradients import allreduce_tree, reduce_gradients
from samestep.step.state_hash import Verifier, hash_of
from samestep.trees import flatten, signature
from samestep.trees.facts import NO_FACTS, PLAIN, Facts, numbers_in, text_of
from samestep.trees.identity import identity_of, is_array, is_number, key_text
from samestep.trees.structure import expand_jax

_DRIFT = (
    ", or parameters drift apart: make the optimizer alike, and its state by synchronize(backend, state) where some "
    "ranks alone have loaded or set it"
)
_LIBRARY = "optax"
_DEEPEST_SETTING = 20


class StateFacts:
    """What must be equal on all ranks of one optimizer, with `init` and `update`, and its state."""

    def __init__(self, opt: Any) -> None:
        self._settings = [(f"the optimizer's {name}", text) for name, text in settings_of(opt.update).items()]

    def of(self, state: Any, *, of_parts: bool = False) -> Facts:
        """Of the optimizer and a state, whose arrays are all or `of_parts` that ranks divide."""
        return numbers_in(state, "state", _DRIFT, of_parts=of_parts).with_texts(self._settings)


def with_bits(facts: Facts, tree: Any, what: str) -> Facts:
    """`facts`, and what tells arrays from others: a hash, or where JAX traces the sum of their bits."""
    flat = flatten(tree)
    texts, traced = [], []
    for name, leaf in zip(flat.names, flat.leaves, strict=True):
        if compiled.is_traced([leaf]):
            traced.append((f"{what} {name}", _sum_of_bits(leaf)))
        elif is_array(leaf):
            texts.append((f"{what} {name}", f"an array of hash {hash_of(leaf).hex()}"))
        else:
            texts.append((f"{what} {name}", repr(leaf) if is_number(leaf) else type(leaf).__name__))
    return facts.with_texts(texts)._replace(traced=(*facts.traced, *traced))


def _sum_of_bits(x: Any) -> Any:
    from jax import lax
    from jax import numpy as jnp

    if x.dtype.kind == "c":
        x = jnp.stack([x.real, x.imag])
    x = x.astype("uint8") if x.dtype == bool else x
    return lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}").sum(dtype="uint32")


def settings_of(update: Any) -> dict[str, str]:
    """Names of optax's functions, and numbers, texts and flags that they have captured, by where.

    Of other functions nothing, as what they hold may mean something else on each rank.
    """
    return dict(_captured(update, "", _DEEPEST_SETTING))


def _captured(value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, PLAIN) or is_number(value) or (is_array(value) and not np.shape(value)):
        if (text := text_of(value)) is not None:
            yield path, text
        return
    if _is_of_library(value):
        yield path or "update", value.__qualname__
    for name, part in _parts_of(value) if depth else ():
        yield from _captured(part, (path + name).removeprefix("."), depth - 1)


def _is_of_library(value: Any) -> bool:
    is_function = isinstance(value, types.FunctionType)
    return is_function and (value.__module__ or "").partition(".")[0] == _LIBRARY


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield "", (value.func, value.args, value.keywords)
    elif _is_of_library(value):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # of a cell that is still empty
                yield f".{name}", cell.cell_contents
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    elif isinstance(value, dict):
        named = ((key_text(key), part) for key, part in value.items())
        yield from ((f"[{text}]", part) for text, part in named if text is not None)


_REDUCED = ("value", "grad")  # as optax names the loss and its gradient
_FUNCTION = "value_fn"  # and the function that computes the loss
KEPT = ("state", "params")
_CURE = (
    "; update averages value, grad and value_fn, and other extra arguments must be equal on all ranks: average them "
    "first, or let value_fn hold the data of the rank (lambda w: loss(w, x, y))"
)
_ANOTHER_MEAN = (
    "and its mean over all ranks would be the plain one, but here is a weight or an op other than AVG"
)


@takes_backend
def averaged(backend: Group, function: Callable[..., Any]) -> Averaged:
    """The mean over all ranks of a function of the parameters, for optimizers that evaluate it.

    The function that is returned is collective: all ranks call it with equal parameters. Under JAX it can be
    differentiated, in reverse mode: the gradient is the mean of all ranks' gradients, on every rank.

    `DistributedOptimizer` does this to `value_fn` itself, and refuses functions by other names that have not gone
    through it.

    Args:
      backend: the group.
      function: of the parameters, which come first, and of anything; returns a tree of numbers and arrays.

    Example:
      >>> import samestep as ss
      >>> from samestep.optimizer import averaged
      >>> mean_loss = averaged(ss.initialize(), lambda w: (w - 1.0) ** 2)
      >>> mean_loss(3.0)
      4.0
    """
    return function if isinstance(function, Averaged) else Averaged(backend, function)


class Averaged:
    """What `averaged` returns."""

    def __init__(self, backend: Group, function: Callable[..., Any]) -> None:
        self.backend, self.function = backend, function
        self.__name__ = "averaged"  # ranks compare functions by name

    def __call__(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        """The mean over all ranks of what `function` returns. Collective."""
        if compiled.is_traced(trees.flatten(params).leaves):
            params = self._common(params)
        return allreduce_tree(self.backend, self.function(params, *args, **kwargs), ReduceOp.AVG)

    def _common(self, params: Any) -> Any:
        """`params`, which are equal on all ranks: what is differentiated by them has the mean of all gradients."""
        import jax

        common = jax.custom_vjp(lambda tree: tree)
        common.defvjp(
            lambda tree: (tree, None),
            lambda _, change: (allreduce_tree(self.backend, change, ReduceOp.AVG),),
        )
        return common(params)


def reduce_all(
    backend: Group,
    act: str,
    grads: Any,
    extra: dict[str, Any],
    op: Op | None,
    *,
    weight: float | None = None,
    no_functions: str = "",
    facts: Facts = NO_FACTS,
) -> tuple[Any, dict[str, Any]]:
    """Reduce the gradients, and with them the extra arguments `value`, `grad` and `value_fn`. Collective.

    Args:
      extra: arguments by name; "state" and "params" are left as they are.
      op, weight: as for `allreduce_gradients`; `op` None where nothing is to be reduced.
      no_functions: why functions cannot be averaged; "" if they can.
      facts: what must be equal on all ranks as well.

    Raises:
      MismatchError: on all ranks: another argument, or without `op` any, differs between ranks; names it.
      InvalidArgumentError: on all ranks: another argument is a function, or cannot be compared; names it.
    """
    own: dict[str, Any] = {}
    if backend.size > 1 and extra:
        if op is not None:
            own = {k: extra[k] for k in _REDUCED if k in extra and _is_numeric(extra[k])}
            if weight is not None or not is_mean(op):
                no_functions = no_functions or _ANOTHER_MEAN
        if callable(extra.get(_FUNCTION)) and not no_functions:
            extra = {**extra, _FUNCTION: averaged(backend, extra[_FUNCTION])}
        others = {k: v for k, v in extra.items() if k not in own and k not in KEPT}
        if others:
            _require_equal(backend, act, others, no_functions)
    if op is None:
        if facts is not NO_FACTS:
            _require_facts(backend, act, facts)
        return grads, extra
    if not own:
        return reduce_gradients(backend, grads, op, weight=weight, facts=facts), extra
    again = [k for k, v in own.items() if v is grads]
    once = {k: v * 1.0 if _is_whole(v) else v for k, v in own.items() if k not in again}
    grads, once = reduce_gradients(backend, (grads, once), op, weight=weight, facts=facts)
    return grads, {**extra, **once, **dict.fromkeys(again, grads)}


def _is_whole(value: Any) -> bool:
    """Whether the mean of these numbers would be rounded down."""
    dtype = str(getattr(value, "dtype", "")).rpartition(".")[2]  # torch writes torch.int64
    return type(value) is int or dtype.startswith(("int", "uint"))


def _is_numeric(tree: Any) -> bool:
    leaves = [leaf for leaf in trees.flatten(tree).leaves if leaf is not None]
    return bool(leaves) and all(map(_is_numeric_leaf, leaves))


def _is_numeric_leaf(leaf: Any) -> bool:
    is_number = isinstance(leaf, np.number) or type(leaf) in (int, float, complex)
    return is_number or arrays.is_jax(leaf) or arrays.is_array(leaf) or arrays.is_float0(leaf)


def _require_equal(backend: Group, act: str, extra: dict[str, Any], no_functions: str) -> None:
    """Check that arguments are equal on all ranks, and that they are nothing that cannot be compared."""
    refusals: list[str] = []
    known: dict[str, Any] = {}
    in_program: dict[str, Any] = {}
    for name, value in extra.items():
        leaves = trees.flatten(value).leaves
        if refusal := _refusal(f"{act}: {name}", [value] if callable(value) else leaves, name, no_functions):
            refusals.append(refusal)
            known[name] = refusal  # so that all ranks raise the same error, whichever of them it is about
        elif compiled.is_traced(leaves):
            in_program[name] = [_without_type(leaf) for leaf in leaves if _is_numeric_leaf(leaf)]
            known[name] = [leaf for leaf in leaves if not _is_numeric_leaf(leaf)]
        else:
            known[name] = value
    state_hash.same(backend, known, act=act, when=_CURE)
    if refusals:
        raise InvalidArgumentError(refusals[0])
    if not in_program:
        return
    group, flat = compiled.group_of(backend), trees.flatten(in_program)

    def compare(*values: Any) -> list[Any]:
        state_hash.same(group, flat.rebuild(values), act=act, when=_CURE)
        return list(values)

    compiled.call_function(act, compare, flat.leaves)


def _require_facts(backend: Group, act: str, facts: Facts) -> None:
    def compare(*values: Any) -> list[Any]:
        by = signature.Comparison(facts.with_values(values))
        signature.compare(group, signature.Description.of(act, [], []), by=by)
        return list(values)

    group = backend
    if facts.traced:
        group = compiled.group_of(backend)
        compiled.call_function(act, compare, [value for _, value in facts.traced])
    else:
        compare()


def _without_type(leaf: Any) -> Any:
    """A random key that JAX traces as its data, which alone has elements; all else as it is."""
    node = expand_jax(leaf)
    return leaf if node is None else node.children[0]


def _refusal(where: str, leaves: list[Any], name: str, no_functions: str) -> str:
    """Why the leaves of an argument are not passed on; "" if they are once ranks have found them equal."""
    for leaf in leaves:
        if callable(leaf) and no_functions:
            return f"{where} is a function, {no_functions}"
        if callable(leaf) and not isinstance(leaf, Averaged):
            return (
                f"{where} is a function, which may use the data of this rank alone; pass "
                f"{name}=samestep.optimizer.averaged(backend, {name}), its mean over all ranks"
            )
        if not callable(leaf) and not _is_numeric_leaf(leaf) and identity_of(leaf) is None:
            return f"{where} is of type {type(leaf).__name__}, which ranks cannot compare; pass arrays or numbers"
    return ""


def distribute(backend: Group, opt: Any, op: Any) -> Any:
    """Return `opt` with an `update` that first reduces its first argument over all ranks.

    A named tuple, as optax has, comes back as the same type, so that `isinstance` tests, `optax.chain` and
    checkpoints see no difference. Another object comes back as a `DistributedTransformation`.
    """
    wrapped = DistributedTransformation(backend, opt, op)
    if not (isinstance(opt, tuple) and hasattr(opt, "_replace")):
        return wrapped

    def update(
        grads: Any, *args: Any, **kwargs: Any
    ) -> Any:  # no method, which a copy of the tuple would copy
        return wrapped.update(grads, *args, **kwargs)

    return opt._replace(update=update)


class DistributedTransformation:
    """An optimizer object whose `update` averages first; all else, also assignment, is the inner's."""

    def __init__(self, backend: Group, inner: Any, op: Any) -> None:
        kind = "" if isinstance(inner, tuple) else f"({type(inner).__name__})"
        verifier = Verifier.wanted(backend, f"DistributedOptimizer{kind}")
        facts = StateFacts(inner)
        self.__dict__.update(_backend=backend, inner=inner, _op=op, _verifier=verifier, _facts=facts)

    def update(self, grads: Any, *args: Any, weight: float | None = None, **kwargs: Any) -> Any:
        """The inner `update` with `grads` reduced over all ranks, each of which counts as `weight`. Collective."""
        if self._verifier is not None:
            kept = {name: value for name, value in kwargs.items() if name in KEPT}
            self._verifier.before_step({"args": args[:2], "kwargs": kept})
        state = args[0] if args else kwargs.get("state")
        facts = self._facts.of(state) if self._backend.size > 1 else NO_FACTS
        by_position = {f"argument {i}": value for i, value in enumerate(args[2:], 4)}
        grads, extra = reduce_all(
            self._backend,
            "DistributedOptimizer.update",
            grads,
            {**by_position, **kwargs},
            self._op,
            weight=weight,
            facts=facts,
        )
        return self.inner.update(grads, *args, **{name: extra[name] for name in kwargs})

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not yet there while being unpickled or copied
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)

    def __repr__(self) -> str:
        return f"DistributedTransformation({self.inner!r})"
