"""Ranks from a notebook: `launch(function, 4)`, and `%%ranks 4` for cells.

%load_ext samestep

%%ranks 4
import samestep as ss
backend = ss.initialize()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["launch"]


def launch(function: Callable[..., Any], n: int, /, *arguments: Any, **keywords: Any) -> list[Any]:
    """Calls a function in `n` fresh interpreters of this host, each as one rank; returns the results by rank.

    The function starts with `samestep.initialize()`, as a script does, and returns something that can be pickled. It
    may be defined in a cell of a notebook or in a script if cloudpickle is installed
    (`pip install samestep[notebook]`), else it has to be importable. What the ranks print appears line by line, with
    the rank in front. If a rank fails or a `KeyboardInterrupt` arrives, all ranks are stopped.

    Args:
      function: called with `arguments` and `keywords`. Its backend is finalized when it returns.
      n: how many ranks, at least 1.

    Raises:
      InvalidArgumentError: `n` is below 1, or the function or an argument cannot be pickled. Nothing was started.
      samestep.multiprocessing.ProcessRaisedException: the function raised on a rank; the first such error, with its
        traceback. `error_index` is the rank.
      samestep.multiprocessing.ProcessExitedException: a rank exited or was ended by a signal.

    Example:
      >>> import samestep as ss
      >>> import math
      >>> ss.launch(math.sqrt, 2, 9.0)
      [3.0, 3.0]
    """
    from samestep.notebook.ranks import launch_ranks

    return launch_ranks(function, n, arguments, keywords)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext samestep`: the magics `%%ranks` and `%ranks`."""
    from samestep.notebook import magics

    magics.load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext samestep`: ends the ranks."""
    from samestep.notebook import magics

    magics.unload(shell)
