"""What going on after a loss costs before there is one, and how long it takes then.

    python benchmarks/survive.py [--picture docs/assets/survive.svg] [--compare 5]

1. Steps of a small model in `TrainState` and in a plain loop over `DistributedSampler.steps`, in turns: microseconds
   that a step takes longer, median of the slowest rank.
2. Seconds from the SIGKILL of one of four ranks to the end of the next step on the others, median and longest of ten.

3. How much more processor time a step takes each of two ranks with audits than without, from medians in turns.

`--compare` does what `losses/compare.py` says, with torchrun and torchft, as far as they are installed.

The picture shows the loss of a small training on one rank, and on four ranks that are killed and started again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import samestep as ss

N_PARAMETERS, STEPS, TURNS, KILLS = 1000, 400, 15, 10
AUDIT_STEPS, AUDIT_SHARDS, AUDIT_RATES = 40, 4, (0.01, 0.05, 0.25)


def cost() -> None:
    """Of a step, on each rank; rank 0 prints it."""
    backend = ss.initialize()
    x = np.arange(float(STEPS * 8))
    total = ss.Accumulator(backend, shards=4)

    def add_all(shards: object) -> None:
        for shard in shards:  # type: ignore[attr-defined]
            total.add(np.full(N_PARAMETERS, x[shard.items].sum()), shard=shard.index, weight=len(shard))

    def plain() -> float:
        w = np.zeros(N_PARAMETERS)
        sampler = ss.DistributedSampler(backend, len(x), batch_size=8, shards=4)
        backend.barrier()
        begin = time.perf_counter()
        for shards in sampler.steps():
            add_all(shards)
            w = w - 1e-9 * total.mean()
        return (time.perf_counter() - begin) / STEPS

    def kept() -> float:
        sampler = ss.DistributedSampler(backend, len(x), batch_size=8, shards=4)
        state = ss.TrainState(backend, w=np.zeros(N_PARAMETERS), sampler=sampler)
        backend.barrier()
        begin = time.perf_counter()
        for step in state.steps(epochs=1):
            with step:
                add_all(step)
                state.w = state.w - 1e-9 * total.mean()
        return (time.perf_counter() - begin) / STEPS

    found = []
    for _ in range(TURNS):
        pair = np.array([plain(), kept()])
        found.append(backend.allreduce(pair, "max"))
    plainly, more = np.median([p for p, _ in found]), np.median([k - p for p, k in found])
    if backend.rank == 0:
        print(json.dumps([plainly * 1e6, more * 1e6]))


def audits() -> None:
    """Processor time of a step without audits, of one that is spared, and of one that is audited: prints medians."""
    backend = ss.initialize()
    x = np.random.RandomState(0).standard_normal((500, 300))
    n_shards = AUDIT_SHARDS * backend.size
    total = ss.Accumulator(backend, shards=n_shards)
    found: dict[str, list[float]] = {"without": [], "spared": [], "audited": []}

    def measure(rate: float) -> None:
        n_items = AUDIT_STEPS * n_shards
        sampler = ss.DistributedSampler(backend, n_items, batch_size=n_shards, shards=n_shards)
        state = ss.TrainState(backend, w=np.ones((300, 300)), sampler=sampler, audit=rate)
        backend.barrier()
        for step in state.steps(epochs=1):
            begin, n_computed = time.process_time(), 0
            with step:
                for shard in step:
                    total.add(x.T @ (x @ state.w), shard=shard.index, weight=len(shard))
                    n_computed += 1
                total.mean()
            kind = "audited" if n_computed > AUDIT_SHARDS else "spared" if rate else "without"
            found[kind].append(time.process_time() - begin)

    for _ in range(TURNS):
        measure(0.0)
        measure(0.5 / AUDIT_SHARDS)  # every other step
    if backend.rank == 0:
        print(json.dumps([statistics.median(seconds) for seconds in found.values()]))


def audit_cost(rate: float, without: float, spared: float, audited: float) -> float:
    """What audits add to a step, as a part of it. Pure.

    Args:
      rate: of the shards.
      without, spared, audited: processor time of a step, as `audits` prints them.

    Example:
      >>> round(audit_cost(0.1, 1.0, 1.0, 1.25), 6)
      0.1
    """
    part = rate * AUDIT_SHARDS  # of the steps
    return (part * audited + (1 - part) * spared) / without - 1


def recovery(path: str) -> None:
    """Rank 1 dies in step 20; the others note when their next step has ended."""
    backend = ss.initialize()
    x = np.arange(400.0)
    sampler = ss.DistributedSampler(backend, len(x), batch_size=8, shards=4)
    total = ss.Accumulator(backend, shards=4)
    state = ss.TrainState(backend, w=np.zeros(N_PARAMETERS), sampler=sampler)
    for step in state.steps(epochs=1):
        with step:
            if backend.size == 4 and state.step == 20 and backend.rank == 1:
                Path(path, "killed").write_text(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            for shard in step:
                total.add(np.full(N_PARAMETERS, x[shard.items].sum()), shard=shard.index, weight=len(shard))
            state.w = state.w - 1e-9 * total.mean()
        if state.step == 21:
            Path(path, f"rank {backend.rank}").write_text(repr(time.time()))


def losses(path: str) -> None:
    """A small network learns a sine; the rank that is rank 0 of the moment notes time, step and loss."""
    backend = ss.initialize()
    draw = np.random.RandomState(0)
    x = draw.uniform(-3, 3, (2000, 1))
    y = np.sin(2 * x)
    first = {"w": draw.standard_normal((1, 32)), "b": np.zeros(32), "v": 0.1 * draw.standard_normal((32, 1))}
    sampler = ss.DistributedSampler(backend, len(x), batch_size=64, shards=8, seed=1)
    total = ss.Accumulator(backend, shards=8)
    state = ss.TrainState(backend, params=first, sampler=sampler)
    for step in state.steps(epochs=16):
        with step:
            for shard in step:
                p, here = state.params, x[shard.items]
                hidden = np.tanh(here @ p["w"] + p["b"])
                error = 2 * (hidden @ p["v"] - y[shard.items]) / max(1, len(shard))
                into = (error @ p["v"].T) * (1 - hidden**2)
                grads = {"w": here.T @ into, "b": into.sum(0), "v": hidden.T @ error}
                total.add(grads, shard=shard.index, weight=len(shard))
                time.sleep(0.002)
            mean = total.mean()
            state.params = {name: value - 0.05 * mean[name] for name, value in state.params.items()}
        if backend.rank == 0:
            p = state.params
            loss = float(((np.tanh(x @ p["w"] + p["b"]) @ p["v"] - y) ** 2).mean())
            with Path(path, os.environ.get("SAMESTEP_UID", "alone")).open("a") as file:
                file.write(json.dumps([time.time(), state.step, loss]) + "\n")


def noted(path: str) -> list[tuple[float, int, float]]:
    """What `losses` has written, by step: nothing of those after which rank 0 died, several times of repeated ones."""
    lines = [line for file in Path(path).iterdir() for line in file.read_text().splitlines()]
    return sorted((tuple(json.loads(line)) for line in lines), key=lambda each: each[1])


def picture(output: Path) -> None:
    """The loss by step with ranks that are killed, on that of an undisturbed run, and when they were."""
    import headline
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams.update(headline.STYLE)
    from matplotlib import pyplot as plt

    with tempfile.TemporaryDirectory() as path:
        run(1, function="losses", arguments=(path,))
        alone = noted(path)
    with tempfile.TemporaryDirectory() as path:
        command = [
            sys.executable,
            "-m",
            "samestep",
            "run",
            "-n",
            "4",
            "--min-ranks",
            "2",
            "--max-restarts",
            "100",
        ]
        command += ["--chaos", "0.7", __file__, "losses", path]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            kills = [time.time() for line in process.stderr if "SIGKILL" in line]
        together = noted(path)
    assert {each[1:] for each in together} <= {each[1:] for each in alone}, "another loss"
    figure, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
    label = f"four ranks, with {len(kills)} kills (below)"
    axes.plot(
        [s for _, s, _ in alone], [v for *_, v in alone], color=headline.MPI, linewidth=4, label="one rank"
    )
    axes.plot(
        [s for _, s, _ in together],
        [v for *_, v in together],
        color=headline.OURS,
        linewidth=1.2,
        label=label,
    )
    for kill in kills:
        step = max((s for at, s, _ in together if at <= kill), default=0)
        axes.axvline(step, color=headline.GLOO, linewidth=0.8, ymax=0.1)
    axes.set(yscale="log", xlabel="step", ylabel="loss")
    axes.minorticks_off()
    axes.legend(frameon=False)
    figure.savefig(output, transparent=True, metadata={"Date": None})
    print(f"wrote {output}: {len(kills)} kills, the same losses in all {len(alone)} steps")


def run(n: int, *words: str, function: str, arguments: tuple[str, ...] = ()) -> str:
    """What one run prints."""
    command = [sys.executable, "-m", "samestep", "run", "-n", str(n), "--raw", *words, __file__, function]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--picture", type=Path, help="only write this file")
    parser.add_argument(
        "--compare", type=int, metavar="N", help="only compare with other systems, N runs of each"
    )
    given = parser.parse_args()
    if given.picture is not None:
        picture(given.picture)
        return
    if given.compare is not None:
        sys.path.append(str(Path(__file__).parent / "losses"))
        import compare

        compare.main(given.compare)
        return
    print("| ranks | plain loop, us a step | TrainState, us more |\n|---|---|---|")
    for n in (1, 2, 4):
        plainly, more = json.loads(run(n, function="cost"))
        print(f"| {n} | {plainly:.0f} | {more:.0f} |")
    print("| audits at a rate of | cost |\n|---|---|")
    medians = json.loads(run(2, function="audits"))
    for rate in AUDIT_RATES:
        print(f"| {rate:.0%} | {audit_cost(rate, *medians):.1%} |")
    seconds = []
    for _ in range(KILLS):
        with tempfile.TemporaryDirectory() as path:
            run(4, "--min-ranks", "1", function="recovery", arguments=(path,))
            times = {file.name: float(file.read_text()) for file in Path(path).iterdir()}
            seconds.append(max(times.values()) - times["killed"])
    print(
        f"from SIGKILL to the end of the next step: {statistics.median(seconds):.3f} s, at most {max(seconds):.3f}"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in ("cost", "recovery", "losses", "audits"):
        globals()[sys.argv[1]](*sys.argv[2:])
    else:
        main()
