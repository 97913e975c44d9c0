"""Runs the parts of the kit one after another, each with a deadline, and writes one JSON and its summary.

See kit.sh, which calls it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import summary

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SKIPPED = 77
LOG_CHARACTERS = 6000  # of each rank, kept in the JSON
LEAST_S = 5.0  # nothing is started with less time left


@dataclass(frozen=True)
class Part:
    """One program on some ranks, with a deadline."""

    name: str
    seconds: float
    words: tuple[str, ...]
    ranks: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)
    of_rank: Mapping[str, str] = field(default_factory=dict)
    """Variables whose value has "{rank}" in it."""
    killed: int = -1
    """The rank that has to end by SIGKILL."""

    @property
    def kind(self) -> str:
        """ "times" or "checks": the two parts of the kit."""
        return "times" if self.words[0] in ("kit_times.py", "kit_step.py", "kit_lifetimes.py") else "checks"


def parts(*, short: bool, sharing: Sharing) -> list[Part]:
    """What is run, the most telling first."""
    checks, times, failures, peers = "kit_checks.py", "kit_times.py", "kit_failures.py", "kit_peers.py"
    through = {"variables": sharing.variables, "of_rank": sharing.of_rank}
    few = {**sharing.variables, "NCCL_MAX_CTAS": "4"}  # four ranks' channels must fit one device together
    leave = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false"
    }  # or the first rank's JAX takes the memory of the device
    found = [
        Part("one rank: verbs", 60, (checks, "verbs", "nccl")),
        Part("one rank: streams", 40, (checks, "streams", "nccl")),
        Part("one rank: nobody waits", 40, (times, "waiting")),
        Part("a message to itself", 30, (failures, "itself")),
        Part("a full queue", 40, (failures, "queue")),
        Part("graph capture", 40, (failures, "capture")),
        Part("a missing rank", 60, (failures, "missing")),
        Part("a late device", 60, (failures, "late")),
        Part("two ranks: one does not call", 60, (peers, "absent"), 2, **through),
        Part("two ranks: one is killed", 60, (peers, "killed"), 2, **through, killed=1),
        Part("two ranks: they differ", 60, (peers, "differ"), 2, **through),
        Part("one rank: call overhead", 60, (times, "overhead")),
        Part("two ranks: call overhead", 60, (times, "overhead"), 2, **through),
        Part("two ranks: verbs through NCCL", 60, (checks, "verbs", "nccl"), 2, **through),
        Part("two ranks: verbs through the host", 60, (checks, "verbs", "native"), 2),
        Part("two ranks: streams", 40, (checks, "streams", "nccl"), 2, **through),
        Part("two ranks: streams through the host", 40, (checks, "streams", "native"), 2),
        Part("two ranks: users through NCCL", 75, ("kit_users.py", "nccl"), 2, **through),
        Part("two ranks: users through the host", 75, ("kit_users.py", "native"), 2),
        Part("staging", 60, (times, "staging"), 2),
        Part("many small arrays", 40, (times, "trees")),
        Part("one rank: training step", 60, ("kit_step.py",)),
        Part("two ranks: training step", 60, ("kit_step.py",), 2, **through),
        Part("two ranks: training step in a graph", 60, ("kit_graph.py",), 2, **through),
        Part("two ranks: torch's own training", 60, ("kit_torch.py",), 2, **through),
        Part("two ranks: JAX", 60, ("kit_jax.py",), 2, {**sharing.variables, **leave}, sharing.of_rank),
        Part("four ranks: verbs through NCCL", 75, (checks, "verbs", "nccl"), 4, few, sharing.of_rank),
        Part("four ranks: verbs through the host", 60, (checks, "verbs", "native"), 4),
        Part("three ranks: one is lost", 75, ("kit_survive.py",), **through),
        Part("lifetimes", 60, ("kit_lifetimes.py", "3" if short else "40")),
        Part("sanitizer", 120, ("kit_sanitizer.py",)),
    ]
    left_out = (
        "two ranks: streams",
        "two ranks: verbs through the host",
        "four ranks: verbs through the host",
        "two ranks: users through the host",
    )
    return [part for part in found if not short or part.name not in left_out]


@dataclass(frozen=True)
class Sharing:
    """How several ranks of NCCL are brought to share one device."""

    how: str
    variables: dict[str, str]
    of_rank: dict[str, str]


def sharing_for(nccl: str) -> Sharing:
    """By NCCL's version: from 2.30 on it can be asked to; before, ranks pretend to be on different hosts. Pure.

    Example:
      >>> sharing_for("2.28.9").of_rank
      {'NCCL_HOSTID': 'rank-{rank}'}
      >>> sharing_for("2.30.4").variables
      {'NCCL_MULTI_RANK_GPU_ENABLE': '1'}
    """
    version = tuple(int(number) for number in nccl.split(".")[:2]) if nccl else (0, 0)
    if version >= (2, 30):
        return Sharing("NCCL_MULTI_RANK_GPU_ENABLE=1", {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, {})
    variables = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return Sharing("another NCCL_HOSTID for each rank", variables, {"NCCL_HOSTID": "rank-{rank}"})


class Started:
    """All ranks of a part, which wait for its turn; leaving it ends them all, whatever happens."""

    def __init__(self, part: Part, place: Path, *, ahead: str = "") -> None:
        """Start them.

        Args:
          part: what they run.
          place: a folder that is made for them.
          ahead: a module to import before their turn.
        """
        place.mkdir()
        self.part, self.place = part, place
        common = {**os.environ, **part.variables, "KIT_SIZE": str(part.ranks), "KIT_PLACE": str(place)}
        with contextlib.ExitStack() as stack:
            common["KIT_AHEAD"] = ahead
            self.ranks = [stack.enter_context(_rank(part, rank, common, place)) for rank in range(part.ranks)]
            self._ending = stack.pop_all()

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *what: object) -> None:
        self._ending.close()

    def begin(self) -> None:
        for process in self.ranks:
            assert process.stdin
            process.stdin.close()


def run(started: Started, seconds: float) -> dict[str, Any]:
    """Waits for a part to end, no longer than `seconds`, and ends it."""
    part, begin = started.part, time.monotonic()
    with started:
        started.begin()
        codes: list[int | None] = [None] * part.ranks
        while None in codes and time.monotonic() - begin < seconds:
            codes = [process.poll() for process in started.ranks]
            codes = [_judged(part, rank, code) for rank, code in enumerate(codes)]
            if any(code not in (None, 0, SKIPPED) for code in codes):  # let the others say what they know
                seconds = min(seconds, time.monotonic() - begin + 10)
            time.sleep(0.02)
    logs = [(started.place / f"rank-{rank}.log").read_text(errors="replace") for rank in range(part.ranks)]
    lines = [line for log in logs for line in log.splitlines()]
    reasons = [line[8:] for line in lines if line.startswith("SKIPPED ")]
    if None in codes:
        status = "late"
    elif SKIPPED in codes and set(codes) <= {0, SKIPPED}:
        status = "skipped"
    else:
        status = "failed" if any(codes) else "passed"
    return {
        "status": status,
        "reason": "; ".join(dict.fromkeys(reasons)),
        "exit_codes": codes,
        "ranks": part.ranks,
        "seconds": round(time.monotonic() - begin, 1),
        "results": [json.loads(line[7:]) for line in lines if line.startswith("RESULT ")],
        "logs": [log[-LOG_CHARACTERS:] for log in logs] if status in ("failed", "late") else [],
    }


def _judged(part: Part, rank: int, code: int | None) -> int | None:
    """0 for a rank that ended as it had to, and not 0 for one that has survived."""
    if rank != part.killed or code in (None, SKIPPED):
        return code
    return {-signal.SIGKILL: 0, 0: 1}.get(code, code)


@contextlib.contextmanager
def _rank(part: Part, rank: int, common: Mapping[str, str], place: Path) -> Iterator[subprocess.Popen[bytes]]:
    mine = {name: value.format(rank=rank) for name, value in part.of_rank.items()}
    with (place / f"rank-{rank}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", *part.words],
            cwd=HERE,
            env={**common, **mine, "KIT_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def machine(environment: Mapping[str, str]) -> dict[str, Any]:
    """What `samestep doctor` says, and the device by its driver's tool."""
    found: dict[str, Any] = {"doctor": {}, "device": ""}
    words = [sys.executable, "-m", "samestep", "doctor", "--json"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired, json.JSONDecodeError):
        done = subprocess.run(
            words, env=dict(environment), cwd=HERE, capture_output=True, text=True, timeout=60, check=False
        )
        found["doctor"] = json.loads(done.stdout) if done.returncode == 0 else {"failed": done.stderr[-2000:]}
    if tool := shutil.which("nvidia-smi"):
        query = [tool, "--query-gpu=name,driver_version,memory.total,pci.bus_id", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
            found["device"] = done.stdout.strip()
    return found


def nccl_version() -> str:
    from samestep.gpu import discovery

    return discovery.communication_library("cuda", may_open=True).version


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/kit.sh", description=__doc__)
    parser.add_argument(
        "out", nargs="?", default="gpu_results.json", help="the JSON; the summary lies beside it"
    )
    parser.add_argument(
        "--fakes", action="store_true", help="use the stand-ins of tests/fakes, to try the kit itself"
    )
    parser.add_argument(
        "--installed",
        action="store_true",
        help="examine the package that this Python imports; nothing is built",
    )
    parser.add_argument(
        "--arrays", choices=("torch", "cupy"), help="of this library; by default the first found"
    )
    parser.add_argument("--short", action="store_true", help="few turns and sizes, to try the kit itself")
    parser.add_argument(
        "--ahead",
        action="store_true",
        help="start the next part while one runs, up to its imports: where there are many processors",
    )
    parser.add_argument("--seconds", type=float, default=530.0, help="for everything (default %(default)s)")
    parser.add_argument("--part-seconds", type=float, default=1e9, help="at most for each part")
    parser.add_argument(
        "--only",
        default="",
        help="only parts whose name contains one of these words, with commas between; or a half: checks, times",
    )
    return parser.parse_args()


@dataclass(frozen=True)
class Time:
    """How much of the time for everything is left."""

    seconds: float
    begin: float = field(default_factory=time.monotonic)

    def spent(self) -> float:
        return time.monotonic() - self.begin

    def left(self) -> float:
        return self.seconds - self.spent()


def prepare(flags: argparse.Namespace, limit: Time) -> str:
    """Builds the package where that is asked for, and sets the variables of all parts. What went wrong, or ""."""
    mine = [str(ROOT / "tests/fakes"), str(HERE)]
    if not flags.installed:
        try:
            words = [sys.executable, str(HERE / "kit_build.py")]
            subprocess.run(words, check=True, timeout=max(limit.left(), 1))
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            return f"the package cannot be built: {error}"
        mine.insert(0, str(ROOT / "python"))
    os.environ["PYTHONPATH"] = os.pathsep.join([*mine, *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.path[:0] = mine
    if flags.fakes:
        import fake_libraries

        os.environ.update({**fake_libraries.environment(), "FAKE_GPU_DEVICES": "1"})
    if flags.arrays:
        os.environ["KIT_ARRAYS"] = flags.arrays
    if flags.short:
        os.environ["KIT_SHORT"] = "1"
    return ""


def import_once(limit: Time) -> None:
    """The first import of torch on a fresh machine reads gigabytes, which is no part's time. It need not be there."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [sys.executable, "-c", "import torch"], capture_output=True, timeout=limit.left() / 2, check=False
        )


def run_all(
    wanted: list[Part], limit: Time, most: float, folder: Path, *, ahead: bool
) -> Iterator[tuple[Part, dict[str, Any]]]:
    """Runs one part after the other, as long as there is time, and yields what each has found.

    Args:
      wanted: the parts.
      limit: the time for all.
      most: seconds for each part.
      folder: in which each part gets one.
      ahead: whether the next part is started while one runs.
    """
    following: Started | None = None
    with contextlib.ExitStack() as stack:
        for number, part in enumerate(wanted):
            if limit.left() < LEAST_S:
                yield (
                    part,
                    {"status": "not started", "reason": "no time was left", "seconds": 0.0, "results": []},
                )
                continue
            started = following or Started(part, folder / str(number))
            following = None
            if ahead and number + 1 < len(wanted):
                after = wanted[number + 1]
                following = stack.enter_context(
                    Started(after, folder / str(number + 1), ahead=_slow_import(after))
                )
            yield part, run(started, min(part.seconds, most, limit.left()))


def _slow_import(part: Part) -> str:
    """The module whose import takes a part seconds."""
    modules = {"kit_jax.py": "jax", "kit_sanitizer.py": "sys"}
    return modules.get(part.words[0], os.environ.get("KIT_ARRAYS", "torch"))


def main() -> int:
    flags = _arguments()
    limit, out = Time(flags.seconds), Path(flags.out).resolve()
    if problem := prepare(flags, limit):
        print(problem, file=sys.stderr)
        return 1
    import_once(limit)
    sharing = sharing_for(nccl_version())
    found: dict[str, Any] = {
        "machine": machine(os.environ),
        "fakes": flags.fakes,
        "sharing": sharing.how,
        "parts": {},
    }
    wanted = [
        part
        for part in parts(short=flags.short, sharing=sharing)
        if any(word in part.name or word == part.kind for word in flags.only.split(","))
    ]
    with tempfile.TemporaryDirectory(prefix="samestep-kit-") as folder:
        results = run_all(wanted, limit, flags.part_seconds, Path(folder), ahead=flags.ahead)
        for part, result in results:
            found["parts"][part.name] = result
            print(
                f"{result['status']:>11} {result['seconds']:6.1f} s  {part.name} {result['reason']}",
                flush=True,
            )
            _write(out, found, limit.spent())  # what there is so far, should this process be ended
    print(f"written: {out}, {out.with_suffix('.md')}")
    return int(any(part["status"] in ("failed", "late") for part in found["parts"].values()))


def _write(out: Path, found: dict[str, Any], seconds: float) -> None:
    found["seconds"] = round(seconds, 1)
    text = json.dumps(found, indent=1)
    # Where these are on this machine means nothing to a reader.
    for folder, name in ((ROOT, "."), (sysconfig.get_paths()["purelib"], "site-packages")):
        text = text.replace(f"{folder}/", f"{name}/")
    out.write_text(text + "\n")
    out.with_suffix(".md").write_text(summary.page(json.loads(text)))


if __name__ == "__main__":
    sys.exit(main())
