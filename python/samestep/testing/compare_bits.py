"""`samestep same`: runs one script on several numbers of ranks and compares the bits of its means."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from samestep import _settings
from samestep.step.state_hash import RECORD_NAME

_MAX_OUTPUT = 4000  # characters of the output of a failed run in the error

_ARRAY = re.compile(r"(\w+) [0-9a-f]{32}")  # dtype and hash, as `Recorder` writes them


class Run(NamedTuple):
    """What one run recorded: for each mean, in order, a label, the weight, and (leaf, hash) pairs."""

    n_ranks: int
    means: list[tuple[str, str, list[tuple[str, str]]]]


def same_bits(
    script: str | os.PathLike[str],
    ranks: Sequence[int] = (1, 2, 3, 4),
    *,
    args: Sequence[str] = (),
    timeout: float = 600.0,
) -> str:
    """Run a script by `samestep run` on each number of ranks, and compare all means of its `Accumulator`s.

    Args:
      script: a Python program that trains with an `Accumulator`, or a torch optimizer with `shards=`.
      ranks: numbers of ranks; the others are compared with the first.
      args: arguments of the script.
      timeout: seconds for each run.

    Returns:
      A hash of all means, 32 hexadecimal digits.

    Raises:
      AssertionError: the bits differ: names the first step and leaf; or a run failed or was late, with what it
        printed.

    Example:
      >>> from samestep.testing import same_bits
      >>> same_bits("train.py", ranks=[1, 2, 3, 4])  # doctest: +SKIP
      '5f0c41de6e1ab0b4e6f9c2a1b7d2c3f4'
    """
    runs = [_run(str(script), n_ranks, args, timeout) for n_ranks in ranks]
    for other in runs[1:]:
        difference = compare(runs[0], other)
        if difference:
            raise AssertionError(difference)
    text = json.dumps(runs[0].means) if runs else ""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _run(script: str, n_ranks: int, args: Sequence[str], timeout: float) -> Run:
    what = f"{script} on {_ranks(n_ranks)}"
    with tempfile.TemporaryDirectory(prefix="samestep-same-") as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "samestep", "run", "-n", str(n_ranks), script, *args],
                env={**os.environ, _settings.RECORD: folder},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"{what} needed more than {timeout:g} s:\n{_tail(late.stdout)}") from late
        if done.returncode:
            raise AssertionError(f"{what} ended with exit code {done.returncode}:\n{_tail(done.stdout)}")
        file = Path(folder) / RECORD_NAME
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    if not lines:
        raise AssertionError(f"{what} has called no Accumulator.mean(), which is what is compared")
    means = []
    for accumulator, step, weight, hashes in map(json.loads, lines):
        label = f"step {step}" if accumulator == 0 else f"step {step} of accumulator {accumulator}"
        means.append((label, weight, [(name, value) for name, value in hashes]))
    return Run(n_ranks, means)


def _ranks(n_ranks: int) -> str:
    return f"{n_ranks} rank{'s' * (n_ranks > 1)}"


def _tail(output: bytes | None) -> str:
    return (output or b"").decode(errors="replace")[-_MAX_OUTPUT:]


def compare(one: Run, other: Run) -> str:
    """The first difference between two runs; "" if there is none.

    Example:
      >>> first = Run(1, [("step 0", "0x1p+3", [("['w']", "a")])])
      >>> compare(first, Run(2, [("step 0", "0x1p+3", [("['w']", "b")])]))
      "step 0: leaf ['w'] on 2 ranks differs from that on 1 rank"
    """
    ranks = [_ranks(run.n_ranks) for run in (other, one)]
    for (label, weight, leaves), (_, other_weight, other_leaves) in zip(one.means, other.means, strict=False):
        if weight != other_weight:
            weights = [f"{float.fromhex(w):g}" for w in (other_weight, weight)]
            return f"{label}: the weight on {ranks[0]} is {weights[0]}, on {ranks[1]} {weights[1]}"
        if difference := _first_leaf(leaves, other_leaves, ranks):
            return f"{label}: {difference}"
    if len(one.means) != len(other.means):
        return f"{len(other.means)} steps on {ranks[0]}, {len(one.means)} on {ranks[1]}"
    return ""


def _first_leaf(mine: list[tuple[str, str]], others: list[tuple[str, str]], ranks: list[str]) -> str:
    values, other_values = dict(mine), dict(others)
    for name in dict.fromkeys([*values, *other_values]):
        value, other = values.get(name, ""), other_values.get(name, "")
        if not value or not other:
            there, elsewhere = ranks if other else ranks[::-1]
            return f"leaf {name} is in the tree on {there}, not on {elsewhere}"
        dtypes = [found[1] for text in (other, value) if (found := _ARRAY.fullmatch(text))]
        if len(set(dtypes)) == 2:
            return f"leaf {name} is {dtypes[0]} on {ranks[0]} and {dtypes[1]} on {ranks[1]}"
        if value != other:
            return f"leaf {name} on {ranks[0]} differs from that on {ranks[1]}"
    return ""


def main(argv: Sequence[str]) -> int:
    """Runs `samestep same`; returns the exit code: 1 where the bits differ."""
    flags = parser().parse_args(argv)
    try:
        digest = same_bits(flags.script, flags.n, args=flags.args, timeout=flags.timeout)
    except AssertionError as error:
        print(f"samestep same: {error}", file=sys.stderr)
        return 1
    *first, last = flags.n
    print(f"{digest}  the same bits on {', '.join([*map(str, first), _ranks(last)])}")
    return 0


def parser() -> argparse.ArgumentParser:
    """Of `samestep same`."""
    parser = argparse.ArgumentParser(
        prog="samestep same",
        description="Run a script on several numbers of ranks, and name the first step and leaf whose mean differs.",
    )
    parser.add_argument(
        "-n",
        type=_numbers,
        default=[1, 2, 3, 4],
        metavar="N,N,...",
        help="numbers of ranks (default: 1,2,3,4)",
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each run (default: 600)")
    parser.add_argument("script", help="a Python program")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if any(number < 1 for number in numbers):
        raise ValueError(text)
    return numbers
