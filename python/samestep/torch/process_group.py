"""The process group that torch.distributed gets for the backend "samestep"."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook

from samestep import _core, internal
from samestep.errors import InvalidArgumentError
from samestep.step.state_hash import Verifier, verify_interval
from samestep.torch import verbs
from samestep.torch.devices import DeviceHalves
from samestep.torch.errors import for_torch
from samestep.torch.meetings import Meetings, open_group
from samestep.torch.shutdown import GroupShutdown

_installed: list[Any] = []
_verifiers: weakref.WeakKeyDictionary[Any, Verifier] = weakref.WeakKeyDictionary()


def install() -> None:
    """Compare parameters from now on, if `SAMESTEP_VERIFY` asks for it. Idempotent."""
    if verify_interval() and not _installed:
        _installed.append(register_module_forward_pre_hook(_before_forward))


def _before_forward(module: Any, _: Any) -> None:
    if not isinstance(module, torch.nn.parallel.DistributedDataParallel):
        return
    joins = getattr(
        getattr(module, "_join_config", None), "enable", False
    )  # then ranks run out of batches one after another
    if joins or not (module.training and torch.is_grad_enabled() and module.require_backward_grad_sync):
        return
    if module not in _verifiers:
        backend = _backend_of(module.process_group)
        verifier = None if backend is None else Verifier.wanted(backend, "DistributedDataParallel")
        if verifier is None:
            return
        _verifiers[module] = verifier
    _verifiers[module].before_step(dict(module.module.named_parameters()))


def _backend_of(group: Any) -> Any:
    """The group of samestep behind a process group of torch; None if that is another backend's."""
    if hasattr(group, "_backend"):
        return group._backend
    try:
        return getattr(group._get_backend(torch.device("cpu")), "_backend", None)
    except RuntimeError:  # no backend for the host
        return None


def create(options: Any, backend_options: Any = None) -> Any:
    """Called by torch for `init_process_group("samestep")` and `new_group`. Collective over the members.

    `options`: `torch._C._distributed_c10d._DistributedBackendOptions`.
    """
    if backend_options is not None:
        raise InvalidArgumentError("the backend 'samestep' takes no pg_options; leave them out")
    return ProcessGroup(options)


class ProcessGroup(verbs.Verbs, dist.ProcessGroup):
    """A torch.distributed group over the transports of samestep. What is on a GPU it hands to a group of NCCL.

    Made by `init_process_group("samestep")` and `new_group`; takes the place of torch's own object, in every version of
    torch: what a `Backend` written in Python returns has lost `is_completed` and the sender of a message. So what
    serves devices is a group of its own, see `DeviceHalves`.

    Args:
      options: as `create` gets them.
      name: in error texts; "" = that of torch's group.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False
    supports_abort_hooks = False
    supports_completion_hooks = False

    def __init__(self, options: Any, *, name: str = "") -> None:
        super().__init__(options.group_rank, options.group_size)
        self._name, self._desc = str(options.group_id), "undefined"
        members = list(options.global_ranks_in_group)
        name = name or (f"{options.group_id}, ranks {members}" if members else "world")
        self._store = options.store
        self._timeout = float(options.timeout.total_seconds())
        self._n_collectives = 0
        self._meetings = Meetings()  # if this is the world
        try:
            meetings = getattr(dist.group.WORLD, "_meetings", None) if members else self._meetings
            self._backend = open_group(options, name, meetings)
        except Exception as error:
            raise for_torch(error) from None
        self._comm = internal.communicator(self._backend)
        self._devices = DeviceHalves(self, members)
        self._prepare_calls()
        self._lifetime = GroupShutdown(self._backend)
        install()

    def _prepare_calls(self) -> None:
        # What does not fit the fast path is left to the verbs.
        self._all_reduce_now = _core.fast_call("allreduce", self._comm, self._timeout)
        self._all_gather_now = _core.fast_call("allgather", self._comm, self._timeout)

    def getBackendName(self) -> str:
        return "samestep"

    def getRank(self) -> int:
        return self._comm.rank

    def getSize(self) -> int:
        return self._comm.size

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._n_collectives

    def set_timeout(self, timeout: timedelta) -> None:
        """Of operations started from now on."""
        self._timeout = timeout.total_seconds()
        self._prepare_calls()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Ends the group, see `GroupShutdown.end`. Idempotent."""
        self._devices.close()
        self._lifetime.end()

    def abort(self) -> None:
        """This rank leaves immediately. Pending operations fail on it, and on ranks that wait for it."""
        for half in self._devices.made.values():
            half.abort()
        self._lifetime.leave("it called abort")

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:
        return self._desc

    # torch 2.4 does not ask for these by the functions above.
    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        others = self._devices.backends()
        # Empty while torch makes the group: torch 2.15 then attaches no recorder, which needs a backend in C++.
        return [] if others is None else [torch.device("cpu"), *map(torch.device, others)]

    def _get_backend_name(self) -> str:
        """What torch's sharded tensors ask for, to know whether a shard that is elsewhere is on the host."""
        return "gloo"

    def _get_backend(self, device: Any) -> Any:
        half = self._devices.half_for(device)
        return _HostBackend(self) if half is None else half._get_backend(device)

    get_backend = _get_backend

    def _start_coalescing(self, device: Any) -> None:
        self._required_half(device)._start_coalescing(device)

    def _end_coalescing(self, device: Any) -> Any:
        return self._required_half(device)._end_coalescing(device)

    def _required_half(self, device: Any) -> Any:
        half = self._devices.half_for(device)
        if half is None:
            raise NotImplementedError(
                "the backend 'samestep' has no coalescing of operations on host tensors"
            )
        return half

    def get_group_store(self) -> Any:
        return self._store

    def supports_tensor_alloc(self, _: Any) -> bool:
        return False

    def __repr__(self) -> str:
        place = f"rank {self._comm.rank} of {self._comm.size}"
        return f"<samestep.torch.{type(self).__name__} {self._comm.name!r}: {place}>"


class _HostBackend:
    """The group for the functions of torch that ask for the class of gloo, as the one that sets timeouts does."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return getattr(dist, "ProcessGroupGloo", type(self))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"the backend 'samestep' does not support {name}")

    return refuse


for _name in (
    *("get_reconfigure_handle", "reconfigure", "new_window", "shrink", "split_group", "merge_remote_group"),
    *("register_abort_hook", "unregister_abort_hook", "register_pre_hook", "unregister_pre_hook"),
    *("register_post_hook", "unregister_post_hook", "allocate_tensor"),
    *("_enable_collectives_timing", "_wait_for_pending_works"),
):  # torch's own ask for a backend in C++, and some end the process
    setattr(ProcessGroup, _name, _refuse(_name))
