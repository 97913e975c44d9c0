"""What a type checker has to take, with the types it has to find, and what it has to refuse.

Checked by `mypy` (test_typing.py, and lint of .ci/run); never run. An `ignore` that is not needed is an error there, so
each of them states that the line is refused.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import samestep as ss
from samestep import distributed as dist
from samestep import fluxmpi

if TYPE_CHECKING:
    from typing_extensions import assert_type

    Floats = npt.NDArray[np.float64]


def verbs_return_the_type_they_were_given(
    backend: ss.Backend, x: "Floats", tree: "dict[str, Floats]"
) -> None:
    assert_type(backend.allreduce(x), "Floats")
    assert_type(backend.allreduce(x, "avg", out=x), "Floats")
    assert_type(backend.allreduce(2), int)
    assert_type(ss.allreduce(backend, x, ss.MAX), "Floats")
    assert_type(backend.iallreduce(x, max).wait(), "Floats")
    assert_type(backend.reduce(x, "sum", 0), "Floats")
    assert_type(backend.bcast(x, 0), "Floats")
    assert_type(backend.allgather(x), "Floats")
    assert_type(backend.allgather(2.5), "np.ndarray[Any, Any]")
    assert_type(backend.gather(x), "Floats | None")
    assert_type(backend.scatter(x), "Floats")
    assert_type(backend.scatter(), Any)
    assert_type(backend.alltoallv(x, [1]), "tuple[Floats, list[int]]")
    assert_type(backend.recv(x), ss.Status)
    assert_type(backend.irecv(x).wait(), ss.Status)
    assert_type(backend.iprobe(), "ss.Status | None")
    assert_type(backend.allgather_object("a"), "list[str]")
    assert_type(ss.synchronize(backend, tree), "dict[str, Floats]")
    assert_type(ss.allreduce_gradients(backend, tree, ss.premul(0.5)), "dict[str, Floats]")
    assert_type(fluxmpi.allreduce(x), "Floats")


def names_that_are_wrong_are_refused(backend: ss.Backend, x: "Floats") -> None:
    backend.allreduce(x, "averge")  # type: ignore[arg-type]
    ss.allreduce(backend, x, "averge")  # type: ignore[arg-type]
    backend.iallreduce(x, op="SUM")  # type: ignore[arg-type]
    fluxmpi.allreduce(x, "mean")  # type: ignore[arg-type]
    ss.allreduce_gradients(backend, [x], "mean")  # type: ignore[arg-type]
    dist.all_reduce(x, "mean")  # type: ignore[arg-type]
    ss.initialize("mpii")  # type: ignore[arg-type]
    ss.get_distributed_backend("cuda")  # type: ignore[arg-type]
    dist.init_process_group("glo")  # type: ignore[arg-type]
    ss.synchronize(backend, [x], objects="send")  # type: ignore[arg-type]
    ss.DistributedSampler(10, backend, mode="cut")  # type: ignore[arg-type]
