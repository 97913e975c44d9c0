"""Groups as in torch.distributed: handles, the global ranks of their members, and names of backends and reductions."""

from __future__ import annotations

import contextlib
import operator
import warnings
import weakref
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final, Literal

from samestep import _core, internal, reduce_ops
from samestep._util.json_layout import Many
from samestep._util.text import by_rank
from samestep.backend import Backend as Group
from samestep.distributed import other_backend
from samestep.errors import InvalidArgumentError, MismatchError, NotInitializedError, UnavailableError
from samestep.rendezvous.store import seconds_of
from samestep.world import lifecycle
from samestep.world.choice import gather

__all__ = [
    "Backend",
    "GroupMember",
    "ReduceOp",
    "get_backend",
    "get_rank",
    "get_world_size",
    "group",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "new_group",
    "reduce_op",
]

BackendName = Literal["gloo", "mpi", "nccl", "native"]

KINDS = {"gloo": "native", "mpi": "mpi", "nccl": "nccl"}
"""Name here -> name that `samestep.initialize` takes."""


class Backend:
    """The names of the backends. `Backend(name)` checks a name in any case, and returns it in lower case, a `str`.

    `"gloo"` is the name of samestep's own host backend here, and `"native"` is read as `"gloo"`.

    Raises:
      InvalidArgumentError: not a string, or no usable backend; lists those that can be used, and why others cannot.

    Example:
      >>> Backend("GLOO"), Backend("native"), Backend.MPI
      ('gloo', 'gloo', 'mpi')
    """

    UNDEFINED = "undefined"
    GLOO = "gloo"
    MPI = "mpi"
    NCCL = "nccl"

    def __new__(cls, name: str) -> str:  # type: ignore[misc]
        """The name in lower case."""
        lower = name.lower() if isinstance(name, str) else ""
        lower = "gloo" if lower == "native" else lower
        if lower in KINDS:
            return lower
        usable = [repr(known) for known in KINDS if is_backend_available(known)]
        refused = [f"{known!r} ({_why_not(known)})" for known in KINDS if not is_backend_available(known)]
        cannot = f"; not usable: {', '.join(refused)}" if refused else ""
        raise InvalidArgumentError(f"there is no backend {name!r}; usable here: {', '.join(usable)}{cannot}")


def is_available() -> bool:
    """Whether this package can be used at all: yes."""
    return True


def is_gloo_available() -> bool:
    """Whether the host backend can be used: yes."""
    return True


def is_mpi_available() -> bool:
    """Whether an MPI library can be loaded. Does not start MPI."""
    return not _why_not("mpi")


def is_nccl_available() -> bool:
    """Whether this process sees a device and can load NCCL or RCCL."""
    return not _why_not("nccl")


def is_backend_available(backend: str) -> bool:
    """Whether the backend of this name can be used; False for unknown names.

    Example:
      >>> is_backend_available("Gloo"), is_backend_available("tcp")
      (True, False)
    """
    name = str(backend).lower()
    return name in (*KINDS, "native") and not _why_not(name)


def _why_not(name: str) -> str:
    """Why a backend cannot be used; "" if it can."""
    if name == "mpi":
        with contextlib.suppress(Exception):
            from samestep._util import mpi_library

            library = mpi_library.load()
            return "" if library.path else library.problem or "no MPI library"
        return "no MPI library can be loaded"
    if name == "nccl":
        with contextlib.suppress(Exception):
            known = gather(probe_mpi=False)
            works = known.devices > 0 and known.nccl_loadable
            return "" if works else f"{known.nccl_detail}; {known.device_detail}"
        return "no device can be asked for"
    return ""


class ReduceOp:
    """The operators of reductions: members of `samestep.ReduceOp` under torch's names.

    Example:
      >>> import samestep
      >>> ReduceOp.PRODUCT is samestep.PROD
      True
    """

    SUM = reduce_ops.SUM
    PRODUCT = reduce_ops.PROD
    MIN = reduce_ops.MIN
    MAX = reduce_ops.MAX
    AVG = reduce_ops.AVG
    BAND = reduce_ops.BAND
    BOR = reduce_ops.BOR
    BXOR = reduce_ops.BXOR


class _DeprecatedNames:
    """SUM PRODUCT MIN MAX; each use warns."""

    def __getattr__(self, name: str) -> Any:
        if name not in ("SUM", "PRODUCT", "MIN", "MAX"):
            raise AttributeError(f"reduce_op has no {name!r}; use ReduceOp")
        warnings.warn(f"reduce_op.{name} is deprecated; use ReduceOp.{name}", FutureWarning, stacklevel=2)
        return getattr(ReduceOp, name)


reduce_op = _DeprecatedNames()
"""Deprecated name of `ReduceOp`: SUM, PRODUCT, MIN and MAX, with a FutureWarning."""


class _Handle:
    """A handle that is no `samestep.Backend`: the current world, or a group without this rank."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> str:
        return f"GroupMember.{self._name}"


WORLD: Final = _Handle("WORLD")


class group:
    """`group.WORLD` stands for all ranks, and is the default of every function."""

    WORLD = WORLD


class GroupMember:
    """What `new_group` returns to ranks that are not in the group: `GroupMember.NON_GROUP_MEMBER`."""

    WORLD = WORLD
    NON_GROUP_MEMBER = _Handle("NON_GROUP_MEMBER")


_members: weakref.WeakKeyDictionary[Group, list[int]] = weakref.WeakKeyDictionary()


def is_initialized() -> bool:
    """Whether `init_process_group` or `samestep.initialize` has made a world."""
    return lifecycle.own_world() is not None


def the_world() -> Group:
    """The world's backend. Raises NotInitializedError before `init_process_group`."""
    if (world := lifecycle.own_world()) is None:
        raise NotInitializedError(
            "there is no process group: call samestep.distributed.init_process_group(backend) first"
        )
    return world


def resolve(handle: Any) -> Group | None:
    """The backend of a `group=` argument, which has not been destroyed; None if this rank is not in the group."""
    if handle is GroupMember.NON_GROUP_MEMBER:
        return None
    if handle is WORLD or handle is None:
        return the_world()
    if not isinstance(handle, Group):
        raise TypeError(f"group must be group.WORLD or what new_group returned, got {type(handle).__name__}")
    if handle.closed:
        raise NotInitializedError(
            f"group {handle.name!r} has been destroyed; a world comes from init_process_group, a group from new_group"
        )
    if handle not in _members and handle is not the_world():
        raise TypeError(f"group {handle.name!r} was not made by new_group; call its own methods")
    return handle


def members(of: Group) -> list[int]:
    """Global ranks of a group, by group rank."""
    known = _members.get(of)
    return list(range(of.size)) if known is None else known


def rank_in(of: Group, verb: str, name: str, rank: Any, group_rank: Any) -> int:
    """Convert `name=` (a global rank) or `group_<name>=` (a rank of the group), one of them, to a rank of the group."""
    if rank is not None and group_rank is not None:
        raise InvalidArgumentError(
            f"{verb}: {name}={rank} (a global rank) and group_{name}={group_rank} were given; give one"
        )
    if rank is None and group_rank is None:
        raise TypeError(f"{verb}: {name}= (a global rank) or group_{name}= is missing")
    everyone = members(of)
    if group_rank is not None:
        index = whole_number(group_rank, verb, f"group_{name}")
        if not 0 <= index < len(everyone):
            raise InvalidArgumentError(
                f"{verb}: group_{name} {index} is outside the group, which has {len(everyone)} members: {everyone}"
            )
        return index
    number = whole_number(rank, verb, name)
    if number not in everyone:
        raise InvalidArgumentError(
            f"{verb}: {name} {number} is not in the group, whose members are {everyone}"
        )
    return everyone.index(number)


def whole_number(value: Any, verb: str, name: str) -> int:
    """`value` as an int. Raises TypeError, naming the parameter, if it is not a whole number."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{verb}: {name} must be an int, got {type(value).__name__}")


def get_rank(group: Any = WORLD) -> int:
    """This process's rank in the group; -1 if it is not a member.

    Example:
      >>> import samestep.distributed as dist
      >>> dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
      >>> dist.get_rank(), dist.get_world_size(), dist.get_backend()
      (0, 1, 'gloo')
      >>> dist.destroy_process_group()
    """
    of = resolve(group)
    return -1 if of is None else of.rank


def get_world_size(group: Any = WORLD) -> int:
    """Number of ranks of the group; -1 if this process is not a member."""
    of = resolve(group)
    return -1 if of is None else of.size


def get_backend(group: Any = WORLD) -> str:
    """ "gloo", "mpi" or "nccl".

    Raises:
      InvalidArgumentError: this process is not in the group.
    """
    of = resolve(group)
    if of is None:
        raise InvalidArgumentError("get_backend: this process is not in the group")
    return next(name for name, kind in KINDS.items() if kind == of.kind)


def new_group(
    ranks: Iterable[int] | None = None,
    timeout: timedelta | float | None = None,
    backend: BackendName | None = None,
) -> Any:
    """A group of some of the ranks. Collective over the world: all ranks call it with the same list.

    Args:
      ranks: global ranks, in any order; the group's own ranks follow the sorted list. None: all.
      timeout: of operations in the group, a timedelta or seconds. None: the world's.
      backend: None: the world's. In a world on "mpi" it may be "gloo". In a world on "gloo" it may be "mpi" if a
        launcher of MPI has started exactly the ranks of the world.

    Returns:
      A handle for `group=`, which is the group's `samestep.Backend`; `GroupMember.NON_GROUP_MEMBER` on ranks
      that are not in the list.

    Raises:
      MismatchError: the ranks gave different lists (on every rank).
      InvalidArgumentError: a rank occurs twice or is outside the world.
      UnavailableError: the group cannot have this backend (on every rank).

    Example:
      >>> import samestep.distributed as dist
      >>> dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
      >>> pair = dist.new_group([0])
      >>> dist.get_rank(pair), dist.get_rank(dist.GroupMember.NON_GROUP_MEMBER)
      (0, -1)
      >>> dist.destroy_process_group()
    """
    of = the_world()
    if ranks is not None and (isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable)):
        raise TypeError(f"new_group: ranks must be a list of ints, got {type(ranks).__name__}")
    chosen = [
        whole_number(rank, "new_group", "ranks") for rank in (range(of.size) if ranks is None else ranks)
    ]
    seconds = of.timeout if timeout is None else seconds_of(timeout)
    kind = of.kind if backend is None else KINDS[Backend(backend)]
    with _core.UserCall("new_group"):
        lists = internal.facts(of, (sorted(chosen), kind), [Many(int), str])
    if any(other != lists[0] for other in lists):
        lists_text = by_rank(
            [str(given) if kind == of.kind else f"{given} on {kind}" for given, kind in lists]
        )
        raise MismatchError(f"new_group: the ranks gave different lists: {lists_text}")
    for rank in chosen:
        if not 0 <= rank < of.size or chosen.count(rank) > 1:
            what = "is outside the world" if not 0 <= rank < of.size else "occurs twice in a group"
            raise InvalidArgumentError(f"new_group: rank {rank} {what} of {of.size} ranks: {chosen}")
    if not chosen:
        raise InvalidArgumentError("new_group: a group needs at least one rank, got an empty list")
    everyone = sorted(chosen)
    if kind != of.kind and (why := other_backend.reason_unavailable(of, kind)):
        raise UnavailableError(f"new_group: {why}; or leave backend out")
    if of.rank not in chosen:
        return GroupMember.NON_GROUP_MEMBER
    if kind == of.kind:
        comm = internal.communicator(of).group(everyone, seconds)
        made = internal.child(of, comm, everyone, seconds)
    else:
        made = other_backend.open_group(of, kind, everyone, seconds)
    _members[made] = everyone
    return made
