"""Lists of arrays in device memory: which list of devices it is, and whether it has a clique of NCCL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from samestep import _core
from samestep.arrays import ArrayInfo
from samestep.errors import MismatchError
from samestep.lists_on_host import Listed
from samestep.reduce_ops import SUM
from samestep.work import Deadline

if TYPE_CHECKING:
    from samestep.verbs import CollectiveVerbs

THROUGH_HOST = 0
"""The number of no list of devices."""


def number(
    group: CollectiveVerbs,
    listed: Listed,
    verb: str,
    deadline: Deadline,
    *,
    code: int | None = None,
    root: int = 0,
    also: Sequence[Sequence[Any]] = (),
) -> int:
    """The number of the list of devices whose clique carries this call, or `THROUGH_HOST`.

    In a group with NCCL ranks meet here, unless each uses a list of devices that has a clique.
    """
    comm = group._comm
    if not _core.has_nccl(comm):
        return THROUGH_HOST
    places = _devices(listed, also) if code is None or _core.nccl_reduces(listed.dtype, code) else []
    known = _core.list_number(comm, places) if places else 0
    if known:
        return known
    # Those who know their list go on with an operation that is not this one, so that all are told.
    op = SUM.value if code is None else code
    try:
        _core.agree_on_lists(comm, verb, listed.dtype, op, root, 0, 0, 0, 0).wait(deadline.left(), True)
    except MismatchError as error:
        _core.lists_differ(comm, str(error))
        raise
    return _first_use(group, listed, places, deadline)


def _devices(listed: Listed, also: Sequence[Sequence[Any]]) -> list[int]:
    """The device of each array; empty where NCCL cannot take them, as several on one device.

    `also`: for each array others that must be where it is.
    """
    kinds = {known.device for known in listed.infos}
    if len(kinds) != 1 or "cpu" in kinds or not listed.n_elements:
        return []
    places = [device_of(x) for x in listed.arrays]
    together = all(device_of(y) == place for place, ys in zip(places, also, strict=False) for y in ys)
    return places if together and len(set(places)) == len(places) else []


def device_of(x: Any) -> int:
    """Index of the device that an array lies on, -1 for the host."""
    from samestep import devices

    view = _core.view_info(x)
    return -1 if view[6] == "cpu" else devices.current_gpu(view[6]).device_of(view[8])


def _first_use(group: CollectiveVerbs, listed: Listed, places: list[int], deadline: Deadline) -> int:
    """Gives the ranks' lists of devices their number and clique, where NCCL takes all of them together. Collective."""
    from samestep import devices
    from samestep.objects import exchange_objects

    comm = group._comm
    n_places = np.empty(group.size, np.int64)
    comm.all_gather(np.array([len(places)], np.int64), n_places).wait(deadline.left(), True)
    if not places or (n_places != len(places)).any():
        return THROUGH_HOST
    gpu = devices.current_gpu(listed.infos[0].device)
    host_name = group._hosts[group.rank]  # type: ignore[attr-defined]  # of Backend
    named = [f"{host_name} {gpu.bus_id(place)}" for place in places]
    table = exchange_objects(
        comm, devices.DeviceList(named, devices.sharing_is_allowed(gpu.kind)), deadline.left()
    )
    return _core.add_list(comm, places, deadline.left()) if devices.can_join(table) else THROUGH_HOST


@contextlib.contextmanager
def on_device_of(x: Any, known: ArrayInfo) -> Iterator[None]:
    """Makes the array's device the current one, where new arrays are made."""
    if known.device == "cpu" or known.nbytes == 0:
        yield
        return
    from samestep import devices

    gpu = devices.current_gpu(known.device)
    before = gpu.current_device()
    gpu.set_device(device_of(x))
    try:
        yield
    finally:
        gpu.set_device(before)
