"""What `scaling.py measure` measures in network namespaces, and the prices that follow.

Prices come from programs of their own, in which nothing is reduced over hosts; the formulas are then checked on
allreduces, none of which a price was taken from.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
RANK = Path(__file__).with_name("scaling_rank.py")
sys.path.insert(0, str(Path(__file__).parent))
import cost_model as cost  # noqa: E402
from cost_model import KIB, MIB  # noqa: E402

FREE, NO_LIMIT = "none", 1e15  # bytes/s; what counts then is the processor's time for messages
LIMIT = "1gbit"
HOSTS = (2, 3, 4, 6, 8)
CROWDED = (3, 4, 8)  # hosts that the prices of ranks that share processors are taken from
SIZES = {
    FREE: (KIB, 4 * KIB, 16 * KIB, 64 * KIB),
    LIMIT: (64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB, 4 * MIB),
}  # there the line takes time
LAYOUTS = (
    (1, 1),
    (2, 2),
    (4, 4),
    (1, 1, 1),
    (2, 2, 2),
    (1, 1, 1, 1),
    (2, 2, 2, 2),
)  # ranks of each host, in steps
BATCH_S = {
    FREE: 0.02,
    LIMIT: 0.04,
}  # of calls one after the other; what a limiter has saved before is little of it
RUNS = 3  # separate ones, for a disturbance may last as long as one
LONG = MIB  # on more than its limiter lets through at once, and more than a cache holds of all ranks

Run = Callable[..., list[dict[str, Any]]]


def measure(*, realtime: bool, show: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Prices, times of allreduce with each of its algorithms, and times of steps. `show` is called with each time."""
    sys.path.insert(0, str(ROOT / "tests/hosts"))
    import lab as labs

    if reason := labs.missing():
        raise SystemExit(f"scaling.py: {reason}")
    found: dict[str, Any] = {"processors": len(os.sched_getaffinity(0)), "times": [], "steps": []}
    lab = labs.Lab(max(HOSTS))

    def run(name: str, each: tuple[int, ...], **settings: Any) -> list[dict[str, Any]]:
        settings = {"realtime": realtime, "batch_s": BATCH_S[FREE], **settings}
        job = labs.LabJob(lab, [str(RANK), name, json.dumps(settings)], list(each))
        try:
            texts = [process.stdout.read() for process in job.processes.values()]
            if any(codes := job.wait()):
                raise SystemExit(f"scaling.py: ranks ended with {codes}:\n" + "\n".join(texts))
            return [json.loads(line) for line in texts[0].splitlines()]
        finally:
            job.end()

    try:
        found["measured"] = measured = _for_prices(run)
        _times(run, FREE, found, show)
        for host in range(max(HOSTS)):
            lab.limit(host, LIMIT)
        measured["limited"] = run("pair", (1, 1), long=16 * MIB, batch_s=BATCH_S[LIMIT])[0]
        measured["burst"] = labs.LIMITER_BURST
        found["prices"] = {rate: asdict(network_of(measured, rate, found["processors"])) for rate in SIZES}
        _times(run, LIMIT, found, show)
        for each in LAYOUTS:
            seconds = run("steps", each, leaves=list(cost.resnet50()))[0]["seconds"]
            found["steps"].append({"each": list(each), "seconds": seconds})
            show(found["steps"][-1])
    finally:
        lab.close()
    return found


def _for_prices(run: Run) -> dict[str, Any]:
    pairs = [run("pair", (1, 1), long=LONG)[0] for _ in range(RUNS)]
    return {
        "pair": {name: min(pair[name] for pair in pairs) for name in pairs[0]},
        "crowds": {str(n): run("crowd", (1,) * n)[0] for n in CROWDED},
        "inside": run("inside", (2,), long=LONG)[0]["seconds"] / LONG,
    }


def _times(run: Run, rate: str, found: dict[str, Any], show: Callable[[dict[str, Any]], None]) -> None:
    for n in HOSTS:
        settings = {"sizes": SIZES[rate], "algorithms": list(cost.IN_USE), "batch_s": BATCH_S[rate]}
        runs = [run("times", (1,) * n, **settings) for _ in range(RUNS)]
        for lines in zip(*runs, strict=True):  # of one algorithm and size
            seconds = [line["seconds"] for line in lines]
            spread = {"seconds": min(seconds), "spread": max(seconds) / min(seconds)}
            found["times"].append({"rate": rate, "hosts": n, **lines[0], **spread})
            show(found["times"][-1])


def network_of(measured: Mapping[str, Any], rate: str, processors: int) -> cost.Network:
    """The prices, from what was measured for them. Pure.

    Args:
      measured: of the "pair": seconds of "half" a round trip, of one of a "flood" in each direction, and for a
        byte "both_ways" and to "reduce"; of "crowds", by their number of ranks: of a "barrier" and a "shift"; for a
        byte to be reduced "inside" a host; for a byte in both directions where cards are
        "limited"; and the limiter's "burst".
      rate: FREE or LIMIT.
      processors: of the machine.

    Example:
      >>> pair = {"half": 5.0, "flood": 2.0, "both_ways": 0.2, "reduce": 0.1}
      >>> crowds = {"4": {"barrier": 34.0, "shift": 18.0}}
      >>> network = network_of({"pair": pair, "crowds": crowds, "inside": 0.3}, FREE, processors=2)
      >>> [round(price, 6) for price in (network.latency_s, network.message_s, network.wake_s, network.wait_s)]
      [3.0, 1.0, 1.0, 7.0]
    """
    pair = measured["pair"]
    message_s = pair["flood"] / 2
    latency_s = max(0.0, pair["half"] - 2 * message_s)
    end_s, round_s = _of_crowds(measured["crowds"], processors)
    return cost.Network(
        latency_s=latency_s,
        message_s=message_s,
        bandwidth=NO_LIMIT if rate == FREE else 1 / measured["limited"]["both_ways"],
        copy_s=pair["both_ways"] / 2,
        reduce_s=pair["reduce"],
        node_s=measured["inside"],
        wake_s=max(0.0, end_s - message_s),
        wait_s=max(0.0, round_s - latency_s),
        processors=processors,
        burst=0.0 if rate == FREE else measured["burst"],
    )


def _of_crowds(crowds: Mapping[str, Mapping[str, float]], processors: int) -> tuple[float, float]:
    """Seconds of a message at each end, and beside that of waiting for it: what comes closest to all, relatively."""
    rows = []
    for n, times in ((int(ranks), times) for ranks, times in crowds.items()):
        ends = 2 * n / processors  # of each message of a rank: its two, in turns with the other ranks
        rows += [(times["shift"], ends), (times["barrier"], ends * (n - 1))]
    equations = np.array([[ends / seconds, 1 / seconds] for seconds, ends in rows])
    end_s, round_s = np.linalg.lstsq(equations, np.ones(len(rows)), rcond=None)[0]
    return float(end_s), float(round_s)
