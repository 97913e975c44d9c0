"""Optimizers that average gradients over all ranks before they use them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from samestep.optimizer import gradient_transformation
from samestep.reduce_ops import ReduceOp

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from samestep.backend import Backend

__all__ = ["DistributedOptimizer", "no_sync"]


def DistributedOptimizer(backend: Backend, opt: Any, *, op: Any = ReduceOp.AVG) -> Any:
    """Make `opt` use the mean of all ranks' gradients.

    An update then equals that of one process on the joined batch. What comes back is used as `opt` was.

    * An optax `GradientTransformation`, or any other object with `init(params)` and `update(grads, state,
      ...)`: the same kind of object with the same state, whose `update` averages first. It works under
      `jax.jit`.
    * A torch `Optimizer`: that very object. Gradients are averaged at the end of every `backward()`, so
      that clipping, schedulers, closures and gradient scalers see what one process would see. Collective:
      all ranks wrap together, and the parameters are compared. See `no_sync` for accumulating gradients.

    Args:
      backend: the group whose ranks train together.
      opt: the optimizer.
      op: how gradients are combined. SUM leaves the division to you (FluxMPI since 0.5): with loss / ranks
        as loss it equals AVG.

    Raises:
      TypeError: `opt` is no optimizer of a known kind.
      MismatchError: torch only, on all ranks: they hold other parameters. Names the first that differs.

    Example:
      >>> from collections.abc import Callable
      >>> from typing import NamedTuple
      >>> import numpy as np, samestep as ss
      >>> class SGD(NamedTuple):
      ...     init: Callable = lambda params: ()
      ...     update: Callable = lambda grads, state, params=None: ([-0.1 * g for g in grads], state)
      >>> opt = ss.DistributedOptimizer(ss.initialize(), SGD())
      >>> opt.update([np.ones(2)], opt.init(None))
      ([array([-0.1, -0.1])], ())
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(opt, torch.optim.Optimizer):
        from samestep.optimizer import torch_optimizer

        return torch_optimizer.distribute(backend, opt, op)
    is_pair = callable(getattr(opt, "init", None)) and callable(getattr(opt, "update", None))
    if is_pair and not isinstance(opt, type):
        return gradient_transformation.distribute(backend, opt, op)
    raise TypeError(
        f"DistributedOptimizer: {opt!r} is neither a torch Optimizer nor an object with "
        "init(params) and update(grads, state, params); or average by hand: allreduce_gradients(backend, g)"
    )


def no_sync(opt: Any) -> AbstractContextManager[None]:
    """Within this context `backward()` adds up gradients on this rank alone; the next one outside averages.

    Args:
      opt: a torch optimizer that went through `DistributedOptimizer`.

    Raises:
      InvalidArgumentError: `opt` is no such optimizer. (With optax, accumulate with `optax.MultiSteps`
        around it.)

    Example:
      >>> for i, batch in enumerate(batches):  # doctest: +SKIP
      ...     with nullcontext() if i % 4 == 3 else no_sync(opt):
      ...         loss(model(batch)).backward()
    """
    from samestep.optimizer import torch_optimizer

    return torch_optimizer.no_sync(opt)
