"""Collectives over lists of arrays, several per rank: through an NCCL clique, or staged through the host."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from samestep import _core, arrays
from samestep._util.deadline import Deadline
from samestep.arrays import ArrayInfo, overlaps
from samestep.errors import InvalidArgumentError
from samestep.multidevice import host_path as host
from samestep.multidevice import nccl_path as devices
from samestep.multidevice.host_path import ArrayList
from samestep.reduce_ops import resolve

if TYPE_CHECKING:
    from samestep.group.group import Group


class PendingResult(NamedTuple):
    """A pending operation, and the function that returns the result when it has ended."""

    work: _core.Work
    finish: Callable[[], Any]
    deadline: Deadline
    """The timeout of a blocking call."""


# ---- what a list is


def checked(given: Any, act: str, name: str = "arrays") -> ArrayList:
    """A user's list.

    Raises:
      TypeError: no list or tuple, or an entry that is not an array.
      InvalidArgumentError: it is empty, or entries differ in dtype or count.
      UnavailableError: the stream of an array is being captured into a graph.
    """
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{act}: {name} must be a list or tuple of arrays, got {type(given).__name__}")
    if not given:
        raise InvalidArgumentError(f"{act}: {name} must have at least one array")
    for i, x in enumerate(given):
        if not arrays.is_array(x):
            raise TypeError(f"{act}: {name}[{i}] must be an array, got {type(x).__name__}")
    listed = ArrayList(act, list(given), [arrays.info(x, act) for x in given])
    for i, known in enumerate(listed.infos):
        if (known.dtype, math.prod(known.shape)) != (listed.dtype, listed.n_elements):
            raise InvalidArgumentError(
                f"{act}: {name}[{i}] has {math.prod(known.shape)} elements of {known.dtype}, "
                f"but {listed.n_elements} of {listed.dtype} are needed"
            )
        if known.device != "cpu":
            _core.refuse_capture(listed.arrays[i], act)
    return listed


def require_apart(listed: ArrayList, name: str = "arrays") -> None:
    """Check that all arrays of a list can be written. One that is listed twice gets the same elements twice.

    Raises:
      InvalidArgumentError: two arrays in host memory share some elements.
    """
    if (
        len(listed.arrays) < 2
        or not listed.n_elements
        or any(known.device != "cpu" for known in listed.infos)
    ):
        return
    places = [overlaps.place(i, x) for i, x in enumerate(listed.arrays)]
    found = overlaps.find_clash(list({(p.address, p.strides): p for p in places if p.written}.values()))
    if found is not None:
        one, other = (f"{name}[{i}]" for i in found)
        raise InvalidArgumentError(
            f"{listed.act}: {one} and {other} share memory without being one array; pass a copy of one"
        )


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


def outputs(group: Group, listed: ArrayList, outs: Sequence[Any] | None) -> list[list[Any]]:
    """For each array of a list one to receive everybody's: those given, or new ones. Raises as `checked`."""
    n = group.size * len(listed.arrays)
    if outs is None:
        return [
            [arrays.new_like(x, (n, *known.shape))]
            for x, known in zip(listed.arrays, listed.infos, strict=True)
        ]
    given = checked(outs, listed.act, "outs")
    if (len(given.arrays), given.dtype, given.n_elements) != (
        len(listed.arrays),
        listed.dtype,
        n * listed.n_elements,
    ):
        raise InvalidArgumentError(
            f"{listed.act}: outs must be {len(listed.arrays)} arrays of {n * listed.n_elements} {listed.dtype}, got "
            f"{len(given.arrays)} of {given.n_elements} {given.dtype}"
        )
    require_apart(given, "outs")
    if not all(known.writable for known in given.infos):
        raise InvalidArgumentError(f"{listed.act}: an array of outs cannot be written")
    return [[out] for out in given.arrays]


# ---- operations


def allreduce(group: Group, listed: ArrayList, op: Any, timeout: float | None = None) -> PendingResult:
    """Reduces over all arrays; the result is the list of all of them, new ones for those that cannot be written."""
    code, factor = resolve(op, listed.act)
    deadline = Deadline(group._timeout if timeout is None else timeout)
    clique_id = devices.clique_id(group, listed, "allreduce", deadline, code=code)
    if clique_id != devices.VIA_HOST:
        into = targets(listed.arrays, listed.infos)
        work = _core.allreduce_list(group._comm, clique_id, listed.arrays, into, code, factor)
        return PendingResult(work, lambda: results(listed.arrays, into), deadline)
    _await_streams(group, listed, deadline)
    how = host.Combination(listed, code, factor, group.size)
    rows = how.combined(group)
    work = host.started(group, listed, "allreduce", rows, rows, code=code)
    return PendingResult(
        work, lambda: _filled(group, functools.partial(how.store, rows), listed, None, deadline), deadline
    )


def reduce(  # noqa: PLR0917
    group: Group, listed: ArrayList, op: Any, root: int, root_array: int, timeout: float | None = None
) -> PendingResult:
    """Reduces over all arrays into one of root's; the result is the list of all of this rank's."""
    code, factor = resolve(op, listed.act)
    deadline = Deadline(group._timeout if timeout is None else timeout)
    clique_id = devices.clique_id(
        group, listed, "reduce", deadline, code=code, root=root, root_array=root_array
    )
    at_root = group.rank == root
    written = {root_array} if at_root else set[int]()
    if clique_id != devices.VIA_HOST:
        into = targets(listed.arrays, listed.infos, written)
        out = into[root_array] if at_root else None
        work = _core.reduce_list(group._comm, clique_id, listed.arrays, out, code, factor, root, root_array)
        return PendingResult(work, lambda: results(listed.arrays, into), deadline)
    _await_streams(group, listed, deadline)
    how = host.Combination(listed, code, factor, group.size)
    rows = how.combined(group)
    work = host.started(group, listed, "reduce", rows, rows, code=code, root=root, root_array=root_array)
    return PendingResult(
        work, lambda: _filled(group, functools.partial(how.store, rows), listed, written, deadline), deadline
    )


def bcast(
    group: Group, listed: ArrayList, root: int, root_array: int, timeout: float | None = None
) -> PendingResult:
    """Gives all arrays the elements of one of root's; the result is the list of all of this rank's."""
    deadline = Deadline(group._timeout if timeout is None else timeout)
    clique_id = devices.clique_id(group, listed, "bcast", deadline, root=root, root_array=root_array)
    sent = {root_array} if group.rank == root else set[int]()
    written = set(range(len(listed.arrays))) - sent
    if clique_id != devices.VIA_HOST:
        into = targets(listed.arrays, listed.infos, written)
        work = _core.bcast_list(group._comm, clique_id, into, root, root_array)
        return PendingResult(work, lambda: results(listed.arrays, into), deadline)
    run = host.shared_memory(group, (listed.infos[0].nbytes,))
    if sent:
        _await_streams(group, listed, deadline)
        _core.pack([listed.arrays[root_array]], run)
    work = host.started(group, listed, "bcast", run, run, root=root, root_array=root_array)

    def store(into: list[Any]) -> None:
        for x in into:
            _core.unpack(run, [x])

    return PendingResult(work, lambda: _filled(group, store, listed, written, deadline), deadline)


def allgather(
    group: Group, listed: ArrayList, receives: list[list[Any]], timeout: float | None = None
) -> PendingResult:
    """Gathers all arrays.

    Args:
      group: the ranks.
      listed: this rank's arrays.
      receives: for each array of the list, where it is, what everybody's are received into: one writable array, or
        one for each of all ranks' arrays.
      timeout: seconds for all steps of the call; None: the group's.

    Returns:
      Its result is `receives`, each list of one array as that array.
    """
    n = group.size * len(listed.arrays)
    deadline = Deadline(group._timeout if timeout is None else timeout)
    clique_id = devices.clique_id(group, listed, "allgather", deadline, also=receives)

    def finished() -> list[Any]:
        return [
            arrays.to_library_of(x, pieces[0]) if len(pieces) == 1 else pieces
            for x, pieces in zip(listed.arrays, receives, strict=True)
        ]

    if clique_id != devices.VIA_HOST:
        work = _core.allgather_list(group._comm, clique_id, listed.arrays, receives)
        return PendingResult(work, finished, deadline)
    # Bytes on all ranks, whatever their arrays are: the plan of an operation depends on its dtype.
    run = host.shared_memory(group, (n * listed.infos[0].nbytes,))
    joined = host.shared_memory(group, (len(listed.arrays) * listed.infos[0].nbytes,))
    _await_streams(group, listed, deadline)
    _core.pack(listed.arrays, joined)
    work = host.started(group, listed, "allgather", joined, run)

    def finish() -> list[Any]:
        for pieces in receives:
            _await_copies_back(group, listed, pieces, deadline)
            _core.unpack(run, pieces)
            for piece in pieces:
                _core.bump_version(piece)
        return finished()

    return PendingResult(work, finish, deadline)


def _await_streams(group: Group, listed: ArrayList, deadline: Deadline) -> None:
    """Before a copy to the host, which has no deadline."""
    on_device = [x for x, known in zip(listed.arrays, listed.infos, strict=True) if known.device != "cpu"]
    group._await_streams(on_device, deadline.left())


def _await_copies_back(group: Group, listed: ArrayList, targets: Sequence[Any], deadline: Deadline) -> None:
    """Before copies from the host. A call that has not waited until now gets the time of the group."""
    on_device = [x for x in targets if arrays.info(x).device != "cpu"]
    left = deadline.left()
    with called(listed):
        group._await_streams(on_device, left if left > 0 else None)


def _filled(
    group: Group,
    store: Callable[[list[Any]], None],
    listed: ArrayList,
    only: Container[int] | None,
    deadline: Deadline,
) -> list[Any]:
    """Stores a result in each array, or `only` in some."""
    into = targets(listed.arrays, listed.infos, only)
    written = [target for i, target in enumerate(into) if only is None or i in only]
    _await_copies_back(group, listed, written, deadline)
    store(written)
    for target in written:
        _core.bump_version(target)
    return results(listed.arrays, into)


# ---- arrays that receive


def targets(
    given: Sequence[Any], infos: Sequence[ArrayInfo], only: Container[int] | None = None
) -> list[Any]:
    """The arrays, with new ones in place of those that cannot be written, as far as they are to be: all, or `only`."""
    return [
        x if known.writable or (only is not None and i not in only) else arrays.new_like(x)
        for i, (x, known) in enumerate(zip(given, infos, strict=True))
    ]


def results(given: Sequence[Any], received: Sequence[Any]) -> list[Any]:
    """What was received into `targets(given)`."""
    return [
        x if target is x else arrays.to_library_of(x, target)
        for x, target in zip(given, received, strict=True)
    ]
