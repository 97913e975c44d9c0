"""Random verbs with random good and bad arguments on 1 to 3 ranks: python tests/fuzz/calls.py --calls 5000

All ranks draw the same calls. Where the arguments are good the result is compared, bit for bit. Where those of some
ranks are bad, these raise an error of samestep before anything is sent, and make the good call then. Where ranks
disagree all raise MismatchError, with the same text, and go on.
"""

import argparse
import collections
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "fakes"))

import samestep as ss
from foreign_arrays import Unversioned, Versioned

PATIENCE_S = 60.0
DTYPES = ["int8", "uint16", "int32", "int64", "float16", "float32", "float64", "complex64"]
WORLDS = [(n, transport) for transport in ("shm", "tcp") for n in (1, 2, 3)]


def lay_out(rng, values):
    """The same elements in memory of another layout."""
    kind = rng.choice(["plain", "strided", "reversed", "columns", "odd address"])
    if kind == "strided":
        return np.repeat(values, 2)[::2] if values.ndim == 1 else values
    if kind == "reversed":
        return values[::-1].copy()[::-1]
    if kind == "columns":
        return np.asfortranarray(values)
    if kind == "odd address":
        moved = np.zeros(values.nbytes + 1, np.uint8)[1:].view(values.dtype).reshape(values.shape)
        moved[...] = values
        return moved
    return values.copy()


def parts(rng, n_ranks):
    """Small whole numbers of each rank, exact in all types and sums."""
    dtype, columns = rng.choice(DTYPES), rng.choice([None, None, 1, 3])
    rows = n_ranks * rng.choice([0, 1, 1, 2, 5, 700, 40_000])
    shape = (rows,) if columns is None else (rows, columns)
    first = rng.randrange(7)
    n = rows * (columns or 1)
    return [((np.arange(n) % 5 + first + rank) % 9).astype(dtype).reshape(shape) for rank in range(n_ranks)]


def sums(all_parts):
    return np.add.reduce(all_parts, dtype=all_parts[0].dtype)


def good_call(rng, group, given):
    """A verb on `x`, this rank's part; and what it has to return on this rank."""
    n, me = group.size, group.rank
    verb = rng.choice(sorted(VERBS))
    root = rng.randrange(n)
    rows = len(given[0]) // n
    total = sums(given)
    blocks = [given[r][me * rows : (me + 1) * rows] for r in range(n)]
    expected = {
        "allreduce": total,
        "reduce": total if me == root else given[me],
        "bcast": given[root],
        "allgather": np.stack(given),
        "allgatherv": np.concatenate(given),
        "gather": np.stack(given) if me == root else None,
        "alltoall": np.concatenate(blocks),
        "reduce_scatter": total.reshape(n, rows, *total.shape[1:])[me],
        "sendrecv": given[(me - 1) % n],
        "allgather_object": [part.tolist() for part in given],
        "barrier": None,
    }[verb]
    return verb, root, expected


VERBS = {
    "allreduce": lambda group, x, root, how: group.allreduce(x, **how),
    "reduce": lambda group, x, root, how: group.reduce(x, root=root, **how),
    "bcast": lambda group, x, root, how: group.bcast(x, root=root, **how),
    "allgather": lambda group, x, root, how: group.allgather(x, **how),
    "allgatherv": lambda group, x, root, how: group.allgatherv(x, **how),
    "gather": lambda group, x, root, how: group.gather(x, root=root, **how),
    "alltoall": lambda group, x, root, how: group.alltoall(x, **how),
    "reduce_scatter": lambda group, x, root, how: group.reduce_scatter(_in_blocks(group, x), **how),
    "sendrecv": lambda group, x, root, how: _ring(group, x, how),
    "allgather_object": lambda group, x, root, how: group.allgather_object(
        x.tolist() if isinstance(x, np.ndarray) else x, **how
    ),
    "barrier": lambda group, x, root, how: group.barrier(**how),
}
TAKES_ARRAY = set(VERBS) - {"allgather_object", "barrier"}
TAKES_ROOT = {"reduce", "bcast", "gather"}
TAKES_OP = {"allreduce", "reduce", "reduce_scatter"}


def _in_blocks(group, x):
    if not isinstance(x, np.ndarray) or not x.size or len(x) % group.size:
        return x
    return x.reshape(group.size, -1, *x.shape[1:])


def _ring(group, x, how):
    out = np.empty_like(x)
    group.sendrecv(x, (group.rank + 1) % group.size, out, (group.rank - 1) % group.size, **how)
    return out


def bad_arguments(rng, verb, x, root, group):
    """An array, a root and keywords of which one is wrong, as this rank alone can see."""
    choices = [(x, root, {"timeout": rng.choice([0, -1, float("nan"), float("inf"), "soon", 10**400])})]
    if verb in TAKES_ARRAY:
        arrays = [None, [1.0], "text", b"bytes", {}, object(), np.array(["a"]), np.array([object()])]
        arrays += [x.astype(x.dtype.newbyteorder()) if x.dtype.itemsize > 1 else np.zeros(2, ">f8")]
        arrays += [Versioned(shape=(2, -3), strides=None), Unversioned(shape=(2**62, 2**62), strides=None)]
        arrays += [Versioned(version=(9, 0)), Unversioned(null=True), np.datetime64("2020")]
        choices += [(rng.choice(arrays), root, {})]
    if verb in TAKES_ROOT:
        choices += [(x, rng.choice([-1, group.size, 2**40, -(2**70), "0", 0.5, None]), {})]
    if verb in TAKES_OP:
        choices += [(x, root, {"op": rng.choice(["averge", None, 99, object(), "", np.zeros(3)])})]
    if verb in {"allreduce", "allgather", "alltoall"} and x.size:
        readonly = np.zeros(3, x.dtype)
        readonly.flags.writeable = False
        choices += [(x, root, {"out": rng.choice([readonly, np.zeros(1, "M8[s]"), 3, "out"])})]
    return rng.choice(choices)


def is_right(got, expected):
    if expected is None:
        return got is None
    if isinstance(expected, list):
        return got == expected
    return got.dtype == expected.dtype and got.shape == expected.shape and bool((got == expected).all())


def one_call(rng, group, outcomes):
    given = parts(rng, group.size)
    verb, root, expected = good_call(rng, group, given)
    if verb == "reduce_scatter" and not given[0].size:
        verb, expected = "barrier", None
    kind = rng.choices(["good", "bad", "ranks disagree"], [6, 3, 1])[0]
    wrong_ranks = {rank for rank in range(group.size) if rng.random() < 0.5}
    private = random.Random(rng.getrandbits(64) + group.rank)
    x = lay_out(private, given[group.rank])
    if kind == "bad" and group.rank in wrong_ranks:
        array, other_root, how = bad_arguments(private, verb, x, root, group)
        try:
            VERBS[verb](group, array, other_root, how)
        except (ss.InvalidArgumentError, TypeError) as error:
            assert str(error)
            outcomes["refused"] += 1
        else:
            raise AssertionError(f"{verb} accepted {array!r}, root {other_root!r}, {how}")
    if kind == "ranks disagree" and group.size > 1 and verb == "allreduce":
        wrong = x if group.rank else np.zeros(x.size + 1, x.dtype)
        try:
            group.allreduce(wrong)
        except ss.MismatchError as error:
            texts = group.allgather_object(str(error))
            assert len(set(texts)) == 1, texts
            outcomes["mismatch"] += 1
        else:
            raise AssertionError("ranks disagreed and nobody said so")
        return
    got = VERBS[verb](group, x, root, {})
    assert is_right(got, expected), f"wrong result of {verb}: {given[0].dtype}{given[0].shape}, root {root}"
    outcomes["right"] += 1


def run(group, seed, n_calls):
    """How many calls of this rank ended how. Collective."""
    rng, outcomes = random.Random(seed), collections.Counter()
    for call in range(n_calls):
        try:
            one_call(rng, group, outcomes)
        except Exception as error:
            raise AssertionError(f"seed {seed}, call {call}: {type(error).__name__}: {error}") from error
    return outcomes


def as_rank(given):
    group = ss.initialize(timeout=PATIENCE_S)
    counted = run(group, given.seed, given.calls)
    table = group.allgather_object(counted)
    if group.rank == 0:
        print(
            *(sum(entry[outcome] for entry in table) for outcome in ("right", "refused", "mismatch")),
            flush=True,
        )


def main(given):
    print(
        "| ranks | transport | correct results | refused | mismatches named | crashes, hangs, wrong numbers |"
    )
    print("|--:|---|--:|--:|--:|--:|")
    failed = 0
    for n_ranks, transport in WORLDS:
        command = [
            sys.executable,
            "-m",
            "samestep",
            "run",
            "-n",
            str(n_ranks),
            "--no-prefix",
            __file__,
            "--as-rank",
        ]
        command = [part for part in command if part != "--no-prefix"]
        command += ["--seed", str(given.seed), "--calls", str(given.calls)]
        env = {**os.environ, "SAMESTEP_NATIVE_TRANSPORT": transport}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3600, check=False)
        if done.returncode:
            failed += 1
            print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
            print(f"| {n_ranks} | {transport} | | | | 1 |", flush=True)
            continue
        counts = done.stdout.split("]")[-1].split()
        print(
            f"| {n_ranks} | {transport} | " + " | ".join(f"{int(n):,}" for n in counts) + " | 0 |", flush=True
        )
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--as-rank", action="store_true")
    chosen = parser.parse_args()
    sys.exit(as_rank(chosen) if chosen.as_rank else main(chosen))
