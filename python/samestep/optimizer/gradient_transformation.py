"""Optimizers with init(params) -> state and update(grads, state, ...) -> (updates, state): as in optax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from samestep.step.gradients import allreduce_gradients
from samestep.step.state_hash import Verifier

if TYPE_CHECKING:
    from samestep.group.group import Group


def distribute(backend: Group, opt: Any, op: Any) -> Any:
    """Return `opt` with an `update` that first reduces its first argument over all ranks.

    A named tuple, as optax has, comes back as the same type, so that `isinstance` tests, `optax.chain` and
    checkpoints see no difference. Another object comes back as a `DistributedTransformation`.
    """
    if not (isinstance(opt, tuple) and hasattr(opt, "_replace")):
        return DistributedTransformation(backend, opt, op)
    inner = opt.update  # type: ignore[attr-defined]
    verifier = Verifier.wanted(backend, "DistributedOptimizer")

    def update(grads: Any, *args: Any, weight: float | None = None, **kwargs: Any) -> Any:
        if verifier is not None:
            verifier.before_step({"args": args, "kwargs": kwargs})
        return inner(allreduce_gradients(backend, grads, op, weight=weight), *args, **kwargs)

    return opt._replace(update=update)


class DistributedTransformation:
    """An optimizer object whose `update` averages first; all else, also assignment, is the inner's."""

    def __init__(self, backend: Group, inner: Any, op: Any) -> None:
        verifier = Verifier.wanted(backend, f"DistributedOptimizer({type(inner).__name__})")
        self.__dict__.update(_backend=backend, inner=inner, _op=op, _verifier=verifier)

    def update(self, grads: Any, *args: Any, weight: float | None = None, **kwargs: Any) -> Any:
        """The inner `update` with `grads` reduced over all ranks, each of which counts as `weight`. Collective."""
        if self._verifier is not None:
            self._verifier.before_step({"args": args, "kwargs": kwargs})
        return self.inner.update(
            allreduce_gradients(self._backend, grads, self._op, weight=weight), *args, **kwargs
        )

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not yet there while being unpickled or copied
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)

    def __repr__(self) -> str:
        return f"DistributedTransformation({self.inner!r})"
