"""The operations of a torch.distributed process group over a communicator of samestep."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from samestep import _core
from samestep.errors import (
    Error,
    InvalidArgumentError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    TimeoutError,
)
from samestep.reduce_ops import SUM
from samestep.torch import forms, tensors
from samestep.torch.devices import DeviceHalves
from samestep.torch.errors import for_torch
from samestep.torch.shutdown import GroupShutdown
from samestep.torch.work import Received, Work, has_modes, without_autograd

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Tensors = list[torch.Tensor]
_UNSET = timedelta(0)
_TORCH_SUM = dist.ReduceOp.RedOpType.SUM
_profiler_enabled = torch.autograd._profiler_enabled
_compiling = torch.compiler.is_dynamo_compiling
_TAKES_NONE = hasattr(dist.AllreduceOptions, "asyncOp")
"""Whether this torch takes None for the Work of a call that waits, as NCCL gives it."""
_ALL_KNOW = (MismatchError, NotInitializedError, PeerLostError, TimeoutError)
"""Errors that come from the group: the others get one as well."""
_NAMES_OF_GROUPS = {
    "_all_gather_single": "_allgather_base",
    "_all_reduce": "allreduce",
    "_allgather": "allgather",
    "_barrier": "barrier",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
"""Of methods here that not every version of torch calls by the same name."""
_MOST_TEXT = 160  # of a refusal, in the errors of the other ranks


def _verb(
    method: _Method, listed: int | None = None, *, collective: bool = True, form: forms.Form | None = None
) -> _Method:
    """Decorate an operation: hide it from autograd and modes, raise torch's errors, too, and record it in profiles.

    Args:
      listed: the number of the argument that lists tensors, if each of them is an operation of the core.
      collective: if this rank cannot begin it, the others are told.
      form: its arguments, if torch's groups take them in two forms.
    """
    # Scripts search profiles for the second word, as in `gloo:all_reduce`.
    name = re.sub("all(reduce|gather)", r"all_\1", method.__name__.lstrip("_")).replace(
        "alltoall", "all_to_all"
    )
    label = f"samestep:{name}"
    theirs = _NAMES_OF_GROUPS.get(method.__name__, method.__name__)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if _compiling():
            return torch.compiler.disable(call)(self, *args, **options)
        if form is not None:
            args, options = tuple(form.plain(args, options)), {}
        # Until there is one, the error of a first tensor on a device finds it, at no cost for other calls.
        if self._devices.made:
            half = self._devices.half_of(args)
            if half is not None:
                return getattr(half, theirs)(*args, **options)
        with without_autograd():
            try:
                # What the method itself copies, the core does not see.
                if collective and _core.memory_is_in_use():
                    _core.settle(list(_tensors_in(args)))
                started = method(self, *args, **options)
            except Exception as error:
                if isinstance(error, tensors.NotOnHostError) and self._devices.half_of(args):
                    return call(self, *args, **options)
                if collective:
                    self._tell_refusal(name, 1 if listed is None else len(args[listed]), error)
                raise for_torch(error) from None
        if torch.autograd._profiler_enabled():
            with torch.profiler.record_function(label) as event:
                event._call_end_callbacks_on_future(started.ending())
        return started

    return call  # type: ignore[return-value]


_verb_on_lists = functools.partial(_verb, listed=0)
_verb_from_lists = functools.partial(_verb, listed=1)
_message = functools.partial(_verb, collective=False)


class Verbs:
    """The methods that torch calls on a group: each starts an operation and returns its Work.

    Names, arguments and semantics are torch's. Operations that torch has renamed have both names.
    """

    _comm: _core.Communicator
    _all_reduce_now: Callable[..., Any]
    """`_core.fast_call`: NotImplemented if the array does not fit the fast path."""
    _all_gather_now: Callable[..., Any]
    _timeout: float
    _devices: DeviceHalves
    _lifetime: GroupShutdown
    _n_collectives: int

    # ---- reductions

    def allreduce(self, *args: Any, **named: Any) -> Work | None:
        if _compiling():  # this frame: the compiler traces what runs between the parts that it has compiled
            return torch.compiler.disable(Verbs.allreduce)(self, *args, **named)  # type: ignore[no-any-return]
        tensors_, opts = forms.ALLREDUCE.plain(args, named)
        short = self._all_reduce_one(tensors_, opts) if len(tensors_) == 1 else NotImplemented
        return self._all_reduce(tensors_, opts) if short is NotImplemented else short

    def _all_reduce_one(self, tensors_: _Tensors, opts: Any) -> Any:
        """The frequent case, in a third of the time: a plain tensor, with no profiler or mode. Else NotImplemented.

        Without `async_op` the caller waits, so the operation runs here, and there is no Work.
        """
        wanted, run = opts.reduceOp, tensors.run_of(tensors_[0])
        op = SUM if wanted == _TORCH_SUM else tensors.operator_of(wanted)
        if op is None or run is None or _profiler_enabled() or has_modes():
            return NotImplemented
        try:
            limit = opts.timeout
            if limit > _UNSET or not _waits(opts):
                part = self._comm.allreduce(run, None, op._value_, 1.0)
                # What `_started` does: its calls would take a tenth of the time of a short operation.
                self._n_collectives += 1
                seconds = self._timeout if limit <= _UNSET else limit.total_seconds()
                started = Work((part,), tensors_, seconds)
                self._lifetime.under_way(started)
                return started
            result = self._all_reduce_now(run, op)
        except Error as error:
            self._tell_refusal("all_reduce", 1, error)
            raise for_torch(error) from None
        if result is NotImplemented:
            return result
        self._n_collectives += 1
        return None

    @_verb_on_lists
    def _all_reduce(self, tensors_: _Tensors, opts: Any, of_equal_shapes: bool = True) -> Work:
        if len(tensors_) > 1:
            tensors.require_alike("all_reduce", "input", tensors_, tensors_[0], in_shape=of_equal_shapes)
        if tensors_[0].layout is not torch.strided:
            parts, finish = tensors.sparse_all_reduce(self._comm, tensors_, _op(opts), self._seconds(opts))
            return self._started(parts, tensors_, opts, finish)
        code, factor = tensors.reduction(_op(opts))
        runs, copy_back = tensors.in_place(tensors_)
        parts = [self._comm.allreduce(run, None, code, factor) for run in runs]
        return self._started(parts, tensors_, opts, copy_back)

    def allreduce_coalesced(self, tensors_: _Tensors, opts: Any = None) -> Any:
        half = self._devices.half_of([tensors_])
        return (
            self._all_reduce(tensors_, opts, False)
            if half is None
            else half.allreduce_coalesced(tensors_, opts)
        )

    @functools.partial(_verb, listed=0, form=forms.REDUCE)
    def reduce(self, tensors_: _Tensors, opts: Any = None) -> Work:
        code, factor = tensors.reduction(_op(opts))
        root = opts.rootRank
        runs, copy_back = tensors.written_unless(self._comm.rank != root, tensors_)
        parts = [self._comm.reduce(run, None, code, factor, root) for run in runs]
        return self._started(parts, tensors_, opts, copy_back)

    @functools.partial(_verb, listed=0, form=forms.REDUCE_SCATTER)
    def reduce_scatter(self, outputs: _Tensors, inputs: list[_Tensors], opts: Any = None) -> Work:
        code, factor = tensors.reduction(_op(opts))
        parts: list[_core.Work] = []
        finishes = []
        all_equal = self._require_blocks("reduce_scatter", "input", inputs, outputs)
        for output, blocks, equal in zip(outputs, inputs, all_equal, strict=True):
            everything = tensors.joined(blocks)
            if equal:
                (run,), copy_back = tensors.in_place([output])
                parts.append(self._comm.reduce_scatter(everything, run, code, factor))
                finishes += [copy_back] if copy_back else []
                continue
            tensors.require_equal_counts("reduce_scatter", blocks, self._comm, self._seconds(opts))
            parts.append(self._comm.allreduce(everything, None, code, factor))
            start = sum(block.numel() for block in blocks[: self._comm.rank])
            mine = everything[start : start + output.numel()]
            finishes.append(functools.partial(tensors.copy_back, mine, [output]))
        return self._started(parts, outputs, opts, _all_of(finishes))

    @_verb
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self._reduce_scatter_singles([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    @_verb_on_lists
    def reduce_scatter_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Work:
        return self._reduce_scatter_singles(outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter_singles(self, outputs: _Tensors, inputs: _Tensors, opts: Any) -> Work:
        code, factor = tensors.reduction(_op(opts))
        for output, input in zip(outputs, inputs, strict=True):
            tensors.require_whole("reduce_scatter_tensor", input, output, self._comm.size)
        runs, copy_back = tensors.in_place(outputs)
        parts = [
            self._comm.reduce_scatter(tensors.in_one_dimension(input), run, code, factor)
            for run, input in zip(runs, inputs, strict=True)
        ]
        return self._started(parts, outputs, opts, copy_back)

    # ---- one to all, all to one

    @functools.partial(_verb, listed=0, form=forms.BROADCAST)
    def broadcast(self, tensors_: _Tensors, opts: Any = None) -> Work:
        root = opts.rootRank
        if len(tensors_) > 1:
            tensors.require_alike("broadcast", "input", tensors_, tensors_[0], in_shape=True)
        runs, copy_back = tensors.written_unless(self._comm.rank == root, tensors_)
        parts = [self._comm.bcast(tensors.memory(run), root) for run in runs]
        return self._started(parts, tensors_, opts, copy_back)

    @functools.partial(_verb, form=forms.GATHER)
    def gather(self, outputs: list[_Tensors], inputs: _Tensors, opts: Any = None) -> Work:
        root, (input,) = opts.rootRank, inputs
        if self._comm.rank != root:
            return self._started([self._comm.gather(tensors.sent(input), None, root)], [], opts)
        (blocks,) = outputs
        tensors.require_blocks("gather", "output", blocks, input, self._comm, of_any_length=False)
        tensors.require_writable(blocks)
        everything = tensors.flat(blocks, input.dtype)
        part = self._comm.gather(tensors.sent(input), tensors.memory(everything), root)
        return self._started([part], blocks, opts, lambda: tensors.copy_back(everything, blocks))

    @_verb
    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        root, into = opts.rootRank, None
        if self._comm.rank == root:
            tensors.require_whole("gather_single", output, input, self._comm.size)
            into = tensors.memory(output)
        return self._started([self._comm.gather(tensors.sent(input), into, root)], [output], opts)

    gather_into_tensor = gather_single

    @functools.partial(_verb, form=forms.SCATTER)
    def scatter(self, outputs: _Tensors, inputs: list[_Tensors], opts: Any = None) -> Work:
        root, (output,) = opts.rootRank, outputs
        everything = None
        if self._comm.rank == root:
            (blocks,) = inputs
            tensors.require_blocks("scatter", "input", blocks, output, self._comm, of_any_length=False)
            everything = tensors.memory(tensors.joined(blocks))
        (run,), copy_back = tensors.in_place([output])
        part = self._comm.scatter(everything, tensors.memory(run), root)
        return self._started([part], outputs, opts, copy_back)

    # ---- all to all

    def allgather(self, *args: Any, **named: Any) -> Work | None:
        if _compiling():  # this frame, as in `allreduce`
            return torch.compiler.disable(Verbs.allgather)(self, *args, **named)  # type: ignore[no-any-return]
        outputs, inputs, opts = forms.ALLGATHER.plain(args, named)
        waits = _waits(opts) and len(outputs) == len(inputs) == 1
        whole = tensors.gathered(outputs[0], inputs[0]) if waits else None
        if whole is None or self._all_gather_one(whole, inputs[0], opts) is NotImplemented:
            return self._allgather(outputs, inputs, opts)
        if whole.data_ptr() != outputs[0][0].data_ptr():
            tensors.copy_back(whole, outputs[0])
        return None

    @_verb_from_lists
    def _allgather(self, outputs: list[_Tensors], inputs: _Tensors, opts: Any) -> Work:
        return self._all_gather_lists(outputs, inputs, opts)

    @_verb_from_lists
    def allgather_coalesced(self, outputs: list[_Tensors], inputs: _Tensors, opts: Any = None) -> Work:
        by_input = [list(blocks) for blocks in zip(*outputs, strict=True)]
        return self._all_gather_lists(by_input, inputs, opts)

    def _all_gather_lists(self, outputs: list[_Tensors], inputs: _Tensors, opts: Any) -> Work:
        parts, finishes = [], []
        all_equal = self._require_blocks("all_gather", "output", outputs, inputs)
        tensors.require_writable([block for blocks in outputs for block in blocks])
        for blocks, input, equal in zip(outputs, inputs, all_equal, strict=True):
            everything = tensors.flat(blocks, input.dtype)
            mine, into = tensors.sent(input), tensors.memory(everything)
            if equal:
                parts.append(self._comm.allgather(mine, into))
            else:
                parts.append(self._comm.allgatherv(mine, into, [block.numel() for block in blocks]))
            finishes.append(functools.partial(tensors.copy_back, everything, blocks))
        return self._started(parts, [t for blocks in outputs for t in blocks], opts, _all_of(finishes))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work | None:
        if _compiling():  # this frame, as in `allreduce`
            return torch.compiler.disable(Verbs.all_gather_single)(self, output, input, opts)  # type: ignore[no-any-return]
        short = self._all_gather_one(output, input, opts) if _waits(opts) else NotImplemented
        return self._all_gather_single(output, input, opts) if short is NotImplemented else short

    def _all_gather_one(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:
        """The frequent case, as in `_all_reduce_one`, of a caller that waits."""
        mine, into = tensors.run_of(input), tensors.run_of(output)
        is_plain = opts.timeout <= _UNSET and not _profiler_enabled() and not has_modes()
        if mine is None or into is None or not is_plain:
            return NotImplemented
        try:
            result = self._all_gather_now(mine, out=into)
        except Error as error:
            self._tell_refusal("all_gather_single", 1, error)
            raise for_torch(error) from None
        if result is NotImplemented:
            return result
        self._n_collectives += 1
        return None

    @_verb
    def _all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
        return self._all_gather_singles([output], [input], opts)

    _allgather_base = all_gather_single

    @_verb_on_lists
    def all_gather_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Work:
        return self._all_gather_singles(outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather_singles(self, outputs: _Tensors, inputs: _Tensors, opts: Any) -> Work:
        for output, input in zip(outputs, inputs, strict=True):
            tensors.require_whole("all_gather_into_tensor", output, input, self._comm.size)
        parts = [
            self._comm.allgather(tensors.sent(input), tensors.memory(output))
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return self._started(parts, outputs, opts)

    @_verb
    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Work:
        size, rank = self._comm.size, self._comm.rank
        tensors.require_one_each("all_to_all", "input", inputs, size)
        tensors.require_blocks("all_to_all", "output", outputs, inputs[rank], self._comm)
        tensors.require_blocks("all_to_all", "input", inputs, outputs[rank], self._comm)
        tensors.require_writable(outputs)
        everything = tensors.flat(outputs, outputs[0].dtype)
        part = self._comm.alltoallv(
            tensors.memory(tensors.joined(inputs)),
            [t.numel() for t in inputs],
            tensors.memory(everything),
            [t.numel() for t in outputs],
        )
        return self._started([part], outputs, opts, lambda: tensors.copy_back(everything, outputs))

    @_verb
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        tensors.require_alike("all_to_all_single", "output", [output], input)
        sent = tensors.block_counts(input, input_splits, "input", self._comm.size)
        received = tensors.block_counts(output, output_splits, "output", self._comm.size)
        if sent[self._comm.rank] != received[self._comm.rank]:
            raise InvalidArgumentError(
                f"all_to_all_single: this rank sends itself {sent[self._comm.rank]} elements, but expects "
                f"{received[self._comm.rank]}; the sizes of rows and the splits must agree"
            )
        part = self._comm.alltoallv(tensors.memory(input), sent, tensors.memory(output), received)
        return self._started([part], [output], opts)

    alltoall_base = all_to_all_single

    def barrier(self, *args: Any, **named: Any) -> Any:
        (opts,) = forms.BARRIER.plain(args, named)
        device = getattr(opts, "device", None)  # of the caller's `device_ids`
        half = None if device is None else self._devices.half_for(device)
        return self._barrier(opts) if half is None else half.barrier(opts)

    @_verb
    def _barrier(self, opts: Any) -> Work:
        return self._started([self._comm.barrier()], [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names all ranks that did not arrive, as that of every operation of this backend does.

        `torch.distributed.monitored_barrier` asks for gloo by name; call this one on the group:
        `torch.distributed.group.WORLD.monitored_barrier(timeout)`.
        """
        self.barrier().wait(timeout)

    # ---- messages

    @_message
    def send(self, tensors_: _Tensors, dst: int, tag: int = 0) -> Work:
        return self._started([self._comm.send(tensors.memory(t), dst, tag) for t in tensors_], tensors_, None)

    @_message
    def recv(self, tensors_: _Tensors, src: int, tag: int = 0) -> Work:
        parts = [self._comm.recv(tensors.memory(t), src, tag) for t in tensors_]
        return self._started(parts, tensors_, None, kind=Received)

    @_message
    def recv_anysource(self, tensors_: _Tensors, tag: int = 0) -> Work:
        parts = [self._comm.recv(tensors.memory(t), -1, tag) for t in tensors_]
        return self._started(parts, tensors_, None, kind=Received)

    # ---- helpers

    def _require_blocks(self, verb: str, what: str, lists: list[_Tensors], likes: _Tensors) -> list[bool]:
        """`require_blocks` of each list."""
        pairs = zip(lists, likes, strict=True)
        return [tensors.require_blocks(verb, what, blocks, like, self._comm) for blocks, like in pairs]

    def _started(
        self,
        parts: Sequence[_core.Work],
        result: _Tensors,
        opts: Any,
        finish: Callable[[], None] | None = None,
        kind: type[Work] = Work,
    ) -> Work:
        self._n_collectives += kind is Work
        started = kind(parts, result, self._seconds(opts), finish)
        if finish is not None:
            for part in parts:
                part.claim(result, started)
        self._lifetime.under_way(started)
        return started

    def _seconds(self, opts: Any) -> float:
        given = getattr(opts, "timeout", None)
        return given.total_seconds() if given is not None and given > _UNSET else self._timeout

    def _tell_refusal(self, verb: str, n_operations: int, error: Exception) -> None:
        """Let the others, which have begun or will begin this operation, learn that this rank does not.

        Its place is taken by an operation that no other rank means, so they get a MismatchError that says why.
        """
        if isinstance(error, _ALL_KNOW):
            return
        empty, counts = torch.empty(0), [0] * self._comm.size
        into = empty if self._comm.rank == 0 else None
        why = f"{verb} of what this rank cannot take: {str(error).removeprefix(f'{verb}: ')[:_MOST_TEXT]}"
        with contextlib.suppress(Exception), _core.UserCall(why):
            for _ in range(n_operations):
                self._started(
                    [self._comm.gatherv(empty, into, counts if into is not None else [], 0)], [], None
                )


def _tensors_in(given: Any) -> Iterator[torch.Tensor]:
    for one in given:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _tensors_in(one)


def _waits(opts: Any) -> bool:
    return _TAKES_NONE and opts is not None and not opts.asyncOp


def _op(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def _all_of(finishes: Sequence[Callable[[], None]]) -> Callable[[], None] | None:
    if not finishes:
        return None

    def finish() -> None:
        for each in finishes:
            each()

    return finish
