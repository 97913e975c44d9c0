"""What is carried how: verb by backend and device. One table, for the page and for the tests.

    python -m samestep.distributed.support > docs/support.md

Each cell is run by `tests/distributed/test_dist_support.py`, which counts the operations of the engine as well.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = [
    "BEYOND",
    "COLUMNS",
    "COMPOSED",
    "IN_2019",
    "MEANING",
    "NATIVE",
    "STAGED",
    "VERBS",
    "Column",
    "page",
]

NATIVE: Final = "native"
COMPOSED: Final = "composed"
STAGED: Final = "staged"

MEANING: Final = {
    NATIVE: "one operation of the backend's engine",
    COMPOSED: "several of them, or work of the ranks themselves besides",
    STAGED: "by way of host memory",
}


class Column(NamedTuple):
    """Where arrays lie, and the backend that carries them from there."""

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

_HOST: Final = (NATIVE, NATIVE, NATIVE)  # nccl has a host backend beside it
_PARTS: Final = (COMPOSED, COMPOSED, COMPOSED)
_COLLECTIVE: Final = (*_HOST, STAGED, STAGED, NATIVE)
_ROUTED: Final = (*_HOST, STAGED, STAGED, COMPOSED)  # sends and receives of NCCL
_RAGGED: Final = (*_PARTS, STAGED, STAGED, COMPOSED)
_BY_HOST: Final = (*_HOST, STAGED, STAGED, STAGED)
_PARTS_BY_HOST: Final = (*_PARTS, STAGED, STAGED, STAGED)
_LISTS: Final = (*_PARTS, STAGED, STAGED, NATIVE)
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
    "broadcast_multigpu": _LISTS,
    "all_reduce_multigpu": _LISTS,
    "reduce_multigpu": _LISTS,
    "all_gather_multigpu": (*_PARTS, STAGED, STAGED, COMPOSED),
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
# What is carried

<!-- Made by `python -m samestep.distributed.support > docs/support.md`. -->

Verbs by backend and by where the arrays lie. Every cell is run by a test, `tests/distributed/test_dist_support.py`, at
one, two and three ranks, which counts the operations, too. To the right stands what `torch.distributed` of June 2019
could do: ✓, ✘, and ? where it depended on the MPI it was built with.

{meaning}
"""

_DEVICES = """
Cells of arrays on devices are run on [stand-ins](gpus.md) of CUDA and NCCL. ROCm takes the same paths. Verbs with an
array for each rank pack them in host memory; `Backend.allgather`, `gather` and `scatter`, which have one array
instead, go through NCCL. Those for several devices go through NCCL where each array of a list is on a device of its
own.
"""

_BEYOND = """
## Beyond those

Methods of [`Backend`](api/operations.md) for what torch had no functions in 2019. `get_distributed_backend()` is the
world's, and what `new_group` returns to members is one.
"""


def page() -> str:
    """The page of the documentation, as Markdown.

    Example:
      >>> print(page().splitlines()[0])
      # What is carried
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
