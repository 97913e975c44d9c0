"""The kit for machines with a GPU, on the stand-ins: each part runs, finds what is wrong, and is summed up."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KIT = Path(__file__).parents[2] / "benchmarks/gpu"
if not KIT.is_dir():
    pytest.skip("the benchmarks are not part of this tree", allow_module_level=True)


def run(tmp_path, *words, **variables):
    out = tmp_path / "found.json"
    done = subprocess.run(
        [str(KIT / "kit.sh"), "--fakes", "--short", "--installed", *words, str(out)],
        env=os.environ | {"PYTHON": sys.executable, "TMPDIR": str(tmp_path)} | variables,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert out.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(out.read_text()), out.with_suffix(".md").read_text()


def sanitizer(folder, text):
    """What stands in for compute-sanitizer: it runs the command, or finds something."""
    folder.mkdir()
    tool = folder / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\n{text}\n")
    tool.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_every_part_runs_and_finds_nothing_wrong(tmp_path):
    tool = sanitizer(tmp_path / "bin", '[ "$2" = memcheck ] && shift 6 && exec "$@"')
    code, found, page = run(tmp_path, "--ahead", **tool)
    assert len(found["parts"]) == 26
    for name, part in found["parts"].items():
        if "users" in name and not importlib.util.find_spec("torch"):
            assert (part["status"], part["results"]) == ("skipped", [])
            continue
        assert part["status"] == "passed", (name, part)
        assert part["results"], name
        assert f"| {name} | passed |" in page
    assert code == 0
    assert "mean nothing" in page
    for heading in (
        "Goals",
        "Parts",
        "Through the host",
        "Many small arrays",
        "A step of training",
    ):
        assert f"## {heading}" in page


PARTS_OF = {
    "torch": [
        *("one rank: verbs", "one rank: nobody waits"),
        *("one rank: call overhead", "staging", "one rank: training step"),
    ],
    "cupy": [
        *("one rank: verbs", "one rank: streams", "one rank: nobody waits"),
        *("staging", "many small arrays", "lifetimes"),
    ],
}


@pytest.mark.parametrize("library", PARTS_OF)
def test_parts_run_on_arrays_of_other_libraries(tmp_path, library):
    """What lies between a part and torch or CuPy on a real device, with what `fake_frameworks` lets them find."""
    if library == "torch":
        pytest.importorskip("torch")
    names = PARTS_OF[library]
    code, found, _ = run(tmp_path, "--arrays", library, "--only", ",".join(names))
    assert sorted(found["parts"]) == sorted(names)
    for name, part in found["parts"].items():
        assert part["status"] == "passed", (name, part)
        assert part["results"], name
    assert code == 0
    assert found["parts"]["one rank: verbs"]["results"][0]["arrays"] == library
    if library == "torch":
        for name, contender in (
            ("one rank: call overhead", "torch in place"),
            ("one rank: training step", "torch DDP"),
        ):
            assert contender in found["parts"][name]["results"][-1]["times"]


def test_a_library_that_sees_no_device_is_named(tmp_path):
    _, found, _ = run(tmp_path, "--arrays", "cupy", "--only", "one rank: verbs", CUPY_HAS_NO_DEVICE="1")
    part = found["parts"]["one rank: verbs"]
    assert part["status"] == "failed"
    assert "CuPy sees no device" in part["logs"][0]


def test_what_parts_find_is_told(tmp_path):
    """A sanitizer that has seen something."""
    tool = sanitizer(tmp_path / "bin", "echo invalid write; exit 9")
    code, found, page = run(tmp_path, "--only", "sanitizer", **tool)
    assert code == 1
    seen = found["parts"]["sanitizer"]
    assert seen["status"] == "failed", found
    assert "invalid write" in seen["results"][0]["tail"]
    assert "| sanitizer | failed |" in page


def test_an_operation_that_nccl_loses_is_a_part_that_failed(tmp_path):
    code, found, page = run(tmp_path, "--only", "a full queue", FAKE_NCCL_FAIL="0:5:error")
    assert (code, found["parts"]["a full queue"]["status"]) == (1, "failed"), found
    assert "| a full queue | failed |" in page


def test_another_error_than_that_of_the_other_rank_is_a_part_that_failed(tmp_path):
    """NCCL loses the operation that should have waited."""
    code, found, _ = run(
        tmp_path, "--only", "two ranks: one does not call,one is killed", FAKE_NCCL_FAIL="0:3:error"
    )
    assert code == 1
    assert {part["status"] for part in found["parts"].values()} == {"failed"}, found


def test_a_rank_that_has_to_be_killed(monkeypatch):
    monkeypatch.syspath_prepend(str(KIT))
    import kit

    part = kit.Part("a part", 1, (), 2, killed=1)
    assert [kit._judged(part, 1, code) for code in (None, -9, 0, 1, 77)] == [None, 0, 1, 1, 77]
    assert [kit._judged(part, 0, code) for code in (None, -9, 0, 1, 77)] == [None, -9, 0, 1, 77]


def test_a_half_is_run_alone(monkeypatch):
    """Each part is in one half, so that two calls run everything."""
    monkeypatch.syspath_prepend(str(KIT))
    import kit

    parts = kit.parts(short=False, sharing=kit.sharing_for("2.28.9"))
    assert {part.kind for part in parts} == {"checks", "times"}
    assert {part.name for part in parts if part.kind == "times"} >= {
        "one rank: call overhead",
        "one rank: training step",
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


def test_times_of_ranks_that_share_a_device_are_only_compared(monkeypatch):
    monkeypatch.syspath_prepend(str(KIT))
    import summary

    times = {
        name: {"call_us": 1.0, "whole_us": us}
        for name, us in (("alone", 1000.0), ("samestep", 1300.0), ("torch DDP", 1400.0))
    }
    step = {"status": "passed", "results": [{"what": "step", "rank": 0, "ranks": 2, "times": times}]}
    [(goal, value, good)] = summary.judged({"fakes": False, "parts": {"two ranks: training step": step}})
    assert (value, good) == ("0.75 times", True)
    assert "share a device" in goal


def test_where_calls_are_slow_fewer_are_made(monkeypatch):
    """Ranks that share a device need some 10 ms for an operation, 80 ms for one of each contender."""
    monkeypatch.syspath_prepend(str(KIT))
    import kit_times

    assert kit_times.fewer(15, 50, 1e-4, 6.0) == (15, 50)
    for once in (0.001, 0.08, 0.5, 3.0):
        n, each = kit_times.fewer(15, 50, once, 6.0)
        assert 1 <= n <= 15
        assert 1 <= each <= 50
        assert n * each * once <= 6.0
    assert kit_times.fewer(15, 50, 60.0, 6.0) == (1, 1)


def test_how_ranks_share_a_device(monkeypatch):
    monkeypatch.syspath_prepend(str(KIT))
    import kit

    assert kit.sharing_for("2.28.9").of_rank == {"NCCL_HOSTID": "rank-{rank}"}
    assert kit.sharing_for("2.30.3").variables == {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    assert kit.sharing_for("").how == kit.sharing_for("2.9.6").how
