"""Blocks that all ranks leave together: an exception on one rank is raised on all of them.

The group that users call (`Group._comm`) is revoked on an exception, which ends every operation of it on every rank,
and replaced. At the end of a block, and after an exception, all ranks synchronize on a second communicator of the same
ranks, which nothing else uses: `Group._control`.
"""

from __future__ import annotations

import threading
import traceback
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from samestep import _core
from samestep._util.deadline import Deadline
from samestep._util.json_layout import Many
from samestep._util.text import chain, ranks_text
from samestep.errors import Error, MismatchError, StepError, TimeoutError
from samestep.group import compiled, json_exchange
from samestep.group.group import Group
from samestep.reduce_ops import resolve
from samestep.step.audit import Audited

__all__ = ["Together", "note_begun"]

_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.02, 0.5
_RAISED = 256  # above all that ranks tell each other
_MOST_TEXT = 400  # characters of the text of an exception
_PACKAGE = str(Path(__file__).parent.parent)


class _Blocks(threading.local):
    """The blocks that this thread is in, from the outermost."""

    def __init__(self) -> None:
        self.open: list[Together[Any]] = []


_blocks = _Blocks()


def note_begun(total: Any) -> None:
    """A step of `total`, an `Accumulator`, begins: an exception that ends the block of this thread resets it."""
    if _blocks.open:
        _blocks.open[-1]._begun.add(total)


def audited_now() -> Audited | None:
    """What is audited in the innermost block of this thread."""
    return _blocks.open[-1].audited if _blocks.open else None


def note_reduced() -> None:
    """Gradients have been reduced: what follows in the blocks of this thread may change parameters."""
    for block in _blocks.open:
        block.has_reduced = True


class _Report(NamedTuple):
    """How one rank leaves the block, as reported to the others."""

    number: int
    """Of the block, among those of the group."""
    entered: int
    """Blocks of the group that this rank has entered."""
    weight: int
    """How far the exception is from the cause: 0 the cause, 1 no exception, 2 a consequence."""
    kind: str
    text: str
    line: str
    groups: list[list[Any]]
    """Names and ranks of the groups that this rank has made of this one."""


_REPORT = [int, int, int, str, str, str, Many([str, Many(int)])]


_Group = TypeVar("_Group", bound=Group)


class Together(Generic[_Group]):
    """The context manager that `Backend.together` returns."""

    def __init__(self, backend: _Group, timeout: float | None) -> None:
        self._backend = backend
        self._timeout = backend._seconds(timeout)
        self._depth = 0
        self._number = 0
        self._interrupted: BaseException | None = None
        self._begun: weakref.WeakSet[Any] = weakref.WeakSet()
        """Accumulators whose step began in the block."""
        self.has_reduced = False
        """Whether gradients have been reduced in the block."""
        self.audited: Audited | None = None
        """A shard of the step that is this block."""
        self.says = self.hears = 0
        """What this rank tells the others at the end of the block, 0 to 255; the greatest that a rank has told."""

    def prepare(self) -> None:
        """Make what the first block of a group needs. Collective; then entering is not."""
        backend = self._backend
        if backend._control is None and backend.size > 1:
            with _core.UserCall("the first together()"):
                control = duplicate(backend, backend._comm, self._timeout)
                # Until all ranks have it, none may revoke the communicator that makes it.
                control.barrier().wait(self._timeout, True)
                backend._control = control

    def __enter__(self) -> _Group:
        self.prepare()
        backend = self._backend
        backend._n_blocks += 1
        self._number = backend._n_blocks
        self._begun.clear()
        self._depth = sum(block._backend is backend for block in _blocks.open)
        _blocks.open.append(self)
        backend._comm.open_block(self._key())
        return backend

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                compiled.await_programs()
            except BaseException as late:  # of the body, which had not ended
                self._exit(late)
                raise
        self._exit(error)

    def _exit(self, error: BaseException | None) -> None:
        _blocks.open.remove(self)
        try:
            self._end(error)
        except BaseException:
            self._reset_begun()
            raise
        if error is not None:
            self._reset_begun()
        elif _blocks.open:
            _blocks.open[-1]._begun |= self._begun
        self._begun.clear()

    def drop(self) -> None:
        """Leave the block without the others: the group has lost a rank."""
        _blocks.open.remove(self)
        self._reset_begun()
        self._backend._comm.close_block(self._key())

    def _reset_begun(self) -> None:
        for total in list(self._begun):
            total.reset()
        self._begun.clear()

    def _end(self, error: BaseException | None) -> None:
        backend = self._backend
        if backend.size == 1 or backend._closed:
            self.hears = self.says
            if isinstance(error, Exception) and not isinstance(error, StepError):
                raise self._step_error(backend.rank, self._report(error), []) from error
            return
        try:
            self._leave(error)
        except StepError as raised:
            if error is not None and not isinstance(error, Exception):
                return  # KeyboardInterrupt and SystemExit propagate on this rank; the other ranks have been notified
            if raised is error:
                return
            raise
        except Error:
            if error is None or _follows(error):
                raise
        finally:
            backend._comm.close_block(self._key())
        if self._interrupted is not None and error is None:
            raise self._interrupted

    def _key(self) -> int:
        return zlib.crc32(self._backend.name.encode()) << 32 | self._number

    def _revoke(self, why: str) -> None:
        for comm in _comms(self._backend):
            comm.revoke(why, self._key())

    # ---- the end of the block

    def _leave(self, error: BaseException | None) -> None:
        backend = self._backend
        deadline = Deadline(self._timeout)
        if error is not None:
            self._revoke(_sentence(backend.rank, self._report(error)))
        if backend._ending_depth is None:
            raised = error is not None or not backend._comm.usable
            with _core.UserCall("together()"):
                lowest, highest, any_raised = self._agree(raised, deadline)
            if not any_raised and lowest == highest:
                return
            self._revoke("another rank has left the block")
            backend._ending_depth = lowest
        # All ranks synchronize at the end of an outer block of this group.
        if backend._ending_depth < self._depth:
            raise StepError(f"{self._act()}: another rank has left an outer block") from error
        backend._ending_depth = None
        try:
            with _core.UserCall("together() after an exception"):
                reports = self._exchange(error, deadline)
                _replace(backend, reports, deadline)
        except BaseException as failed:
            self._give_up(f"together() has ended with {type(failed).__name__}: {failed}")
            raise
        backend._n_blocks = max(report.entered for report in reports)
        self._raise(reports, error)

    def _agree(self, raised: bool, deadline: Deadline) -> tuple[int, int, bool]:
        """The lowest and highest depth of the blocks that ranks leave, and whether one has raised. Collective."""
        backend = self._backend
        assert backend._control is not None
        code, factor = resolve("max")
        asked = raised * _RAISED + self.says
        words = np.array([-self._depth, self._depth, asked, self._number, -self._number], np.int64)
        work = backend._control.allreduce(words, None, code, factor)
        pause, is_announced = _FIRST_LOOK_S, False
        while True:
            try:
                work.wait(min(pause, deadline.left()), False)
                break
            except TimeoutError as late:
                if deadline.left() == 0:
                    self._give_up(str(late))
                    raise
            except KeyboardInterrupt as interrupt:
                # Raised after the block: others may have left it already.
                if self._interrupted is not None:
                    self._give_up("interrupted at the end of together()")
                    raise
                self._interrupted = interrupt
            self._look_around()
            if not is_announced and pause > 2 * _FIRST_LOOK_S and not raised:
                is_announced = True
                for comm in _comms(backend):
                    comm.announce_block_end(self._key())
            pause = min(2 * pause, _LONGEST_LOOK_S)
        self.hears = int(words[2]) % _RAISED
        same_block = words[3] == -words[4] or words[0] != -words[1]
        return -int(words[0]), int(words[1]), words[2] >= _RAISED or not same_block

    def _look_around(self) -> None:
        """While this rank waits for others at the end: forward revocations to the groups that they may wait in."""
        backend = self._backend
        backend._comm.check_peers()
        if backend._comm.is_revoked():
            self._revoke("another rank has left the block")
        for outer in _blocks.open:
            if not any(group is backend for group, _ in _descendants(outer._backend)):
                continue
            comm = outer._backend._comm
            comm.check_peers()
            if comm.is_revoked():
                outer._revoke("another rank has left the block")
                raise StepError(f"{self._act()}: another rank has left an outer block, of group {comm.name}")

    def _give_up(self, why: str) -> None:
        """The ranks cannot agree, so the group ends."""
        self._revoke(why)
        if self._backend._control is not None:
            self._backend._control.abandon(why)

    # ---- after an exception

    def _report(self, error: BaseException | None) -> _Report:
        groups = [[group.name, ranks] for group, ranks in _descendants(self._backend)]
        counts = self._number, self._backend._n_blocks
        if error is None:
            return _Report(*counts, 1, "", "", "", groups)
        if isinstance(error, StepError) and error.is_here:
            return _Report(*counts, 0, error.kind, error.text, error.line, groups)
        weight = 2 if _follows(error) else 0
        text = str(error)[:_MOST_TEXT]
        return _Report(*counts, weight, type(error).__name__, text, _innermost_line(error), groups)

    def _exchange(self, error: BaseException | None, deadline: Deadline) -> list[_Report]:
        control = self._backend._control
        assert control is not None
        reports = json_exchange.allgather(control, self._report(error), _REPORT, deadline.left())
        return [_Report(*report) for report in reports]

    def _raise(self, reports: list[_Report], error: BaseException | None) -> None:
        numbers = [report.number for report in reports]
        if min(numbers) != max(numbers) and not any(report.kind for report in reports):
            raise MismatchError(f"{self._act()}: ranks are in different blocks; has one skipped a block?")
        weights = [report.weight if report.kind else 3 for report in reports]
        first = weights.index(min(weights))
        if not reports[first].kind:
            raise MismatchError(f"{self._act()}: ranks leave different levels of nested blocks")
        others = [rank for rank, weight in enumerate(weights) if weight == 0 and rank != first]
        # Without a local variable that holds it: its traceback holds this frame, and would keep arrays alive.
        raise self._step_error(first, reports[first], others) from error

    def _step_error(self, rank: int, report: _Report, others: list[int]) -> StepError:
        also = f"; so did {ranks_text(others)}" if others else ""
        made = StepError(
            f"{self._act()}: {_sentence(rank, report)}{also}",
            rank=rank,
            kind=report.kind,
            text=report.text,
            line=report.line,
        )
        made.is_here = report.weight == 0 and rank == self._backend.rank
        return made

    def _act(self) -> str:
        return f"together() in group {self._backend.name}"


def _sentence(rank: int, report: _Report) -> str:
    text = f": {report.text}" if report.text else ""
    line = f" ({report.line})" if report.line else ""
    return f"rank {rank} raised {report.kind}{text}{line}"


def _follows(error: BaseException) -> bool:
    """Whether it was raised because another rank has left, or while such an exception was handled."""
    return any(isinstance(one, StepError) for one in chain(error))


def _innermost_line(error: BaseException) -> str:
    """Where it was raised: the innermost line outside of this package."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)] or frames
    if not outside:
        return ""
    frame = outside[-1]
    return f"{frame.filename}:{frame.lineno}, in {frame.name}"


# ---- the communicators of a group and of those made from it


def duplicate(backend: Group, comm: _core.Communicator, timeout: float) -> _core.Communicator:
    """Another communicator of the ranks of `comm`, for the same group. Collective."""
    return comm.group(list(range(backend.size)), timeout, backend.name)


def _descendants(backend: Group) -> list[tuple[Group, list[int]]]:
    """The open groups made from `backend`, with their members as ranks of it."""
    found: list[tuple[Group, list[int]]] = []
    for child in backend._children:
        if child._members is None:
            continue
        ranks = list(child._members)
        found.append((child, ranks))
        found += [(group, [ranks[rank] for rank in members]) for group, members in _descendants(child)]
    return found


def _comms(backend: Group) -> list[_core.Communicator]:
    """All communicators that a block of `backend` may wait in, except the control communicator."""
    found = [backend._comm]
    for group, ranks in _descendants(backend):
        if len(ranks) == 1:
            continue  # it waits for nobody
        found += [group._comm] if group._control is None else [group._comm, group._control]
    return found


def _replace(backend: Group, reports: list[_Report], deadline: Deadline) -> None:
    """New communicators for the group and those made from it, in an order that all ranks know. Collective."""
    control = backend._control
    assert control is not None
    old = _comms(backend)
    mine = dict(zip(_identities(reports[backend.rank]), _descendants(backend), strict=True))
    known = [set(_identities(report)) for report in reports]
    backend._set_comm(duplicate(backend, control, deadline.left()))
    for identity in sorted(mine):
        group, ranks = mine[identity]
        if len(ranks) > 1 and all(identity in known[rank] for rank in ranks):  # else it was being made
            group._control = None
            group._set_comm(control.group(ranks, deadline.left(), group.name))
    control.barrier().wait(deadline.left(), True)  # from here on no rank uses the old ones
    for comm in old:
        comm.discard()


def _identities(report: _Report) -> Iterable[tuple[Any, ...]]:
    """An identity for each group of a rank, the same on all ranks of the group."""
    seen: Counter[tuple[Any, ...]] = Counter()
    for name, ranks in report.groups:
        identity = (name, *ranks)
        seen[identity] += 1
        yield (name, seen[identity], *ranks)
