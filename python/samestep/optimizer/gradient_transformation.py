"""Optimizers with init(params) -> state and update(grads, state, ...) -> (updates, state): as in optax."""

from __future__ import annotations

from typing import Any

from samestep.group.group import Group
from samestep.optimizer.extra_arguments import KEPT, reduce_all
from samestep.optimizer.state_facts import StateFacts
from samestep.step.state_hash import Verifier
from samestep.trees.facts import NO_FACTS


def distribute(backend: Group, opt: Any, op: Any) -> Any:
    """Return `opt` with an `update` that first reduces its first argument over all ranks.

    A named tuple, as optax has, comes back as the same type, so that `isinstance` tests, `optax.chain` and
    checkpoints see no difference. Another object comes back as a `DistributedTransformation`.
    """
    if not (isinstance(opt, tuple) and hasattr(opt, "_replace")):
        return DistributedTransformation(backend, opt, op)
    wrapped = DistributedTransformation(backend, opt, op)

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
