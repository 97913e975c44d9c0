"""Lists of arrays in device memory: which list of devices it is, and whether it has an NCCL clique."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from samestep import _core, arrays
from samestep._util.deadline import Deadline
from samestep.errors import MismatchError
from samestep.multidevice.host_path import ArrayList
from samestep.reduce_ops import SUM

if TYPE_CHECKING:
    from samestep.group.group import Group

VIA_HOST = 0
"""Returned instead of a clique: the arrays are staged through the host."""


def clique_id(
    group: Group,
    listed: ArrayList,
    verb: str,
    deadline: Deadline,
    *,
    code: int | None = None,
    root: int = 0,
    root_array: int = 0,
    also: Sequence[Sequence[Any]] = (),
) -> int:
    """The number of the device list whose clique runs this call, or `VIA_HOST`.

    In a group with NCCL the ranks synchronize here, unless each uses a list of devices that has a clique.
    """
    comm = group._comm
    if not _core.has_nccl(comm):
        return VIA_HOST
    devices = _devices(listed, also) if code is None or _core.nccl_reduces(listed.dtype, code) else []
    known = _core.list_number(comm, devices) if devices else 0
    if known:
        return known
    # A rank that knows its list starts another operation instead, so a difference raises an error on all ranks.
    op = SUM.value if code is None else code
    try:
        length, count = len(listed.arrays), listed.n_elements
        check = _core.check_list_signature(
            comm, verb, listed.dtype, op, root, length, count, VIA_HOST, root_array
        )
        check.wait(deadline.left(), True)
    except MismatchError as error:
        _core.fail_list_check(comm, str(error))
        raise
    return _first_use(group, listed, devices, deadline)


def _devices(listed: ArrayList, also: Sequence[Sequence[Any]]) -> list[int]:
    """The device of each array; empty if NCCL cannot take them, e.g. several on one device.

    `also`: for each array others that must be where it is.
    """
    kinds = {known.device for known in listed.infos}
    if len(kinds) != 1 or "cpu" in kinds or not listed.n_elements:
        return []
    found = [arrays.device_of(x) for x in listed.arrays]
    devices = [device for device in found if device is not None]
    together = all(
        arrays.device_of(y) == device for device, ys in zip(devices, also, strict=False) for y in ys
    )
    return devices if together and len(set(devices)) == len(devices) else []


def _first_use(group: Group, listed: ArrayList, devices: list[int], deadline: Deadline) -> int:
    """Number the ranks' device lists and create their clique, if NCCL accepts all devices together. Collective."""
    from samestep._util.json_layout import Many
    from samestep.gpu import group as gpu_group
    from samestep.gpu import runtime
    from samestep.group import json_exchange

    comm = group._comm
    n_devices = np.empty(group.size, np.int64)
    comm.allgather(np.array([len(devices)], np.int64), n_devices).wait(deadline.left(), True)
    if not devices or (n_devices != len(devices)).any():
        return VIA_HOST
    gpu = runtime.current_gpu(listed.infos[0].device)
    host_name = group._hosts[group.rank]
    named = [gpu_group.identity_of(host_name, gpu.bus_id(device)) for device in devices]
    mine = (named, gpu_group.sharing_is_allowed(gpu.kind))
    received = json_exchange.allgather(comm, mine, [Many(str), bool], deadline.left())
    table = [gpu_group.DeviceList(*entry) for entry in received]
    return _core.add_list(comm, devices, deadline.left()) if gpu_group.can_join(table) else VIA_HOST
