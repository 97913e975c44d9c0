"""The times of `samestep bench` as a figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from samestep._util.text import size

# Okabe and Ito's colours, distinct with any colour vision; the markers tell the same in grey.
_STYLES = {"samestep": ("#0072B2", "o"), "shared": ("#009E73", "s"), "mpi4py": ("#D55E00", "^")}


def draw(times: Mapping[int, Mapping[str, float]], title: str, path: Path) -> None:
    """Microseconds over size, both on logarithmic axes, written to `path`.

    Args:
      times: size -> contender -> seconds.
      title: above the figure.
      path: its ending decides the format.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    sizes = sorted(times)
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name in times[sizes[0]]:
        colour, marker = _STYLES[name]
        axes.plot(sizes, [times[s][name] * 1e6 for s in sizes], color=colour, marker=marker, label=name)
    axes.set(xscale="log", yscale="log", xlabel="bytes that each rank passes in", ylabel="us per call")
    axes.set_xticks(sizes, [size(s) for s in sizes], rotation=45, ha="right")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(title, fontsize=8, wrap=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)
