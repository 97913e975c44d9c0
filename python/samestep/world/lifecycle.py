"""Start and end: the one world of the process."""

from __future__ import annotations

import atexit
import enum
import functools
import operator
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, Literal

from samestep import _core, _settings
from samestep._util import descriptors, launchers, silence, unknown_settings
from samestep._util.deadline import seconds
from samestep._util.text import error_line, warn
from samestep.arrays import numpy_memory
from samestep.backend import Backend
from samestep.errors import InvalidArgumentError, NotInitializedError, UnavailableError
from samestep.rendezvous.rendezvous import Rendezvous
from samestep.world import children, crash_report
from samestep.world.choice import Facts, check_claims, check_launch, choose
from samestep.world.making import CLASSES, gathered, regroup, until_met, world_over
from samestep.world.member import member

DEFAULT_TIMEOUT = 600.0  # seconds
DEFAULT_WARN_AFTER = 30.0  # seconds

BackendName = Literal["mpi", "nccl", "native"]


class Missing(enum.Enum):
    """The type of `missing`."""

    missing = "missing"

    def __repr__(self) -> str:
        return "samestep.missing"


missing = Missing.missing
"""For `cuda_devices=` and `amdgpu_devices=`: do not touch that kind of device."""

_Devices = Sequence[int] | Missing | None

_world: Backend | None = None
_world_of_torch: weakref.ref[Backend] | None = None  # that of `torch.distributed`, which ends it
_opening = threading.RLock()  # held by the thread that opens the world; the others get the same one
_arguments: dict[str, Any] = {}
_LOOK_S = 2.0  # longer than the death of a process takes to be found
_LOST_S = 4.0  # for MPI to end after a rank has died, so that survivors have ended within 5 s


def initialize(
    backend: type[Backend] | BackendName | None = None,
    *,
    cuda_devices: _Devices = None,
    amdgpu_devices: _Devices = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float | None = None,
    shared_arrays: bool = False,
) -> Backend:
    """Join the other ranks of the job, and return the backend that reaches them.

    Collective: every rank of the job calls it. A second call with the same arguments returns the same object.

    Args:
      backend: `MPIBackend`, `NCCLBackend` or `NativeBackend` (the class), or its name ("mpi", "nccl", "native").
        None: select it by the launcher: MPI under an MPI launcher, wrapped by NCCL if every rank has a GPU; a
        world of one rank without a launcher. `samestep doctor` shows the selection and its reason.
      cuda_devices: which CUDA device each rank uses. None: round robin over the visible devices by local
        rank (nothing without one); a list: the device for each local rank; `missing`: none is used.
      amdgpu_devices: the same for AMD devices.
      init_method: how ranks find each other; None or "mpi://" with MPI. With `NativeBackend` "env://",
        "tcp://host:port" of rank 0, or "file:///path"; None: "env://" if a launcher started several ranks.
      rank: the number of this rank, for one of these URLs; checked against the launcher's, if there is one.
      world_size: the number of ranks; likewise.
      timeout: seconds after which any operation ends with an error, > 0. None: `SAMESTEP_TIMEOUT`, else 600.
      shared_arrays: let NumPy allocate arrays of 64 KiB and more in memory shared by the ranks of the host, until
        `finalize()`. Affects only speed. Applies to this thread (and to copies of its context); has no effect
        in a world of one rank, for a rank alone on its host, or under `SAMESTEP_MPI_TRANSPORT=mpi`.

    Raises:
      InvalidArgumentError: wrong values, or other arguments than in an earlier call.
      UnavailableError: the backend or a device cannot be used, or the launcher belongs to another MPI library; the
        error says what was searched and names the cure.
      TypeError: an instance was passed instead of the class.

    Example:
      >>> import samestep as ss
      >>> backend = ss.initialize()
      >>> backend.rank, backend.size
      (0, 1)
    """
    global _world, _arguments
    requested = _name_of(backend)
    arguments = {
        "cuda_devices": _device_request(cuda_devices),
        "amdgpu_devices": _device_request(amdgpu_devices),
        "init_method": init_method,
        "rank": _whole("rank", rank),
        "world_size": _whole("world_size", world_size),
        "timeout": timeout,
        "shared_arrays": shared_arrays,
    }
    if (instead := children.stand_in(arguments)) is not None:
        return instead
    with _opening:
        world = _world  # read once: another thread may call finalize
        if world is not None and not world.closed:
            return _same_world(world, requested, arguments)
        with _core.UserCall("initialize"):
            world = _open(requested, arguments)
        _world, _arguments = world, arguments
        children.claim()
        if shared_arrays:
            _share_arrays(world)
        return world


def _share_arrays(world: Backend) -> None:
    try:
        world._call_at_end(numpy_memory.begin(world._comm, world.local_size))
    except BaseException as error:  # the others may not have it
        world._abandon(f"it ended with {error_line(error)}")
        raise


def _name_of(backend: Any) -> str:
    if backend is None:
        return ""
    if isinstance(backend, Backend):
        raise TypeError(
            f"initialize takes the class, not an instance: samestep.initialize(samestep.{type(backend).__name__})"
        )
    if isinstance(backend, type) and issubclass(backend, Backend) and backend.kind:
        return backend.kind
    if isinstance(backend, str):
        if backend.lower() in CLASSES:
            return backend.lower()
        raise InvalidArgumentError(
            f"initialize: there is no backend {backend!r}; there are {', '.join(map(repr, CLASSES))}"
        )
    raise TypeError(f"initialize: backend must be one of the classes or their names, got {backend!r}")


def _device_request(devices: _Devices) -> list[int] | str | None:
    if devices is None:
        return None
    if devices is missing:
        return "missing"
    try:
        return [operator.index(d) for d in devices]
    except TypeError:
        raise InvalidArgumentError(
            "initialize: devices must be None, samestep.missing or a list of ints, the device of each rank of a "
            f"host, got {devices!r}"
        ) from None


def _whole(what: str, given: Any) -> int | None:
    text = str(given).strip()  # the text "1" of a variable is accepted
    if given is not None and not (text.isascii() and text.isdigit()):
        raise InvalidArgumentError(f"initialize: {what} must be a whole number of at least 0, got {given!r}")
    return None if given is None else int(text)


def _same_world(world: Backend, requested: str, arguments: dict[str, Any]) -> Backend:
    differing = [f"{k} was {_arguments[k]!r}, now {v!r}" for k, v in arguments.items() if _arguments[k] != v]
    if requested and requested != world.kind:
        differing.insert(0, f"backend was {world.kind!r}, now {requested!r}")
    if differing:
        raise InvalidArgumentError(
            f"initialize has been called with other arguments ({'; '.join(differing)}); "
            "call samestep.finalize() on all ranks before a new start"
        )
    return world


def _open(requested: str, arguments: dict[str, Any]) -> Backend:
    crash_report.install()  # first, so that a launcher learns why ranks did not meet, too
    said = any(arguments[name] is not None for name in ("init_method", "rank", "world_size"))
    if not said and (wrong := launchers.problem()):  # no rank of one job, by the variables of launchers
        raise InvalidArgumentError(f"initialize: {wrong}")
    children.refuse_child(arguments)
    timeout = _seconds("timeout", arguments["timeout"], _settings.TIMEOUT, DEFAULT_TIMEOUT)
    prepare_core()
    probe_mpi = requested == "mpi" or launchers.launcher().name in launchers.MPI_LAUNCHERS
    known = gathered(arguments, probe_mpi=probe_mpi)
    # Whether NCCL can be had is for all ranks to know, once they have met.
    choice = choose(known, "" if requested == "nccl" else requested)
    without_mpi = probe_mpi and requested != "native" and choice.host == "native"
    if without_mpi and known.launcher_size > 1 and launchers.launcher().rank == 0:
        warn(
            f"samestep: {known.launcher_text} started this job, which runs without MPI: {known.mpi_detail}. pip "
            "install 'samestep[mpi]' adds the transports of the MPI library between hosts"
        )

    def open_once(met: Rendezvous | None = None) -> Backend:
        if choice.host == "mpi":
            comm, proved = _open_mpi(known, arguments, timeout), True
        else:
            from samestep.world import native_world

            how = {name: arguments[name] for name in ("rank", "world_size")}
            comm, proved = native_world.open_world(
                arguments["init_method"], **how, timeout=timeout, met=met, alone=alone
            )
        return world_over(comm, requested, choice.host, known, arguments, timeout, proved)

    goes_on = None
    if choice.host == "native" and arguments["init_method"] is None and _settings.get(_settings.MEMBERSHIP):
        goes_on = member()
    alone = goes_on is not None and goes_on.is_newcomer
    if goes_on is not None and not alone:
        world = until_met(goes_on, functools.partial(goes_on.meet, timeout), open_once)
    else:
        world = open_once()
    if goes_on is not None:
        world._regroup = functools.partial(regroup, world, goes_on, arguments)
    _register_at_exit()
    return world


def prepare_core() -> None:
    """Prepare the process, and apply the variables that concern the whole core, before the first group is opened.

    Raises:
      InvalidArgumentError: `SAMESTEP_WARN_AFTER`, `SAMESTEP_HEARTBEAT` or `SAMESTEP_ISA` has an impossible value.
    """
    descriptors.open_closed()
    warn_after = _seconds("warning", None, _settings.WARN_AFTER, DEFAULT_WARN_AFTER)
    _core.set_warning_callback(warn, warn_after)
    _core.set_patience(silence.patience())
    if launchers.launcher().rank == 0:  # once is enough for a job
        unknown_settings.warn_unknown(warn)
    if isa := _settings.get(_settings.ISA):
        _core.select_isa(isa)


def _seconds(what: str, given: float | None, variable: str, default: float) -> float:
    text: Any = given if given is not None else _settings.get(variable) or default
    source = what if given is not None else variable
    return seconds(text, f"initialize: {source}")


def _open_mpi(known: Facts, arguments: dict[str, Any], timeout: float) -> _core.Communicator:
    from samestep.world import mpi_world

    method = arguments["init_method"]
    if method is not None and not method.startswith("mpi://"):
        raise InvalidArgumentError(
            f"initialize: init_method {method!r} is not for MPI, whose launcher brings the ranks together; leave it out"
        )
    if known.launcher not in launchers.MPI_LAUNCHERS and launchers.own_variables() is not os.environ:
        raise UnavailableError(
            f"initialize: MPIBackend cannot be used: {known.launcher_text} has started this process without MPI, "
            "inside a rank of an MPI job; use NativeBackend, or start with `samestep run --mpi`"
        )
    loaded = mpi_world.load()
    check_launch(known, loaded.size, loaded.description)
    check_claims("initialize", "the launcher", [("world_size", arguments["world_size"], loaded.size)])
    if loaded.size == 1:
        comm = _core.make_self_communicator("world")
    else:
        comm = mpi_world.open_world(loaded, oversubscribed=True, timeout=timeout)
    check_claims("initialize", "the launcher", [("rank", arguments["rank"], comm.rank)])
    return comm


@functools.cache
def _register_at_exit() -> None:
    atexit.register(_at_exit)


def _at_exit() -> None:
    """For programs that do not call finalize(): peers that still wait for this rank get an error."""
    if _world is not None and _world._is_forked:
        return
    error = crash_report.last_uncaught()
    _poll_peer_failures()
    if _mpi_is_running() and (_core.has_lost_ranks() or crash_report.is_of_lost_peer(error)):
        why = "samestep: ended without MPI_Finalize, which waits for all ranks, and one has died"
        _core.exit_watchdog(_LOST_S, 0 if error is None else 1, why)
    elif error is not None and _world is not None and not _world.closed and _world.size > 1:
        # MPI_Finalize waits for all ranks. One that never learns of this error must not hold us for ever.
        late = f"not all ranks have ended {_world.timeout:g} s later"
        why = f"samestep: rank {_world.rank} ended with an error, and {late}"
        _core.exit_watchdog(_world.timeout, 1, why)
    if _world is None or _world.closed:
        return
    ended = "its program exited before making this call"
    if error is not None:
        ended = f"its process ended with {error_line(error)}"
    _world._abandon(ended, finished=error is None)


def _poll_peer_failures() -> None:
    """Finds out whether a rank that has left did so because another one died, which MPI_Finalize would wait for."""
    if _world is None or _world.closed or not _core.has_departed_ranks() or not _mpi_is_running():
        return
    deadline = time.monotonic() + _LOOK_S
    while not _core.has_lost_ranks() and time.monotonic() < deadline:
        _world._comm.check_peers()
        time.sleep(0.02)


def _mpi_is_running() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()


def initialized(backend: type[Backend] | BackendName | None = None) -> bool:
    """Whether there is a world, of this backend if one is named.

    Example:
      >>> import samestep as ss
      >>> backend = ss.initialize()
      >>> ss.initialized(), ss.initialized("nccl")
      (True, False)
    """
    requested = _name_of(backend)
    world = _any_world()
    return world is not None and requested in ("", world.kind)


def own_world() -> Backend | None:
    """The world that `initialize` has opened, until it is closed."""
    world = _world  # read once: another thread may call finalize
    return None if world is None or world.closed else world


def note_world_of_torch(world: Backend) -> None:
    """Make `get_distributed_backend` find the world of `torch.distributed` where `initialize` has opened none."""
    global _world_of_torch  # noqa: PLW0603
    _world_of_torch = weakref.ref(world)


def _any_world() -> Backend | None:
    of_torch = None if _world_of_torch is None else _world_of_torch()
    return own_world() or (None if of_torch is None or of_torch.closed else of_torch)


def get_distributed_backend(backend: type[Backend] | BackendName | None = None) -> Backend:
    """The world's backend: the same object that `initialize` returned, every time.

    Without `initialize`, that of `torch.distributed.init_process_group("samestep")`, until it is destroyed.

    Raises:
      NotInitializedError: there is no world, or it is of another backend.
    """
    requested = _name_of(backend)
    world = _any_world()
    if world is not None and requested in ("", world.kind):
        return world
    argument = f"samestep.{CLASSES[requested].__name__}" if requested else ""
    call = f"samestep.initialize({argument})"
    if world is not None:
        raise NotInitializedError(f"the world's backend is {world.kind!r}; {call} has not been called")
    if children.stood_in():
        raise NotInitializedError(children.refusal("get_distributed_backend"))
    raise NotInitializedError(f"there is no backend: call {call} first")


def finalize() -> None:
    """End the world. Collective, idempotent; `initialize` may follow."""
    global _world
    world, _world = _world, None
    if world is not None:
        children.release()
        with _core.UserCall("finalize"):
            world.close()
