"""JAX's own tests of several processes over gloo and over samestep: how many pass, fail and are skipped.

    git clone --depth 1 --branch jax-v0.10.2 https://github.com/jax-ml/jax   # the version that is installed
    python benchmarks/jax_suites.py jax/tests/multiprocess -n 2 4
    python benchmarks/jax_suites.py jax/tests/multiprocess -n 4 --devices 2     # what many of them want

The tests are run, unchanged, with the runner that the jax wheel contains (`jax._src.test_multiprocess`); it wants
`absl-py` and `portpicker`. A test counts as failed if it fails on any process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from samestep._util import jax_variables

IMPLEMENTATIONS = ("gloo", "samestep")
SUITES = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "array",
    "axis_index",
    "multihost_utils",
    "pjit",
    "pmap",
    "wait_barrier",
)
RESULT = re.compile(r"^\[\s+(OK|FAILED|SKIPPED)\s+\] (\S+)", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="tests/multiprocess of JAX's sources")
    parser.add_argument("-n", type=int, nargs="+", default=[2], help="processes")
    parser.add_argument("--devices", type=int, default=1, help="of each process")
    parser.add_argument("--suites", nargs="+", default=SUITES)
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each suite")
    flags = parser.parse_args()
    print("| suite | processes x devices | gloo | samestep | passed over gloo only |\n|---|--:|---|---|---|")
    for suite in flags.suites:
        for n in flags.n:
            found = {
                name: results_of(flags.folder / f"{suite}_test.py", name, n, flags)
                for name in IMPLEMENTATIONS
            }
            gloo, ours = (found[name] for name in IMPLEMENTATIONS)
            worse = sorted(test for test, result in gloo.items() if result == "OK" != ours.get(test))
            row = [suite, f"{n} x {flags.devices}", text_of(gloo), text_of(ours), ", ".join(worse) or "none"]
            print(f"| {' | '.join(row)} |", flush=True)


def results_of(
    path: Path, implementation: str, n_processes: int, wanted: argparse.Namespace
) -> dict[str, str]:
    """Test -> OK, SKIPPED or FAILED; nothing where the suite has not come to its end."""
    name = "gloo" if implementation == "gloo" else "mpi"
    flags = [
        f"--num_processes={n_processes}",
        f"--cpu_collectives_implementation={name}",
        "--barrier_timeout=240",
        "--heartbeat_timeout=100",
        "--shutdown_timeout=100",
    ]
    with tempfile.TemporaryDirectory() as logs:
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "TEST_UNDECLARED_OUTPUTS_DIR": logs}
        env["JAX_NUM_CPU_DEVICES"] = str(wanted.devices)
        env.pop("JAX_CPU_COLLECTIVES_IMPLEMENTATION", None)
        if implementation == "samestep":
            env |= jax_variables.environment(env)
        command = [sys.executable, str(path), *flags, "--initialization_timeout=120"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        runner = subprocess.Popen(command, env=env, start_new_session=True, **quiet)
        try:
            runner.wait(wanted.timeout)
        except subprocess.TimeoutExpired:
            return {}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(runner.pid, signal.SIGKILL)
            runner.wait()
        worst: dict[str, str] = {}
        for log in Path(logs).glob("*_stderr.log"):
            for result, test in RESULT.findall(log.read_text(errors="replace")):
                worst[test] = "FAILED" if "FAILED" in (result, worst.get(test)) else result
    return worst


def text_of(results: dict[str, str]) -> str:
    counts = Counter(results.values())
    words = {"OK": "passed", "FAILED": "failed", "SKIPPED": "skipped"}
    return ", ".join(f"{counts[key]} {word}" for key, word in words.items() if counts[key]) or "did not end"


if __name__ == "__main__":
    main()
