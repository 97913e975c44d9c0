"""Collectives with several arrays on each rank: one for each device, or host arrays.

A rank combines them in host memory before ranks communicate. All ranks give lists of the same length, else all raise
MismatchError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Sequence
from typing import Any

from samestep import _core, arrays, internal
from samestep._util.deadline import Deadline
from samestep.distributed import buffers, groups
from samestep.distributed import combination as host
from samestep.distributed.combination import ArrayList
from samestep.distributed.groups import WORLD, ReduceOp
from samestep.distributed.requests import started
from samestep.errors import InvalidArgumentError
from samestep.group.group import Group
from samestep.reduce_ops import Op, resolve
from samestep.trees.fusion import fused


def checked(given: Any, act: str, name: str, *, written: bool) -> ArrayList:
    """A user's list, whose arrays are `written`, or replaced if they cannot be.

    Raises:
      TypeError: no list or tuple, or an entry that is not an array.
      InvalidArgumentError: it is empty, or entries differ in dtype or count, or cannot be written or replaced.
      UnavailableError: the stream of an array is being captured into a graph.
    """
    if isinstance(given, (list, tuple)) and not given:
        raise InvalidArgumentError(f"{act}: {name} must have at least one array")
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{act}: {name} must be a list or tuple of arrays, got {type(given).__name__}")
    like = buffers.described(given[0], act, f"{name}[0]")
    infos = buffers.listed(given, len(given), like, act, name, written=written)
    for x, known in zip(given, infos, strict=True):
        if known.device != "cpu":
            _core.refuse_capture(x, act)
    return ArrayList(act, given, infos)


def called(listed: ArrayList) -> _core.UserCall:
    """For texts of errors of what is started meanwhile."""
    n = len(listed.arrays)
    return _core.UserCall(f"{listed.act} of {n} array{'s' * (n > 1)} of {listed.dtype}[{listed.n_elements}]")


def require_index(value: int, listed: ArrayList, name: str) -> None:
    """Raises InvalidArgumentError unless `value` is the index of an array of the list."""
    if not 0 <= value < len(listed.arrays):
        raise InvalidArgumentError(
            f"{listed.act}: {name} {value} is outside the list of {len(listed.arrays)} arrays"
        )


def reduce(
    group: Group, listed: ArrayList, op: Any, root: int = -1, root_array: int = 0, *, async_op: bool
) -> Any:
    """Reduces over all arrays into all of them, or into one of `root`. Returns what `started` does, as all below."""
    code, factor = resolve(op, listed.act)
    deadline = Deadline(group.timeout)
    _await_streams(group, listed, listed.arrays, deadline.left())
    how = host.Combination(listed, code, factor, group.size)
    rows = how.combined(group)
    verb, written = "allreduce", None
    if root >= 0:
        verb, written = "reduce", range(root_array, root_array + (group.rank == root))
    work = host.started(group, listed, verb, rows, rows, code=code, root=root, root_array=root_array)
    result = functools.partial(how.result, rows)
    return started(
        group,
        work,
        lambda: _store(group, listed, result, written, deadline),
        async_op,
        deadline,
        writes=listed.arrays,
    )


def reduced_at_once(group: Group, given: Any, op: Any, act: str) -> bool:
    """Reduces over all arrays into all of them, if the core takes them as they lie. Whether it has."""
    fast = _core.fast_tree(given) if isinstance(given, (list, tuple)) and given else None
    if fast is None or not arrays.is_array(given[0]):
        return False
    with called(ArrayList(act, given, [arrays.info(given[0])])):
        return fused(group).allreduce_list(fast, *resolve(op, act), group.timeout)


def bcast(group: Group, listed: ArrayList, root: int, root_array: int, *, async_op: bool) -> Any:
    """Gives all arrays the elements of one of root's."""
    deadline = Deadline(group.timeout)
    written = set(range(len(listed.arrays)))
    run = host.shared_memory(group, (listed.infos[0].nbytes,))
    if group.rank == root:
        written -= {root_array}
        _await_streams(group, listed, listed.arrays, deadline.left())
        _core.pack([listed.arrays[root_array]], run)
    work = host.started(group, listed, "bcast", run, run, root=root, root_array=root_array)
    return started(
        group,
        work,
        lambda: _store(group, listed, lambda: run, written, deadline),
        async_op,
        deadline,
        writes=listed.arrays,
    )


def allgather(group: Group, listed: ArrayList, receives: Sequence[ArrayList], *, async_op: bool) -> Any:
    """Gathers all arrays in each list of `receives`."""
    n = len(listed.arrays)
    deadline = Deadline(group.timeout)
    # Bytes on all ranks, whatever their arrays are: the plan of an operation depends on its dtype.
    run = host.shared_memory(group, (group.size * n * listed.infos[0].nbytes,))
    joined = host.shared_memory(group, (n * listed.infos[0].nbytes,))
    _await_streams(group, listed, listed.arrays, deadline.left())
    _core.pack(listed.arrays, joined)
    work = host.started(group, listed, "allgather", joined, run)

    def finish() -> None:
        for into in receives:
            _store(group, listed, lambda: run, None, deadline, receives=into)

    targets = [x for into in receives for x in into.arrays]
    return started(group, work, finish, async_op, deadline, writes=targets)


def _await_streams(group: Group, listed: ArrayList, given: Sequence[Any], left: float | None) -> None:
    """Before a copy, which has no deadline; None: that of the group."""
    with called(listed):
        internal.await_streams(group, [x for x in given if arrays.info(x).device != "cpu"], left)


def _store(
    group: Group,
    listed: ArrayList,
    result: Callable[[], Any],
    written: Container[int] | None,
    deadline: Deadline,
    *,
    receives: ArrayList | None = None,
) -> None:
    """Stores a result in the arrays of a list, or some; those that cannot be written are replaced by new ones.

    The list is that of the call, each of whose arrays gets all of it, or `receives`, among whose it is divided.
    """
    given, known = (receives or listed)[1:]
    which = [i for i in range(len(known)) if written is None or i in written]
    into = arrays.targets([given[i] for i in which], [known[i] for i in which])
    left = deadline.left()  # a call that has not waited until now gets the time of the group
    _await_streams(group, listed, into, left if left > 0 else None)
    run = result()
    for part in [[x] for x in into] if receives is None else [into]:
        _core.unpack(run, part)
    arrays.deliver(given, known, which, into)


def broadcast_multigpu(
    tensor_list: Sequence[Any],
    src: int | None = None,
    group: Any = WORLD,
    async_op: bool = False,
    src_tensor: int = 0,
    *,
    group_src: int | None = None,
) -> Any:
    """Give all arrays of all ranks the elements of `tensor_list[src_tensor]` of rank `src`."""
    verb = "broadcast_multigpu"
    of = groups.resolve(group)
    if of is None:
        return None
    listed = checked(tensor_list, verb, "tensor_list", written=True)
    root = groups.rank_in(of, verb, "src", src, group_src)
    index = groups.whole_number(src_tensor, verb, "src_tensor")
    require_index(index, listed, "src_tensor")
    with called(listed):
        return bcast(of, listed, root, index, async_op=async_op)


def all_reduce_multigpu(
    tensor_list: Sequence[Any], op: Op = ReduceOp.SUM, group: Any = WORLD, async_op: bool = False
) -> Any:
    """Reduce over all arrays of all ranks; all of them get the result.

    Example:
      >>> import numpy as np, samestep.distributed as dist
      >>> dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
      >>> tensors = [np.ones(1) for _ in range(8)]
      >>> dist.all_reduce_multigpu(tensors)
      >>> float(sum(tensors)[0])
      64.0
      >>> dist.destroy_process_group()
    """
    of = groups.resolve(group)
    if of is None:
        return None
    if not async_op and reduced_at_once(of, tensor_list, op, "all_reduce_multigpu"):
        return None
    listed = checked(tensor_list, "all_reduce_multigpu", "tensor_list", written=True)
    with called(listed):
        return reduce(of, listed, op, async_op=async_op)


def reduce_multigpu(  # noqa: PLR0917 - positions that scripts rely on
    tensor_list: Sequence[Any],
    dst: int | None = None,
    op: Op = ReduceOp.SUM,
    group: Any = WORLD,
    async_op: bool = False,
    dst_tensor: int = 0,
    *,
    group_dst: int | None = None,
) -> Any:
    """Reduce over all arrays of all ranks; `tensor_list[dst_tensor]` of rank `dst` gets the result."""
    verb = "reduce_multigpu"
    of = groups.resolve(group)
    if of is None:
        return None
    listed = checked(tensor_list, verb, "tensor_list", written=True)
    root = groups.rank_in(of, verb, "dst", dst, group_dst)
    index = groups.whole_number(dst_tensor, verb, "dst_tensor")
    require_index(index, listed, "dst_tensor")
    with called(listed):
        return reduce(of, listed, op, root, index, async_op=async_op)


def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[Any]],
    input_tensor_list: Sequence[Any],
    group: Any = WORLD,
    async_op: bool = False,
) -> Any:
    """Gather all arrays of all ranks into every list.

    Args:
      output_tensor_lists: as many lists as there are inputs, each on its input's device; input j of rank k arrives
        in each at `k * len(input_tensor_list) + j`.
      input_tensor_list: this rank's arrays.
      group: `group.WORLD` or what `new_group` returned.
      async_op: return a `Request` at once.
    """
    verb = "all_gather_multigpu"
    of = groups.resolve(group)
    if of is None:
        return None
    listed = checked(input_tensor_list, verb, "input_tensor_list", written=False)
    n = len(listed.arrays)
    if not isinstance(output_tensor_lists, (list, tuple)):
        kind = type(output_tensor_lists).__name__
        raise TypeError(f"{verb}: output_tensor_lists must be a list of lists, got {kind}")
    if len(output_tensor_lists) != n:
        raise InvalidArgumentError(
            f"{verb}: output_tensor_lists must have {n} lists, as there are inputs, got {len(output_tensor_lists)}"
        )
    receives = []
    for i, tensors in enumerate(output_tensor_lists):
        name = f"output_tensor_lists[{i}]"
        infos = buffers.listed(tensors, of.size * n, listed.infos[0], verb, name, written=True)
        receives.append(ArrayList(verb, tensors, infos))
    with called(listed):
        return allgather(of, listed, receives, async_op=async_op)
