"""Audits many shards that are right, and many of which one bit is wrong, and counts what is found.

    python tests/chaos/audits.py --clean 100000 --flips 10000

1. Clean steps, each shard of which is audited if a rank has one: no audit may raise an alarm.
2. Steps in each of which a random rank computes a random bit of a random leaf wrongly, in a shard of its own or one
   that it audits; again when the step is repeated, as a broken processor does. Each flip in an audited shard has to be
   found, and the rank that made it has to be named by a third one; of the flips in the shards of owners, so many have
   to be found as the rate says, within four standard deviations of the binomial distribution.

Prints a table in Markdown. Exits with 1 if anything else happened.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parent.parent / "survive" / "programs" / "flips.py"
PATIENCE_S = 3600.0
DEVIATIONS = 4.0


def run(n: int, *values: Any) -> dict[str, Any]:
    """What rank 0 of `n` says. Raises RuntimeError if they fail."""
    command = [sys.executable, "-m", "samestep", "run", "-n", str(n), "--raw", str(PROGRAM)]
    done = subprocess.run(
        [*command, *map(json.dumps, values)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    if done.returncode or not lines:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(lines[0][7:])
    return found


def allowed(flips: int, rate: float) -> tuple[float, float]:
    """How many flips in owners' shards may be found. Pure.

    Example:
      >>> allowed(10_000, 0.1)
      (880.0, 1120.0)
    """
    deviation = DEVIATIONS * math.sqrt(flips * rate * (1 - rate))
    return round(flips * rate - deviation, 6), round(flips * rate + deviation, 6)


def problems(clean: dict[str, Any], struck: dict[str, Any], rate: float) -> list[str]:
    """What should not be. Pure."""
    found = []
    if clean["alarms"]:
        found.append(f"{clean['alarms']} alarms in clean steps")
    least, most = allowed(struck["of_owners"], rate)
    if not least <= struck["of_owners_found"] <= most:
        found.append(f"{struck['of_owners_found']} flips of owners found, not {least:.0f} to {most:.0f}")
    for what in ("missed", "wrong"):
        if struck[what]:
            found.append(f"{what}: steps {struck[what][:20]}")
    return found


def table(clean: dict[str, Any], struck: dict[str, Any], rate: float, n: int) -> str:
    """In Markdown. Pure."""
    least, most = allowed(struck["of_owners"], rate)
    rows = [
        [f"clean audits on {n} ranks", str(clean["audits"])],
        ["alarms in these", str(clean["alarms"])],
        [f"steps with a wrong bit, at a rate of {rate:g}", str(struck["flips"])],
        ["of these in an audited shard", str(struck["audited"])],
        ["found, with the guilty rank named", str(struck["named"])],
        ["another rank named, or a false alarm", str(len(struck["wrong"]))],
        [
            f"found of {struck['of_owners']} in shards of owners ({least:.0f} to {most:.0f})",
            str(struck["of_owners_found"]),
        ],
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in [["what", "how many"], ["---", "---"], *rows])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clean", type=int, default=600, help="audits of right shards, at least")
    parser.add_argument("--flips", type=int, default=200, help="steps with a wrong bit")
    parser.add_argument("--rate", type=float, default=0.1, help="of the audits that may find one")
    parser.add_argument("-n", type=int, default=4, help="ranks, at least 3")
    given = parser.parse_args(argv)
    clean = run(given.n, math.ceil(given.clean / 3 * 1.05), 1.0, False)
    struck = run(given.n, given.flips, given.rate)
    print(table(clean, struck, given.rate, given.n))
    found = problems(clean, struck, given.rate)
    if clean["audits"] < given.clean:
        found.append(f"only {clean['audits']} audits")
    for problem in found:
        print(f"bad: {problem}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
