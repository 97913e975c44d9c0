"""Optimizers that average gradients over all ranks, and may divide their state among the ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

from samestep._util.loaded import is_a
from samestep.errors import InvalidArgumentError
from samestep.group.backend_argument import takes_backend
from samestep.group.group import Group
from samestep.optimizer import extra_arguments
from samestep.optimizer.extra_arguments import averaged
from samestep.reduce_ops import Op, ReduceOp, is_mean, resolve

__all__ = ["DistributedOptimizer", "ShardedOptimizer", "averaged", "gather_state", "no_sync", "shard_state"]

_Opt = TypeVar("_Opt")


@takes_backend
def DistributedOptimizer(
    backend: Group,
    opt: _Opt,
    *,
    op: Op = ReduceOp.AVG,
    shards: int | None = None,
    weighted: bool = False,
) -> _Opt:
    """Make `opt` use the mean of all ranks' gradients.

    An update then equals that of one process on the joined batch. What comes back is used as `opt` was.

    * An optax `GradientTransformation`, or any other object with `init(params)` and `update(grads, state,
      ...)`: the same kind of object with the same state, whose `update` averages first. It works under
      `jax.jit`. `update(grads, state, params, weight=n)` takes the weighted mean, see `allreduce_tree`. Of further
      arguments by keyword, `value` and `grad` are averaged like the gradients, and `value_fn` becomes its mean over all
      ranks (`averaged`; without `weight` and with `op` AVG). Others are passed on if they are equal on all ranks, and
      refused otherwise; functions by other names must go through `averaged`.
    * A torch `Optimizer`: that very object. Gradients are averaged at the end of every `backward()`, so
      that clipping, schedulers, closures and gradient scalers see what one process would see. Collective:
      all ranks wrap together, and the parameters are compared. See `no_sync` for accumulating gradients. Those of
      parameters that the optimizer does not have stay as on each rank.

    Args:
      backend: the group whose ranks train together.
      opt: the optimizer.
      op: how gradients are combined. SUM leaves the division to you (FluxMPI since 0.5): with loss / ranks
        as loss it equals AVG.
      shards: torch only: the number of shards of a step. Gradients are then computed by shard,
        `with opt.shard(index, weight=n): loss.backward()`, and averaged in `step()`, or before it by
        `opt.average()`, with the same bits on any number of ranks; see `Accumulator`.
      weighted: torch only: the same for any number of micro-batches of each rank, `with opt.shard(weight=n): ...`: the
        exact mean over all items, with bits that depend on who had which.

    Raises:
      InvalidArgumentError: an unknown `op`; `shards` or `weighted` with another `op`, or for an optimizer that is not
        torch's; torch only: a parameter that cannot be sent. Names it.
      UnavailableError: torch only, from `backward(create_graph=True)`, because mean gradients carry no graph; and from
        `step()` after a `backward()` that raised or ran as compiled autograd.
      TypeError: `opt` is no optimizer of a known kind.
      MismatchError: torch only, on all ranks: they hold other parameters; or, from `step()`, gradients that no
        `backward()` has averaged differ. Names the first that differs.

    `update` raises on all ranks a `MismatchError` that names an argument that differs, and an `InvalidArgumentError`
    that names a function or what cannot be compared.

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
    resolve(op, "DistributedOptimizer")
    if is_a(opt, "torch.optim", "Optimizer"):
        from samestep.optimizer import torch_optimizer, torch_shards

        if shards is None and not weighted:
            return cast("_Opt", torch_optimizer.distribute(backend, opt, op))
        _require_mean(op)
        return cast("_Opt", torch_shards.distribute(backend, opt, shards))
    if shards is not None or weighted:
        raise InvalidArgumentError(
            "DistributedOptimizer: shards and weighted are for torch optimizers; elsewhere add the gradients to an "
            "Accumulator and pass its mean to the optimizer itself"
        )
    if _is_pair(opt):
        return cast("_Opt", extra_arguments.distribute(backend, opt, op))
    raise TypeError(
        f"DistributedOptimizer: {opt!r} is neither a torch Optimizer nor an object with "
        "init(params) and update(grads, state, params); or average by hand: allreduce_gradients(backend, g)"
    )


def _is_pair(opt: Any) -> bool:
    pair = getattr(opt, "init", None), getattr(opt, "update", None)
    return all(map(callable, pair)) and not isinstance(opt, type)


def _require_mean(op: Op) -> None:
    if not is_mean(op):
        raise InvalidArgumentError("optimizers: shards and weighted are for op AVG")


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


@takes_backend
def ShardedOptimizer(
    backend: Group,
    opt: _Opt,
    *,
    op: Op | None = ReduceOp.AVG,
    shards: int | None = None,
    elementwise: bool = False,
    copies: int = 1,
) -> _Opt:
    """As `DistributedOptimizer`, but each rank keeps and updates 1 / size of the optimizer's state.

    The first stage of ZeRO: gradients are reduce-scattered, each rank updates its part of the elements, and the
    results are allgathered. The updates have the bits of `DistributedOptimizer` where `opt` works element by element
    (SGD, momentum, Adam, AdamW, RMSprop, Lion, ...). Other optimizers are refused after a trial on a small problem,
    which compares the update of arrays with the updates of their two parts; `elementwise` skips it.

    Parts are contiguous: all leaves of one dtype one after another, cut into `size` equal runs of whole multiples of
    64 elements. The optimizer sees trees of the same structure; a leaf of shape (a, b) becomes one of shape (1, k),
    k >= 0.

    * An optax `GradientTransformation`, or any other object with `init(params)` and `update(grads, state, params)`:
      the same kind of object. `init` returns the state of this rank's part; `update` takes whole gradients and
      parameters, and returns whole updates. It works under `jax.jit`. `update(..., weight=n)` averages as
      `allreduce_tree` does, at the cost of an allreduce, and so does `update` with further arguments. They are treated
      as by `DistributedOptimizer`, but all functions are refused, and with `op=None` all must be equal. See
      `gather_state` and `shard_state` for checkpoints.
    * A torch `Optimizer`: that very object. Gradients are averaged in `step()`, or before it by `opt.average()`,
      e.g. to clip them; `backward()` communicates nothing. `state_dict()` is collective and returns what the unsharded
      optimizer would; `load_state_dict` takes that at any number of ranks. All ranks hold the same parameters before,
      in the same memory format (contiguous, channels_last); where that differs, `step()` raises `MismatchError`.

    Args:
      backend: the group whose ranks train together.
      opt: the optimizer.
      op: how gradients are combined; None where they are the same on all ranks already, e.g. the mean of an
        `Accumulator`. A difference of their bits is a MismatchError on all ranks (not compared for torch).
      shards: torch only: as for `DistributedOptimizer`, with its `opt.shard` and the bits of any number of ranks.
      elementwise: True says that `opt` works element by element, without a trial. If it does not, ranks stay equal but
        the updates are not those of the unsharded optimizer.
      copies: 2 keeps the part of each rank on the next rank as well, for a `TrainState`, which then goes on after a
        loss, unless a rank and the next one are lost at once.

    Raises:
      InvalidArgumentError: `init`, or here for torch: the trial shows that `opt` does not work element by element; or
        `shards` with another `op`, or for an optimizer that is not torch's.
      TypeError: `opt` is no optimizer of a known kind.

    Source: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models", SC'20,
    section 5.1.

    Example:
      >>> from collections.abc import Callable
      >>> from typing import NamedTuple
      >>> import numpy as np, samestep as ss
      >>> class Momentum(NamedTuple):
      ...     init: Callable = lambda params: {name: np.zeros_like(p) for name, p in params.items()}
      ...     update: Callable = lambda grads, v, params=None: (
      ...         {name: -0.1 * (0.9 * v[name] + g) for name, g in grads.items()},
      ...         {name: 0.9 * v[name] + g for name, g in grads.items()},
      ...     )
      >>> opt, params = ss.ShardedOptimizer(ss.initialize(), Momentum()), {"w": np.ones(2)}
      >>> state = opt.init(params)
      >>> updates, state = opt.update({"w": np.array([1.0, 2.0])}, state, params)
      >>> updates
      {'w': array([-0.1, -0.2])}
    """
    if op is not None and shards is not None:
        _require_mean(op)
    if copies not in (1, 2):
        raise InvalidArgumentError(f"ShardedOptimizer: copies must be 1 or 2, got {copies!r}")
    if is_a(opt, "torch.optim", "Optimizer"):
        from samestep.optimizer import torch_sharded

        made = torch_sharded.distribute(
            backend, opt, op, shards=shards, elementwise=elementwise, copies=copies
        )
        return cast("_Opt", made)
    if shards is not None:
        raise InvalidArgumentError(
            "ShardedOptimizer: shards is for torch optimizers; elsewhere add the gradients to an Accumulator, and pass "
            "its mean to ShardedOptimizer(..., op=None)"
        )
    if _is_pair(opt):
        from samestep.optimizer import sharded

        return cast("_Opt", sharded.distribute(backend, opt, op, elementwise=elementwise, copies=copies))
    raise TypeError(
        f"ShardedOptimizer: {opt!r} is neither a torch Optimizer nor an object with "
        "init(params) and update(grads, state, params)"
    )


def gather_state(opt: Any, state: Any, params: Any, *, root: int | None = None) -> Any:
    """The whole state from the parts of all ranks, as the unsharded optimizer has it. Collective.

    Args:
      opt: what `ShardedOptimizer` returned for an `init`/`update` pair. (torch: `opt.state_dict()`.)
      state: of this rank.
      params: the parameters.
      root: the rank that gets it; None for all ranks.

    Returns:
      A tree of new arrays of whole shapes; None on ranks that are not `root`.

    Raises:
      InvalidArgumentError: `state` is not one of `opt` for these parameters, or has arrays of other shapes.
    """
    from samestep.optimizer.sharded import sharded_of

    known = sharded_of(opt)
    return known.gather_state(state, known.plan_of(params), root)


def shard_state(opt: Any, state: Any, params: Any) -> Any:
    """This rank's part of a whole state, e.g. from a checkpoint of another number of ranks. No communication.

    Args:
      opt: what `ShardedOptimizer` returned for an `init`/`update` pair. (torch: `opt.load_state_dict(...)`.)
      state: whole, as from `gather_state` or the unsharded optimizer.
      params: the parameters.

    Raises:
      InvalidArgumentError: `state` is not one of `opt` for these parameters.
    """
    from samestep.optimizer.sharded import sharded_of

    known = sharded_of(opt)
    return known.shard_state(state, known.plan_of(params))
