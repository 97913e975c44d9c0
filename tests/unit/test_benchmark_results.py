"""What the programs in `benchmarks` decide: which rounds count, what is stored, goals, the page."""

import dataclasses
import doctest
import importlib
import json
import re
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MIB = 1 << 20
NAMES = ("mpi4py", "samestep", "shared", "gloo", "limit")


@pytest.fixture
def module(monkeypatch):
    if not BENCHMARKS.is_dir():
        pytest.skip("the benchmarks are not part of this tree")
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def results(module):
    return module("results")


def point(results, medians, *, verb="allreduce", dtype="float32", nbytes=MIB, mode="single", **changes):
    """Contender -> median; the 99th percentile is twice, the rounds are half and one and a half of it."""
    summaries = {
        name: results.Summary("call()", us, 2 * us, us / 2, [us / 2, us * 1.5], 100, 1)
        for name, us in medians.items()
    }
    facts = {"rounds": 2, "left_out": 0, "others": 0.0, "disturbed": False, "seconds": 1.0} | changes
    return results.Point(results.Cell(verb, dtype, nbytes, mode), summaries, **facts)


def result(results, points, *, mpi="Open MPI", ranks=2, **changes):
    machine = {
        "processor": "a processor",
        "usable_cores": 2,
        "memory_gib": 4.0,
        "system": "Linux",
        "python": "3.11",
        "versions": {"numpy": "2.0"},
        "mpi": {"name": mpi, "version": "5.0", "threads": "multiple"},
        "settings": {},
        "commit": "abc",
        "utc": "2026-01-01 00:00:00",
    }
    facts = {"command": "python benchmarks/collectives.py -n 2", "settings": {}, "contenders": list(NAMES)}
    return results.Result(machine=machine, ranks=ranks, points=points, **facts | changes)


@pytest.mark.parametrize(
    "name", ["collectives", "ddp_step", "disturbance", "machine", "problems", "report", "results", "schedule"]
)
def test_examples_in_docstrings_run(module, name):
    found = doctest.testmod(module(name))
    assert found.attempted
    assert not found.failed


# ---- disturbed rounds


def use(module, *, wall=1.0, cores=2, idle=0.0, own=2.0, stolen=0.0):
    return module("disturbance").Use(wall, cores, idle, own, stolen)


@pytest.mark.parametrize(
    ("facts", "others"),
    [
        ({}, 0.0),
        ({"own": 1.5}, 0.5),  # the ranks got 1.5 of 2 cores
        ({"own": 1.5, "idle": 0.5}, 0.0),  # they slept
        ({"own": 2.1}, 0.0),  # never negative
        ({"own": 2.0, "stolen": 0.3}, 0.3),  # a kernel that counts stolen time as ours
        ({"wall": 2.0, "own": 3.0, "stolen": 0.3}, 0.5),
    ],
)
def test_others_have_what_is_neither_idle_nor_ours(module, facts, others):
    assert use(module, **facts).others == pytest.approx(others)


def test_ticks_of_the_kernel_disturb_no_short_round(module):
    tick = module("machine").TICK
    assert not use(module, wall=0.1, own=0.2 - 2 * tick).disturbed
    assert use(module, wall=1.0, own=1.8).disturbed
    assert not use(module, wall=1.0, own=1.95).disturbed


def test_undisturbed_rounds_are_kept_and_all_if_there_are_none(module):
    quiet, noisy = use(module), use(module, own=1.0)
    kept = module("disturbance").kept
    assert kept([quiet, noisy, quiet]) == [0, 2]
    assert kept([noisy, noisy]) == [0, 1]


def test_short_rounds_taken_together_show_what_ticks_hide_in_each(module):
    disturbance, tick = module("disturbance"), module("machine").TICK
    short = use(module, wall=2 * tick, own=3 * tick)  # one core of two, for two ticks
    assert not short.disturbed
    whole = disturbance.together([short] * 10)
    assert whole.disturbed
    assert (whole.wall, whole.others) == (pytest.approx(20 * tick), pytest.approx(0.5))


def test_idle_and_stolen_time_are_those_of_the_cores_asked_for(module):
    stat = "cpu 9 9 9 9 9 9 9 9 0 0\ncpu0 1 1 1 200 30 1 1 4 0 0\ncpu1 1 1 1 500 1 1 1 7 0 0\nintr 5\n"
    machine = module("machine")
    idle, stolen = machine._idle_and_stolen(stat, {0})
    assert (round(idle / machine.TICK), round(stolen / machine.TICK)) == (230, 4)


# ---- schedule


def test_the_presets_measure_what_the_goals_ask_for(module, results):
    schedule, goals = module("schedule"), module("goals")
    full = set(schedule.cells(schedule.FULL))
    for (_, _, mode), by_ranks in goals.FASTER.items():
        for nbytes in {nbytes for sizes in by_ranks.values() for nbytes in sizes}:
            assert results.Cell("allreduce", "float32", nbytes, mode) in full
    wanted = [
        results.Cell(verb, "float32", nbytes * MIB, "single")
        for verb in goals.MOVING_VERBS
        for nbytes in (1, 16, 64)
    ]
    assert full.issuperset(wanted)
    assert len(schedule.cells(schedule.QUICK)) < len(full) / 2


def test_sizes_and_types_that_are_asked_for_replace_the_preset(module):
    schedule = module("schedule")
    found = schedule.cells(
        schedule.FULL, verbs=["allreduce", "bcast"], dtypes=["float16"], sizes=[8, 65536, 8]
    )
    assert [(cell.verb, cell.dtype, cell.nbytes, cell.mode) for cell in found] == [
        ("allreduce", "float16", 8, "single"),
        ("allreduce", "float16", 8, "b2b"),
        ("allreduce", "float16", 65536, "single"),
        ("bcast", "float32", 8, "single"),
        ("bcast", "float32", 8, "b2b"),
        ("bcast", "float32", 65536, "single"),
    ]


def test_shares_use_up_the_time_and_are_larger_for_large_arrays(module):
    schedule = module("schedule")
    cells, seconds, spent = schedule.cells(schedule.FULL), 100.0, {}
    left = seconds
    for done, cell in enumerate(cells):
        spent[cell] = schedule.share(left, cells[done:], 4)
        left -= spent[cell]
    assert left == pytest.approx(0, abs=1e-9)
    assert min(spent.values()) > 0.1
    largest = max(spent, key=lambda cell: spent[cell])
    assert (largest.verb, largest.nbytes) == ("allgather", 64 * MIB)
    assert schedule.share(-5.0, cells, 4) == 0


# ---- what is stored


def test_a_result_is_read_as_it_was_written(results, tmp_path):
    made = result(results, [point(results, {"mpi4py": 2.0, "shared": 1.0})], absent={"gloo": "no torch"})
    results.save(made, tmp_path / "a.json")
    assert results.load(tmp_path / "a.json") == made
    (tmp_path / "b.json").write_text('{"schema": 1}')
    with pytest.raises(ValueError, match=r"b\.json: no result of this version"):
        results.load(tmp_path / "b.json")


def test_ratios_say_how_many_times_faster_ours_is(results):
    made = point(results, {"mpi4py": 6.0, "shared": 2.0})
    assert results.times_faster(made, "shared", "mpi4py") == 3
    assert results.times_faster(made, "shared", "gloo") is None
    assert results.spread(made, "shared", "mpi4py") == (3, 3)
    assert results.spread(made, "samestep", "mpi4py") is None


def test_every_slower_cell_is_a_loss_and_an_equal_one_is_not(results):
    points = [
        point(results, {"mpi4py": 2.0, "samestep": 3.0, "shared": 2.0, "gloo": 2.5}),
        point(results, {"limit": 1.0, "shared": 2.0}),
    ]
    assert [(ours, rival) for _, ours, rival in results.lost_cells(points)] == [
        ("samestep", "mpi4py"),
        ("samestep", "gloo"),
    ]


# ---- goals


def verdict(module, made, text):
    found = [v for v in module("goals").judge(made) if text in v.name]
    assert len(found) == 1, [v.name for v in found]
    return found[0]


@pytest.mark.parametrize(
    ("medians", "text", "expected"),
    [
        ({"mpi4py": 3.2, "shared": 1.0}, "allreduce 1 MiB, shared: times faster than mpi4py", (3.2, True)),
        ({"mpi4py": 3.1, "shared": 1.0}, "allreduce 1 MiB, shared: times faster than mpi4py", (3.1, False)),
        (
            {"mpi4py": 1.6, "samestep": 1.0},
            "allreduce 1 MiB, samestep: times faster than mpi4py",
            (1.6, True),
        ),
        ({"gloo": 29.0, "shared": 1.0}, "allreduce 1 MiB, shared: times faster than gloo", (29, False)),
        ({"limit": 1.0, "shared": 1.6}, "allreduce 1 MiB, shared over limit", (1.6, True)),
        ({"limit": 1.0, "shared": 1.7}, "allreduce 1 MiB, shared over limit", (1.7, False)),
        ({"mpi4py": 5.0}, "allreduce 1 MiB, shared: times faster than mpi4py", (None, None)),
    ],
)
def test_a_goal_is_reached_at_its_bound(module, results, medians, text, expected):
    got = verdict(module, result(results, [point(results, medians)]), text)
    assert (got.found, got.reached) == expected


@pytest.mark.parametrize(("limit", "beyond"), [(1.6, True), (1.25, True), (1.24, False)])
def test_a_goal_that_the_memory_does_not_allow_says_so(module, results, limit, beyond):
    made = result(results, [point(results, {"mpi4py": 3.1, "shared": 2.0, "limit": limit}, verb="alltoall")])
    got = verdict(module, made, "alltoall 1 MiB, shared: times faster")
    assert (got.reached, got.out_of_reach) == (False, beyond)
    assert ("the memory allows" in str(got)) == beyond


def test_goals_of_bursts_halves_tails_and_trees(module, results):
    points = [
        point(results, {"mpi4py": 2.0, "samestep": 0.4}, nbytes=8, mode="b2b"),
        point(results, {"mpi4py": 2.0, "samestep": 3.0, "shared": 1.0}, nbytes=8),
        point(results, {"shared": 0.7, "shared_float32": 1.0}, dtype="bfloat16", nbytes=8 * MIB),
        point(results, {"mpi4py": 10.0, "samestep": 2.1}, verb="synchronize", nbytes=2_000_000),
        point(results, {"mpi4py": 10.0, "samestep": 8.0, "shared": 4.0}, verb="bcast"),
    ]
    made = result(results, points, import_ms={"added": 61.0, "others": 0.0})
    expected = {
        "8 B back to back, samestep: times": True,
        "allreduce 8 B back to back, samestep": True,
        "8 B, samestep: p99": False,
        "8 B, shared: p99": True,
        "bfloat16 8 MiB": True,
        "200 Bcast": False,
        "bcast 1 MiB, samestep": False,
        "bcast 1 MiB, shared": True,
        "cells slower": False,
        "import": False,
    }
    judged = {v.name: v for v in module("goals").judge(made)}
    for text, reached in expected.items():
        names = [name for name in judged if name == text] or [name for name in judged if text in name]
        assert [judged[name].reached for name in names] == [reached], (text, names)
    assert set(module("goals").missed(made)) == {v.name for v in judged.values() if v.reached is False}


def test_four_ranks_have_goals_of_their_own_and_three_only_those_for_any(module, results):
    made = [point(results, {"mpi4py": 4.1, "shared": 1.0})]
    text = "allreduce 1 MiB, shared: times faster than mpi4py"
    assert verdict(module, result(results, made, ranks=2), text).reached
    assert not verdict(module, result(results, made, ranks=4), text).reached
    assert text not in {v.name for v in module("goals").judge(result(results, made, ranks=3))}


def test_the_goals_command_fails_on_a_miss_only_if_that_is_required(module, results, tmp_path, capsys):
    path = tmp_path / "a.json"
    results.save(result(results, [point(results, {"mpi4py": 1.0, "shared": 2.0}, disturbed=True)]), path)
    main = module("goals").main
    assert main([str(path)]) == 0
    assert main([str(path), "--require"]) == 1
    printed = capsys.readouterr().out
    assert re.search(
        r"MISSED +allreduce 1 MiB, shared: times faster than mpi4py +0.5 x +>= 3.2  DISTURBED", printed
    )
    assert "slower: allreduce 1 MiB, shared 0.50 times as fast as mpi4py" in printed


# ---- the page


def test_the_page_has_times_ratios_within_runs_and_losses(module, results):
    report = module("report")
    ompi = result(results, [point(results, {"mpi4py": 8.0, "samestep": 4.0, "shared": 10.0, "gloo": 40.0})])
    mpich = result(results, [point(results, {"mpi4py": 9.0, "samestep": 3.0, "shared": 1.0})], mpi="MPICH")
    text = report.render([mpich, ompi])
    assert (
        "| 1 MiB | single | 8.00 (16.0) | 40.0 (80.0) | 4.00 (8.00) | 10.0 (20.0) "
        "| 2 · 3 · 10 | **0.80** · 9 · 4 |"
    ) in text
    assert "times faster than Open MPI · MPICH · gloo" in text
    losing = text[text.index(report.SLOWER) : text.index("## Appendix: 2 ranks")]
    assert "| 2 | allreduce 1 MiB | `backend.empty` | Open MPI 5.0 | **0.80** | 0.80 to 0.80 |" in losing
    assert losing.count("1 MiB") == 1


def test_disturbed_cells_are_marked_and_rounds_left_out_are_counted(module, results):
    times = {"mpi4py": 2.0, "samestep": 1.0}
    points = [point(results, times, disturbed=True), point(results, times, nbytes=8, left_out=3)]
    text = module("report").render([result(results, points)])
    assert "| 1 MiB † |" in text
    assert "3 of 7 rounds left out" in text
    assert "**1 cells disturbed all the time**" in text


def test_a_result_twice_is_refused(module, results):
    made = result(results, [point(results, {"mpi4py": 1.0})])
    with pytest.raises(ValueError, match=r"two results with Open MPI 5\.0 on 2 ranks"):
        module("report").by_ranks([made, dataclasses.replace(made)])


def test_only_what_stands_between_the_marks_is_replaced(module):
    report = module("report")
    old = f"above\n{report.BEGIN}\nold\n{report.END}\nbelow"
    once = report.page(old, "new")
    assert once == f"above\n{report.BEGIN}\n\nnew\n\n{report.END}\nbelow"
    assert report.page(once, "new") == once
    with pytest.raises(ValueError, match="comments"):
        report.page("no comments", "new")


def test_the_committed_page_has_the_marks(module):
    report = module("report")
    assert report.page(report.PAGE.read_text(), "new")


def test_curves_are_times_relative_to_the_rival(module, results):
    plots = module("plots")
    points = [
        point(results, {"mpi4py": 8.0, "shared": 2.0}),
        point(results, {"mpi4py": 1.0, "shared": 2.0}, nbytes=8, mode="b2b"),
        point(results, {"mpi4py": 1.0, "shared": 9.0}, nbytes=8),  # small single calls are not drawn
        point(results, {"mpi4py": 1.0, "shared": 9.0}, dtype="float16"),
    ]
    assert plots.curve(points, "allreduce", "shared") == [(8, 2.0), (MIB, 0.25)]
    other = result(results, [point(results, {"mpi4py": 4.0})], mpi="MPICH")
    assert plots.beside(result(results, points), other, "allreduce") == [(MIB, 0.5)]


def test_report_writes_page_and_figures(module, results, tmp_path):
    pytest.importorskip("matplotlib")
    report = module("report")
    times = {"mpi4py": 2.0, "samestep": 1.0, "shared": 0.01, "gloo": 100.0, "limit": 0.5}
    made = result(results, [point(results, times), point(results, times, nbytes=65536)])
    results.save(made, tmp_path / "a.json")
    page = tmp_path / "page.md"
    page.write_text(f"{report.BEGIN}{report.END}")
    assert report.main([str(tmp_path / "a.json"), "--page", str(page)]) == 0
    assert "assets/performance/2-ranks.svg" in page.read_text()
    first = (tmp_path / report.FIGURES / "2-ranks.svg").read_bytes()
    assert b"<svg" in first
    report.main([str(tmp_path / "a.json"), "--page", str(page)])
    assert (tmp_path / report.FIGURES / "2-ranks.svg").read_bytes() == first  # no date, no random names


def test_tuned_rivals_and_nothing_secret_are_named(module, results):
    found = module("machine").settings({"UCX_TLS": "shm", "SAMESTEP_SECRET": "s", "OMPI_MCA_num_procs": "2"})
    assert found == {"UCX_TLS": "shm"}
    made = result(results, [point(results, {"mpi4py": 1.0})])
    made.machine["settings"] = found
    assert "`UCX_TLS=shm python benchmarks/collectives.py -n 2`" in module("report").render([made])


def test_the_command_that_is_recorded_works_elsewhere(module):
    command = module("collectives")._command
    argv = [
        "/here/collectives.py",
        "--terminal",
        "/dev/pts/1",
        "--full",
        "--json",
        "/here/x",
        "--verbs",
        "bcast",
    ]
    assert command(argv, 4) == "python benchmarks/collectives.py -n 4 --full --verbs bcast"


# ---- a step of DDP


def ddp_rows(module, tmp_path, *, ours, gloo):
    """The cells of the page's rows, for rounds of a job on 2 ranks; a step alone takes 10 ms."""
    rounds = {"none": [10.0] * len(ours), "samestep": [10 + x for x in ours], "gloo": [10 + x for x in gloo]}
    cell = {"step_ms": {"none": 10.0, "samestep": 11.0, "gloo": 14.0}, "rounds_ms": rounds}
    path = tmp_path / "2.json"
    path.write_text(json.dumps({"ranks": 2, "sizes": {"1": cell}}))
    table = module("ddp_step").page([path]).splitlines()[2:]
    return [row.strip("| ").split(" | ") for row in table]


def test_exposed_communication_stands_with_its_interval(module, tmp_path):
    spread = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.5]
    [row] = ddp_rows(module, tmp_path, ours=spread, gloo=[4 * x for x in spread])
    assert row[-3:] == ["1.0 (0.5 to 1.5)", "4.0 (2.0 to 6.0)", "25%"]


def test_a_difference_lost_in_the_noise_is_shown_as_such(module, tmp_path):
    noise = [-15.0, -9.0, -8.0, -1.0, 1.0, 2.0, 4.0]
    [row] = ddp_rows(module, tmp_path, ours=noise, gloo=[40.0] * 7)
    assert row[-3:] == ["noise (-15.0 to 4.0)", "40.0 (40.0 to 40.0)", "below 10%"]
    [row] = ddp_rows(module, tmp_path, ours=noise, gloo=noise)
    assert row[-1] == "-"


def test_the_table_on_the_page_is_that_of_the_results(module):
    results = sorted(BENCHMARKS.glob("results/ddp/*.json"))
    if not results:
        pytest.skip("the results are not part of this tree")
    assert (BENCHMARKS / "results/ddp/table.md").read_text() == module("ddp_step").page(results) + "\n"
