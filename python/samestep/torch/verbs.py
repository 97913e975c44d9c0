"""The operations of a torch.distributed process group over a communicator of samestep."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from samestep import _core
from samestep.errors import Error, InvalidArgumentError
from samestep.reduce_ops import SUM
from samestep.torch import sparse, tensors
from samestep.torch.errors import for_torch
from samestep.torch.no_autograd import has_modes, without_autograd
from samestep.torch.shutdown import GroupShutdown
from samestep.torch.work import Finished, Pending, Received, Work

__all__ = ["Verbs"]

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Tensors = list[torch.Tensor]
_UNSET = timedelta(0)
_TORCH_SUM = dist.ReduceOp.RedOpType.SUM
_OPERATOR_TYPES = frozenset({dist.ReduceOp, dist.ReduceOp.RedOpType})
_profiler_enabled = torch.autograd._profiler_enabled
_compiling = torch.compiler.is_dynamo_compiling


def _verb(method: _Method) -> _Method:
    """Decorate a collective: hide it from autograd and modes, raise torch's errors, too, and record it in profiles."""
    label = f"samestep:{_profiler_label(method.__name__.lstrip('_'))}"

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if _compiling():
            return torch.compiler.disable(call)(self, *args, **options)
        with without_autograd():
            try:
                started = method(self, *args, **options)
            except Exception as error:
                raise for_torch(error) from None
        if torch.autograd._profiler_enabled():
            with torch.profiler.record_function(label) as event:
                event._call_end_callbacks_on_future(started.ending())
        return started

    return call  # type: ignore[return-value]


def _profiler_label(name: str) -> str:
    """The name in profiles. Scripts search for the second word, as in `gloo:all_reduce`."""
    for ours, theirs in (
        ("allreduce", "all_reduce"),
        ("allgather", "all_gather"),
        ("alltoall", "all_to_all"),
    ):
        name = name.replace(ours, theirs)
    return name


class Verbs:
    """The methods that torch calls on a group: each starts an operation and returns its Work.

    Names, arguments and semantics are torch's. Operations that torch has renamed have both names.
    """

    _comm: _core.Communicator
    _all_reduce_now: Callable[..., Any]
    """`_core.fast_allreduce`, or NotImplemented from it if the array does not fit the fast path."""
    _timeout: float
    _lifetime: GroupShutdown
    _n_collectives: int

    # ---- reductions

    def allreduce(self, tensors_: _Tensors, opts: Any = None) -> Work:
        if _compiling():  # this frame: the compiler traces what runs between the parts that it has compiled
            return torch.compiler.disable(Verbs.allreduce)(self, tensors_, opts)  # type: ignore[no-any-return]
        if type(opts) in _OPERATOR_TYPES:  # torch takes an operator in place of options, too
            opts = _options_with(opts)
        short = self._all_reduce_one(tensors_, opts) if len(tensors_) == 1 and opts is not None else None
        return self._all_reduce(tensors_, opts) if short is None else short

    def _all_reduce_one(self, tensors_: _Tensors, opts: Any) -> Work | None:
        """The frequent case, in a third of the time: a plain tensor, with no profiler or mode. Otherwise None.

        Without `async_op` the caller waits, so the operation runs here and no Work has to be kept.
        """
        wanted, run = opts.reduceOp, tensors.run_of(tensors_[0])
        op = SUM if wanted == _TORCH_SUM else tensors.operator_of(wanted)
        if op is None or run is None or _profiler_enabled() or has_modes():
            return None
        try:
            limit = opts.timeout
            if limit > _UNSET or getattr(opts, "asyncOp", True):
                part = self._comm.allreduce(run, None, op._value_, 1.0)
                # What `_started` does: its calls would take a tenth of the time of a short operation.
                self._n_collectives += 1
                started = Pending(
                    (part,), tensors_, self._timeout if limit <= _UNSET else limit.total_seconds()
                )
                self._lifetime.under_way(started)
                return started
            result = self._all_reduce_now(run, op)
        except Error as error:
            raise for_torch(error) from None
        if result is NotImplemented:
            return None
        self._n_collectives += 1
        return Finished(tensors_)

    @_verb
    def _all_reduce(self, tensors_: _Tensors, opts: Any) -> Work:
        if tensors_[0].layout is not torch.strided:
            (tensor,) = tensors_
            parts, finish = sparse.all_reduce(self._comm, tensor, _op(opts), self._seconds(opts))
            return self._started(parts, tensors_, opts, finish)
        code, factor = tensors.reduction(_op(opts))
        runs, copy_back = tensors.in_place(tensors_)
        parts = [self._comm.allreduce(run, None, code, factor) for run in runs]
        return self._started(parts, tensors_, opts, copy_back)

    def allreduce_coalesced(self, tensors_: _Tensors, opts: Any = None) -> Work:
        return self._all_reduce(tensors_, opts)

    @_verb
    def reduce(self, tensors_: _Tensors, opts: Any = None) -> Work:
        code, factor = tensors.reduction(_op(opts))
        root = _root(opts)
        runs, copy_back = tensors.written_unless(self._comm.rank != root, tensors_)
        parts = [self._comm.reduce(run, None, code, factor, root) for run in runs]
        return self._started(parts, tensors_, opts, copy_back)

    @_verb
    def reduce_scatter(self, outputs: _Tensors, inputs: list[_Tensors], opts: Any = None) -> Work:
        code, factor = tensors.reduction(_op(opts))
        parts: list[_core.Work] = []
        finishes = []
        for output, blocks in zip(outputs, inputs, strict=True):
            self._require_one_each(blocks, "reduce_scatter", "input")
            everything = tensors.joined(blocks)
            if tensors.same_count(blocks):
                (run,), copy_back = tensors.in_place([output])
                parts.append(self._comm.reduce_scatter(everything, run, code, factor))
                finishes += [copy_back] if copy_back else []
                continue
            parts.append(self._comm.allreduce(everything, None, code, factor))
            start = sum(block.numel() for block in blocks[: self._comm.rank])
            mine = everything[start : start + output.numel()]
            finishes.append(functools.partial(tensors.copy_back, mine, [output]))
        return self._started(parts, outputs, opts, _all_of(finishes))

    @_verb
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self._reduce_scatter_singles([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    @_verb
    def reduce_scatter_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Work:
        return self._reduce_scatter_singles(outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter_singles(self, outputs: _Tensors, inputs: _Tensors, opts: Any) -> Work:
        code, factor = tensors.reduction(_op(opts))
        runs, copy_back = tensors.in_place(outputs)
        parts = [
            self._comm.reduce_scatter(tensors.in_one_dimension(input), run, code, factor)
            for run, input in zip(runs, inputs, strict=True)
        ]
        return self._started(parts, outputs, opts, copy_back)

    # ---- one to all, all to one

    @_verb
    def broadcast(self, tensors_: _Tensors, opts: Any = None) -> Work:
        root = _root(opts)
        runs, copy_back = tensors.written_unless(self._comm.rank == root, tensors_)
        parts = [self._comm.bcast(tensors.memory(run), root) for run in runs]
        return self._started(parts, tensors_, opts, copy_back)

    @_verb
    def gather(self, outputs: list[_Tensors], inputs: _Tensors, opts: Any = None) -> Work:
        root, (input,) = _root(opts), inputs
        if self._comm.rank != root:
            return self._started([self._comm.gather(tensors.sent(input), None, root)], [], opts)
        (blocks,) = outputs
        self._require_one_each(blocks, "gather", "output")
        everything = tensors.flat(blocks, input.dtype)
        part = self._comm.gather(tensors.sent(input), tensors.memory(everything), root)
        return self._started([part], blocks, opts, lambda: tensors.copy_back(everything, blocks))

    @_verb
    def scatter(self, outputs: _Tensors, inputs: list[_Tensors], opts: Any = None) -> Work:
        root, (output,) = _root(opts), outputs
        everything = None
        if self._comm.rank == root:
            (blocks,) = inputs
            self._require_one_each(blocks, "scatter", "input")
            everything = tensors.memory(tensors.joined(blocks))
        (run,), copy_back = tensors.in_place([output])
        part = self._comm.scatter(everything, tensors.memory(run), root)
        return self._started([part], outputs, opts, copy_back)

    # ---- all to all

    @_verb
    def allgather(self, outputs: list[_Tensors], inputs: _Tensors, opts: Any = None) -> Work:
        return self._all_gather_lists(outputs, inputs, opts)

    @_verb
    def allgather_coalesced(self, outputs: list[_Tensors], inputs: _Tensors, opts: Any = None) -> Work:
        by_input = [list(blocks) for blocks in zip(*outputs, strict=True)]
        return self._all_gather_lists(by_input, inputs, opts)

    def _all_gather_lists(self, outputs: list[_Tensors], inputs: _Tensors, opts: Any) -> Work:
        parts, finishes = [], []
        for blocks, input in zip(outputs, inputs, strict=True):
            self._require_one_each(blocks, "all_gather", "output")
            everything = tensors.flat(blocks, input.dtype)
            mine, into = tensors.sent(input), tensors.memory(everything)
            if tensors.same_count(blocks):
                parts.append(self._comm.allgather(mine, into))
            else:
                parts.append(self._comm.allgatherv(mine, into, [block.numel() for block in blocks]))
            finishes.append(functools.partial(tensors.copy_back, everything, blocks))
        return self._started(parts, [t for blocks in outputs for t in blocks], opts, _all_of(finishes))

    @_verb
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        part = self._comm.allgather(tensors.sent(input), tensors.memory(output))
        return self._started([part], [output], opts)

    _allgather_base = all_gather_single

    @_verb
    def all_gather_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Work:
        parts = [
            self._comm.allgather(tensors.sent(input), tensors.memory(output))
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return self._started(parts, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_verb
    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Work:
        self._require_one_each(outputs, "all_to_all", "output")
        self._require_one_each(inputs, "all_to_all", "input")
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
        part = self._comm.alltoallv(
            tensors.memory(input),
            self._block_counts(input, input_splits, "input"),
            tensors.memory(output),
            self._block_counts(output, output_splits, "output"),
        )
        return self._started([part], [output], opts)

    alltoall_base = all_to_all_single

    def _block_counts(self, tensor: torch.Tensor, splits: Sequence[int], what: str) -> list[int]:
        rows = int(tensor.shape[0]) if tensor.dim() else tensor.numel()
        if not splits:
            if rows % self._comm.size:
                raise InvalidArgumentError(
                    f"all_to_all_single: the {rows} rows of the {what} are not a multiple of the "
                    f"{self._comm.size} ranks; give {what}_split_sizes"
                )
            splits = [rows // self._comm.size] * self._comm.size
        if len(splits) != self._comm.size or sum(splits) != rows:
            raise InvalidArgumentError(
                f"all_to_all_single: {what}_split_sizes {list(splits)} must be {self._comm.size} numbers that add "
                f"up to {rows}, the first extent of the {what}"
            )
        return [n * (tensor.numel() // rows) if rows else 0 for n in splits]

    @_verb
    def barrier(self, opts: Any = None) -> Work:
        return self._started([self._comm.barrier()], [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names all ranks that did not arrive, as that of every operation of this backend does.

        `torch.distributed.monitored_barrier` asks for gloo by name; call this one on the group:
        `torch.distributed.group.WORLD.monitored_barrier(timeout)`.
        """
        self.barrier().wait(timeout)

    # ---- messages

    @_verb
    def send(self, tensors_: _Tensors, dst: int, tag: int = 0) -> Work:
        return self._started([self._comm.send(tensors.memory(t), dst, tag) for t in tensors_], tensors_, None)

    @_verb
    def recv(self, tensors_: _Tensors, src: int, tag: int = 0) -> Work:
        parts = [self._comm.recv(tensors.memory(t), src, tag) for t in tensors_]
        return self._started(parts, tensors_, None, kind=Received)

    @_verb
    def recv_anysource(self, tensors_: _Tensors, tag: int = 0) -> Work:
        parts = [self._comm.recv(tensors.memory(t), -1, tag) for t in tensors_]
        return self._started(parts, tensors_, None, kind=Received)

    # ---- helpers

    def _started(
        self,
        parts: Sequence[_core.Work],
        result: _Tensors,
        opts: Any,
        finish: Callable[[], None] | None = None,
        kind: type[Work] = Pending,
    ) -> Work:
        self._n_collectives += kind is Pending
        started = kind(parts, result, self._seconds(opts), finish)
        self._lifetime.under_way(started)
        return started

    def _seconds(self, opts: Any) -> float:
        given = getattr(opts, "timeout", None)
        return given.total_seconds() if given is not None and given > _UNSET else self._timeout

    def _require_one_each(self, blocks: Sequence[Any], verb: str, what: str) -> None:
        if len(blocks) != self._comm.size:
            raise InvalidArgumentError(
                f"{verb}: there must be one {what} tensor for each of the {self._comm.size} ranks, got {len(blocks)}"
            )


def _op(opts: Any) -> Any:
    return getattr(opts, "reduceOp", dist.ReduceOp.SUM)


def _options_with(op: Any) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


def _root(opts: Any) -> int:
    return int(getattr(opts, "rootRank", 0))


def _all_of(finishes: Sequence[Callable[[], None]]) -> Callable[[], None] | None:
    if not finishes:
        return None

    def finish() -> None:
        for each in finishes:
            each()

    return finish
