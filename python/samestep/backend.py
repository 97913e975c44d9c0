"""The backend classes: a group of ranks with all of its operations."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any, Literal, TypeVar

from samestep import arrays
from samestep.errors import InvalidArgumentError
from samestep.group.group import Group
from samestep.reduce_ops import AVG, Op

__all__ = ["Backend", "MPIBackend", "NCCLBackend", "NativeBackend"]

_Tree = TypeVar("_Tree")


class Backend(Group):
    """A group of ranks: the whole job, as `initialize` returns it, or a subgroup.

    Do not construct it; call `samestep.initialize()`, `split` or `group`.
    """

    def empty_like(self, tree: Any) -> Any:
        """Return a tree of new arrays with the shapes, dtypes and libraries (NumPy, torch) of the leaves of `tree`.

        The elements are not initialised. Other leaves are returned as they are.
        """
        from samestep import trees

        flat = trees.flatten(tree)
        return flat.rebuild(
            [arrays.of(leaf).like(leaf) if arrays.is_array(leaf) else leaf for leaf in flat.leaves]
        )

    def synchronize(
        self,
        tree: _Tree,
        *,
        root: int = 0,
        objects: Literal["keep", "pickle"] = "keep",
        timeout: float | None = None,
    ) -> _Tree:
        """Broadcast all leaves of a tree from rank `root`; see `samestep.synchronize`."""
        from samestep.trees import broadcast

        return broadcast.synchronize(self, tree, root=root, objects=objects, timeout=timeout)

    def allreduce_gradients(
        self, grads: _Tree, op: Op = AVG, *, weight: float | None = None, timeout: float | None = None
    ) -> _Tree:
        """Average all arrays of a tree over the ranks, fused into few messages; see `samestep.allreduce_gradients`."""
        from samestep.step import gradients

        return gradients.allreduce_gradients(self, grads, op, weight=weight, timeout=timeout)

    def allreduce_tree(
        self, tree: _Tree, op: Op = "sum", *, weight: float | None = None, timeout: float | None = None
    ) -> _Tree:
        """Reduce all arrays of a tree over all ranks, fused into few messages; writable leaves are reduced in place.

        With `weight` and op AVG, the weighted mean; see `samestep.allreduce_tree`.

        Returns:
          The tree with the reduced leaves.

        Example:
          >>> import numpy as np, samestep as ss
          >>> backend = ss.initialize()
          >>> backend.allreduce_tree({"w": np.ones(2), "b": np.zeros(1)})
          {'w': array([1., 1.]), 'b': array([0.])}
        """
        from samestep.step import gradients

        return gradients.allreduce_tree(self, tree, op, weight=weight, timeout=timeout)

    def same(self, tree: Any, *, timeout: float | None = None) -> str:
        """Check that all ranks hold the same bits in all leaves of a tree. Collective.

        Every rank hashes each of its leaves (128 bits that depend on the position of every byte). The ranks exchange
        16 bytes; only if these differ do they exchange the hashes of the leaves.

        Args:
          tree: containers of arrays, numbers and texts; a torch module or optimizer stands for its state. Of functions,
            classes and modules the names are compared.
          timeout: seconds; None for the group's timeout.

        Returns:
          The hash of the tree, 32 hexadecimal digits, the same on all ranks. It also depends on the names, dtypes and
          shapes of the leaves.

        Raises:
          MismatchError: on all ranks, if they differ; names the first leaf that differs, and the ranks whose bits
            differ from those of most ranks.
          InvalidArgumentError: on all ranks, if a leaf of any rank is an object that cannot be compared; names it.

        Example:
          >>> import numpy as np, samestep as ss
          >>> backend = ss.initialize()
          >>> backend.same({"w": np.arange(3.0)}) == backend.same({"w": np.array([0.0, 2.0, 1.0])})
          False
        """
        from samestep.step import state_hash

        return state_hash.same(self, tree, timeout=timeout)

    def together(self, *, timeout: float | None = None) -> AbstractContextManager[Backend, None]:
        """A block that all ranks leave together: an exception on one rank ends it on all of them.

        All ranks enter the block. If a rank leaves it with an exception, the others get a `StepError` that names the
        rank, the class, the text and the line: in the operation of this group, or of a group made from it, in which
        they wait, or else at the end of the block. The rank itself gets the same error, with the exception as
        `__cause__`; a `KeyboardInterrupt` or `SystemExit` is passed on unchanged. Afterwards the group and the groups
        made from it remain usable. Operations and messages that had not ended are dropped, and the arrays that they
        were to write are undefined. If a rank returns from the block early while others wait for it in a collective,
        the block ends likewise.

        Blocks may be nested, also with groups made from the group. Leaving takes one reduction of 40 bytes. Entering is
        free, except that the first block of a group makes a second communicator.

        Args:
          timeout: seconds to wait for the others at the end of the block, else the group's.

        Raises:
          StepError: see above; on all ranks of the group.
          MismatchError: on all ranks, if they leave different blocks.
          TimeoutError: a rank did not reach the end of the block in time; the group ends.

        Source: ULFM (MPI_Comm_revoke, MPI_Comm_agree), for exceptions in place of processes that die.

        Example:
          >>> import numpy as np, samestep as ss
          >>> backend = ss.initialize()
          >>> try:
          ...     with backend.together():
          ...         if backend.rank == 0:
          ...             raise ValueError("bad batch")
          ...         backend.allreduce(np.ones(3))
          ... except ss.StepError as error:
          ...     print(error.rank, error.kind, error.text)
          0 ValueError bad batch
          >>> backend.allreduce(1.0) == backend.size
          True
        """
        from samestep.step.together import Together

        return Together(self, timeout)

    def shrink(self) -> None:
        """Go on without lost ranks, in this object, after a `PeerLostError` or `TimeoutError`. Collective.

        All ranks that are left call it, each after it has got such an error; a rank that has not called it within the
        timeout of the group is killed by the launcher. `rank`, `size` and the hosts change in place: the ranks keep
        their order. Groups made from this one are closed; make them again. `Accumulator`, `DistributedSampler` and
        `DistributedOptimizer(shards=)` follow. If more ranks are lost meanwhile, the others go on without them, too.
        `TrainState` does this, and more: it repeats the step, and takes in ranks that were started again.

        Raises:
          InvalidArgumentError: the job was not started by `samestep run --min-ranks`, which knows who is left; or the
            group is not the world.
          PeerLostError: the others have gone on without this rank.
          UnavailableError: the launcher has ended, or cannot be reached.

        Source: ULFM (MPI_Comm_shrink).

        Example:
          >>> import samestep as ss
          >>> backend = ss.initialize()
          >>> try:
          ...     total = backend.allreduce(1.0)
          ... except ss.PeerLostError:
          ...     backend.shrink()
        """
        if self._regroup is None:
            raise InvalidArgumentError(
                f"shrink: group {self.name} cannot go on after a loss: start with `samestep run -n N --min-ranks K "
                "script.py`, and call it on what initialize() has returned"
            )
        self._regroup()

    def any(self, flag: bool, *, timeout: float | None = None) -> bool:
        """Whether `flag` is true on any rank; the same answer on all ranks. Collective, 8 bytes.

        Example:
          >>> import samestep as ss
          >>> backend = ss.initialize()
          >>> backend.any(backend.rank == 0), backend.any(False)
          (True, False)
        """
        from samestep.step import agree

        return agree.any_rank(self, flag, "any()", timeout)

    def all(self, flag: bool, *, timeout: float | None = None) -> bool:
        """Whether `flag` is true on all ranks; the same answer on all ranks. Collective, 8 bytes.

        Example:
          >>> import samestep as ss
          >>> backend = ss.initialize()
          >>> backend.all(True), backend.all(backend.rank > 0)
          (True, False)
        """
        from samestep.step import agree

        return not agree.any_rank(self, not flag, "all()", timeout)

    def all_finite(self, tree: Any, *, timeout: float | None = None) -> bool:
        """Whether all elements of all arrays and numbers of a tree are finite, on all ranks. Collective, 8 bytes.

        For skipping a step on all ranks, as a loss scaler does. It is not needed for gradients that have been averaged:
        they have the same infinities and NaNs on all ranks, so each rank may check its own.

        Args:
          tree: of any arrays, numbers and containers; a torch module stands for the `.grad` of its parameters. Whole
            numbers, flags and texts are finite.
          timeout: seconds, else the group's.

        Raises:
          InvalidArgumentError: on all ranks, if a leaf of any rank is an object whose numbers cannot be seen; names it.

        Example:
          >>> import numpy as np, samestep as ss
          >>> backend = ss.initialize()
          >>> backend.all_finite({"w": np.ones(2)}), backend.all_finite([np.array([1.0, np.nan])])
          (True, False)
        """
        from samestep.step import agree

        return agree.all_finite(self, tree, timeout)

    def println(self, *args: Any, timeout: float | None = None) -> None:
        """Print one line from every rank, in rank order and never interleaved. Collective.

        Args:
          args: as for `print`; they may differ between ranks.
          timeout: seconds; None for the group's timeout.
        """
        from samestep.group import printing

        printing.write(self, " ".join(map(str, args)), end="\n", timeout=timeout)


for _class in Backend.__mro__[1:-1]:
    for _name, _verb in vars(_class).items():  # for the texts of TypeErrors: "Backend.bcast() takes ..."
        _function = _verb
        while _function is not None:
            if isinstance(_function, FunctionType):
                _function.__qualname__ = f"Backend.{_name}"
            _function = getattr(_function, "__wrapped__", None)  # below decorators


class MPIBackend(Backend):
    """The ranks of an MPI job, with any MPI library.

    Arrays in host memory use shared memory within a host and MPI between hosts.

    Started by `mpirun`, `srun` or `samestep run`. See `samestep.initialize`.
    """

    kind = "mpi"


class NativeBackend(Backend):
    """Ranks that need nothing but this package: shared memory within a host, TCP between hosts.

    Started by `samestep run`, torchrun or any launcher that sets the same variables. See `samestep.initialize`.
    """

    kind = "native"


class NCCLBackend(Backend):
    """Device arrays through NCCL or RCCL; host arrays through MPI or the native backend. See `samestep.initialize`."""

    kind = "nccl"
