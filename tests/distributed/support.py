"""The support matrix of `samestep.distributed`: operation by backend and device, for the page and for the tests.

    python tests/distributed/support.py > docs/support.md

`test_dist_support.py` runs each cell, and counts the operations of the core.
"""

from __future__ import annotations

from typing import Final, NamedTuple

NATIVE: Final = "native"
COMPOSED: Final = "composed"
STAGED: Final = "staged"

MEANING: Final = {
    NATIVE: "one operation of the core",
    COMPOSED: "several operations of the core, or additional work in Python",
    STAGED: "through a copy in host memory",
}


class Column(NamedTuple):
    """A backend, and the device of the arrays."""

    backend: str
    device: str


COLUMNS: Final = (
    Column("gloo", "CPU"),
    Column("mpi", "CPU"),
    Column("nccl", "CPU"),
    Column("gloo", "CUDA"),
    Column("mpi", "CUDA"),
    Column("nccl", "CUDA"),
)

_HOST: Final = (NATIVE, NATIVE, NATIVE)  # nccl includes a backend for host arrays
_PARTS: Final = (COMPOSED, COMPOSED, COMPOSED)
_COLLECTIVE: Final = (*_HOST, STAGED, STAGED, NATIVE)
_ROUTED: Final = (*_HOST, STAGED, STAGED, COMPOSED)  # sends and receives of NCCL
_RAGGED: Final = (*_PARTS, STAGED, STAGED, COMPOSED)
_BY_HOST: Final = (*_HOST, STAGED, STAGED, STAGED)
_PARTS_BY_HOST: Final = (*_PARTS, STAGED, STAGED, STAGED)
_OBJECTS: Final = (COMPOSED,) * 6

VERBS: Final = {
    "send": _BY_HOST,
    "recv": _BY_HOST,
    "isend": _BY_HOST,
    "irecv": _BY_HOST,
    "broadcast": _COLLECTIVE,
    "all_reduce": _COLLECTIVE,
    "reduce": _COLLECTIVE,
    "all_gather": _BY_HOST,
    "gather": _BY_HOST,
    "scatter": _BY_HOST,
    "barrier": (NATIVE,) * 6,
    "broadcast_multigpu": _BY_HOST,
    "all_reduce_multigpu": _BY_HOST,
    "reduce_multigpu": _BY_HOST,
    "all_gather_multigpu": _BY_HOST,
}
"""Functions of `samestep.distributed`, by column."""

BEYOND: Final = {
    "reduce_scatter": _COLLECTIVE,
    "alltoall": _ROUTED,
    "alltoallv": _RAGGED,
    "allgatherv": _RAGGED,
    "gatherv": _RAGGED,
    "scatterv": _RAGGED,
    "sendrecv": _PARTS_BY_HOST,
    "bcast_object": _OBJECTS,
    "allgather_object": _OBJECTS,
    "gather_object": _OBJECTS,
    "scatter_object": _OBJECTS,
}
"""Methods of `samestep.Backend` that torch had no function for in 2019, by column."""

IN_2019: Final = {
    "send": "✓✘✓?✘✘",
    "recv": "✓✘✓?✘✘",
    "broadcast": "✓✓✓?✘✓",
    "all_reduce": "✓✓✓?✘✓",
    "reduce": "✓✘✓?✘✓",
    "all_gather": "✓✘✓?✘✓",
    "gather": "✓✘✓?✘✘",
    "scatter": "✓✘✓?✘✘",
    "barrier": "✓✘✓?✘✓",
}
"""torch.distributed of June 2019: gloo on CPU and GPU, mpi, nccl."""

_HEAD = """\
# Support matrix

<!-- Made by `python tests/distributed/support.py > docs/support.md`. -->

The functions of [`samestep.distributed`](torch-distributed.md) by backend and device of the arrays. A test runs every
cell on one, two and three ranks and counts the operations: `tests/distributed/test_dist_support.py`. The columns to the
right show `torch.distributed` of June 2019: ✓ supported, ✘ not supported, ? depending on the MPI library of the build.

{meaning}
"""

_DEVICES = """
Cells with device arrays run on [stand-ins](gpus.md) of CUDA and NCCL. ROCm uses the same code. Functions that take one
array per rank pack the arrays in host memory; `Backend.allgather`, `gather` and `scatter`, which take a single array,
use NCCL. The functions for several devices use NCCL if each array of a list is on a device of its own.
"""

_BEYOND = """
## Further operations

Methods of [`Backend`](api/operations.md) that had no counterpart in torch in 2019. `get_distributed_backend()` returns
the backend of all ranks; `new_group` returns that of a group.
"""


def page() -> str:
    """Return the page of the documentation, as Markdown.

    Example:
      >>> print(page().splitlines()[0])
      # Support matrix
    """
    used = {how for cells in (VERBS | BEYOND).values() for how in cells}
    meaning = [f"- **{how}**: {text}." for how, text in MEANING.items() if how in used]
    here = [f"{backend}, {device}" for backend, device in COLUMNS]
    there = [f"2019: {name}, {device}" for name in ("gloo", "mpi", "nccl") for device in ("CPU", "GPU")]
    first = [[f"`{verb}`", *cells, *IN_2019.get(verb, " " * 6)] for verb, cells in VERBS.items()]
    more = [[f"`{verb}`", *cells] for verb, cells in BEYOND.items()]
    parts = [_HEAD.format(meaning="\n".join(meaning)), _table(["", *here, *there], first)]
    return "\n".join([*parts, _DEVICES, _BEYOND, _table(["", *here], more)]).replace("\n\n\n", "\n\n")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


if __name__ == "__main__":
    print(page(), end="")
