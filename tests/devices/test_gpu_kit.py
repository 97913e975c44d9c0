"""The kit for machines with a GPU, on the stand-ins: each part runs, finds what is wrong, and is summed up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KIT = Path(__file__).parents[2] / "benchmarks/gpu"
if not KIT.is_dir():
    pytest.skip("the benchmarks are not part of this tree", allow_module_level=True)

MAY_BE_MISSING = {"training step": "torch", "sanitizer": "compute-sanitizer"}


def run(tmp_path, *words, **variables):
    out = tmp_path / "found.json"
    done = subprocess.run(
        [str(KIT / "kit.sh"), "--fakes", "--short", *words, str(out)],
        env=os.environ | {"PYTHON": sys.executable, "TMPDIR": str(tmp_path)} | variables,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert out.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(out.read_text()), out.with_suffix(".md").read_text()


def test_every_part_runs_and_finds_nothing_wrong(tmp_path):
    code, found, page = run(tmp_path)
    for name, part in found["parts"].items():
        if name in MAY_BE_MISSING and part["status"] == "skipped":
            assert MAY_BE_MISSING[name] in part["reason"], part
            continue
        assert part["status"] == "passed", (name, part)
        assert part["results"], name
        assert f"| {name} | passed |" in page
    assert code == 0
    assert "mean nothing" in page
    assert {row["what"] for part in found["parts"].values() for row in part["results"]} >= {
        "verbs",
        "streams",
        "waiting",
        "overhead",
        "staging",
        "trees",
        "lifetimes",
    }


def test_a_missing_order_is_a_part_that_failed(tmp_path):
    code, found, page = run(tmp_path, "--only", "one rank: streams", FAKE_GPU_IGNORE_WAITS="library")
    part = found["parts"]["one rank: streams"]
    assert (code, part["status"]) == (1, "failed"), part
    assert part["results"][0]["wrong"] > 0
    assert "| one rank: streams | failed |" in page


def test_a_part_that_hangs_is_ended_and_named(tmp_path):
    code, found, _ = run(
        tmp_path,
        "--only",
        "two ranks: verbs through NCCL",
        "--part-seconds",
        "3",
        FAKE_NCCL_FAIL="1:init:hang",
    )
    assert (code, found["parts"]["two ranks: verbs through NCCL"]["status"]) == (1, "late"), found


def test_how_ranks_share_a_device(monkeypatch):
    monkeypatch.syspath_prepend(str(KIT))
    import kit

    assert kit.sharing_for("2.28.9").of_rank == {"NCCL_HOSTID": "rank-{rank}"}
    assert kit.sharing_for("2.30.3").variables == {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    assert kit.sharing_for("").how == kit.sharing_for("2.9.6").how
