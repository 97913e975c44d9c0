"""`%%ranks`: runs a cell on ranks that persist between cells."""

from __future__ import annotations

from typing import Any

from samestep.errors import Error
from samestep.multiprocessing.context import ProcessException
from samestep.notebook.ranks import Ranks

_GRACE_S = 10.0  # for the other ranks to finish a cell that failed on one
_USAGE = "write %%ranks N above the cell, with N at least 1, or %ranks end"


class _Magic:
    """The ranks of one notebook."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._n = 0  # of the last cell
        self._cells = 0

    def __call__(self, line: str, cell: str | None = None) -> None:
        """`%%ranks N` runs the cell; `%ranks end` ends the ranks, and `%ranks` says how many there are."""
        word = line.strip()
        if cell is None:
            if word == "end":
                self.end()
            elif word:
                raise Error(_USAGE)
            print(f"{self._ranks.n if self._ranks is not None and self._ranks.alive else 0} ranks")
            return
        word = word or str(self._n or "")
        if not (word.isascii() and word.isdigit() and int(word)):
            raise Error(f"%%ranks {word}: {_USAGE}")
        self._run(int(word), cell)

    def _run(self, n: int, cell: str) -> None:
        ranks, self._n = self._ranks, n
        if ranks is not None and not ranks.alive:
            print("%%ranks: the ranks of earlier cells have ended; these are new ones")
        if ranks is None or not ranks.alive or ranks.n != n:
            self.end()
            ranks = self._ranks = Ranks(n)
        self._cells += 1
        try:
            ranks.order("cell", (cell, self._cells), grace=_GRACE_S)
        except (ProcessException, KeyboardInterrupt):
            if not ranks.n:
                self._ranks = None
                print(
                    "%%ranks: all ranks have been ended and their variables are lost; the next cell starts new ones"
                )
            raise

    def end(self) -> None:
        """Ends the ranks, if there are any."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.end()


_magics: dict[int, _Magic] = {}


def load(shell: Any) -> None:
    """Registers `%%ranks` and `%ranks` with an IPython shell."""
    magic = _magics.setdefault(id(shell), _Magic())
    shell.register_magic_function(magic, "line_cell", "ranks")


def unload(shell: Any) -> None:
    """Ends the ranks of a shell. Its magics stay; a later cell starts new ranks."""
    magic = _magics.pop(id(shell), None)
    if magic is not None:
        magic.end()
