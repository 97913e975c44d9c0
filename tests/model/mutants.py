#!/usr/bin/env python3
"""Break csrc/node in one place at a time and check that the exploration finds it.

    mutants.py BUILD [--third 0|1|2] [NAME...]     BUILD: folder of a build with SAMESTEP_BUILD_MODEL

A mutant is source, not a macro: a text that must be found once, and what takes its place.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120


class Mutant(NamedTuple):
    name: str
    source: str
    changes: list[tuple[str, str]]
    scenario: str


MEETING, REDUCTION = "csrc/node/line_meeting.cpp", "csrc/node/node_reduction.cpp"
DIRECT, STAGED = "csrc/node/direct_reduction.cpp", "csrc/node/staged_reduction.cpp"
STAGED_RUNS = "csrc/node/staged_movement.cpp"
MAILBOX, MOVEMENT, OPERATION = (
    "csrc/node/mailbox.cpp",
    "csrc/node/node_movement.cpp",
    "csrc/exchange/operation.cpp",
)
RELEASE, RELAXED = "std::memory_order_release", "std::memory_order_relaxed"
ALL_HERE = "if (!group_->meeting->all_here(sequence_)) return false;"
NUMBERED = "line.number.store((cpu_ << Arena::kNumberBits) | (sequence + 1), "
WRITTEN = "ring.written.value.store(written + frame.nbytes, "
TAKEN = "tell_taken(arrived.source, arrived.id);"
PEER = "const int peer = members_[static_cast<std::size_t>(arrived.source)];"

MUTANTS = [
    Mutant(
        "a slot is used again too early",
        MEETING,
        [("released_by_all_ + Arena::kSlots &&", "released_by_all_ + 2 * Arena::kSlots &&")],
        "queue-slots-2-bounded",
    ),
    Mutant(
        "a block is used again before all have released it",
        MEETING,
        [("users_[n_blocks_ % Arena::kBlocks] <= released_by_all_", "true")],
        "queue-blocks-2-bounded",
    ),
    Mutant(
        "one block instead of several",
        MEETING,
        [
            ("arena_->block(rank_, n_blocks_++)", "arena_->block(rank_, 0 * n_blocks_++)"),
            ("block(peer, number)", "block(peer, 0)"),
        ],
        "now-block-2",
    ),
    Mutant(
        "the line is announced without release",
        MEETING,
        [(f"{NUMBERED}{RELEASE})", f"{NUMBERED}{RELAXED})")],
        "now-line-2",
    ),
    Mutant(
        "an operation is released without release",
        MEETING,
        [(f"store(released_, {RELEASE})", f"store(released_, {RELAXED})")],
        "queue-slots-2-bounded",
    ),
    Mutant(
        "peers that came for the operation before count for the next",
        MEETING,
        [("  scanned_ = 1;\n  arena_->released", "  arena_->released")],
        "now-line-2",
    ),
    Mutant(
        "an operation is released before it has been read",
        OPERATION,
        [("    if (ranks_agree()) {", "    meeting.release(sequence_);\n    if (ranks_agree()) {")],
        "queue-slots-2-bounded",
    ),
    Mutant(
        "signatures are not compared",
        OPERATION,
        [("agree = agree && header.digest == digest_;", "agree = agree && header.nbytes != 1;")],
        "differing-2",
    ),
    Mutant(
        "the claims that found no chunk are forgotten",
        DIRECT,
        [("n_chunks_ + static_cast<std::uint64_t>(task_.size());", "n_chunks_;")],
        "claimed-again-2-bounded",
    ),
    Mutant(
        "a rank leaves before all chunks are stored",
        DIRECT,
        [("if (!out_of_chunks_ || arena.finished", "if (!out_of_chunks_ && arena.finished")],
        "claimed-2-bounded",
    ),
    Mutant(
        "a chunk is claimed in two accesses",
        DIRECT,
        [
            (
                "return task_.group->arena->claimed(task_.sequence).fetch_add(1, std::memory_order_relaxed) - claimed;",
                "auto& c = task_.group->arena->claimed(task_.sequence); const auto k = c.load(); c.store(k + 1); "
                "return k - claimed;",
            )
        ],
        "claimed-2-bounded",
    ),
    Mutant(
        "chunks are finished without release",
        DIRECT,
        [("fetch_add(done, std::memory_order_acq_rel)", f"fetch_add(done, {RELAXED})")],
        "claimed-2-bounded",
    ),
    Mutant(
        "a rank leaves before what was dealt to another is stored",
        DIRECT,
        [("return task_.all_at(1);", "return true;")],
        "dealt-2",
    ),
    Mutant(
        "a rank says that it has stored what was dealt to it before it has",
        DIRECT,
        [
            (
                "std::uint64_t DirectReduction::reduce_some() {\n",
                "std::uint64_t DirectReduction::reduce_some() {\n"
                "  if (!claims_ && !std::exchange(told_, true)) task_.set_step(1);\n",
            )
        ],
        "dealt-2",
    ),
    Mutant(
        "one stage for all windows",
        STAGED,
        [("arena->stage(rank, window)", "arena->stage(rank, 0 * window)")],
        "staged-2-bounded",
    ),
    Mutant(
        "a stage is used before the others are there",
        STAGED,
        [("if (step_ != first_ && !task_.all_at(step_)) return false;", "")],
        "staged-2-bounded",
    ),
    Mutant(
        "a window is copied ahead while the operation before is under way",
        REDUCTION,
        [("group_->meeting->is_next(sequence_) &&", "true &&")],
        "staged-ahead-2-bounded",
    ),
    Mutant(
        "the first step is left out where one rank has not copied ahead",
        STAGED,
        [("std::all_of(task_.posted", "std::any_of(task_.posted")],
        "staged-late-2-bounded",
    ),
    Mutant("a reduction does not look for the mark", REDUCTION, [(ALL_HERE, "")], "given-up-dealt-2"),
    Mutant("a movement does not look for the mark", MOVEMENT, [(ALL_HERE, "")], "given-up-gather-2"),
    Mutant(
        "a buffer is given back before the others have copied it",
        MOVEMENT,
        [("return group_->arena->is_at(sequence_, peer, Arena::kLastStep);", "return true;")],
        "gathered-2",
    ),
    Mutant(
        "a window is staged where another still lies",
        STAGED_RUNS,
        [("step_ - depth_ + 2;", "step_ - depth_ + 1;")],
        "staged-broadcast-2-bounded",
    ),
    Mutant(
        "a window is taken before it is there",
        STAGED_RUNS,
        [("if (!ahead && !arena.is_at(sequence_, run.peer, step_)) return false;", "")],
        "staged-gather-2-bounded",
    ),
    Mutant(
        "every first window counts as staged ahead",
        STAGED_RUNS,
        [("(step_ == 1 && run.first_is_staged)", "step_ == 1")],
        "staged-broadcast-root-late-2-bounded",
    ),
    Mutant(
        "a run is staged ahead while the operation before is under way",
        MOVEMENT,
        [("&& group_->meeting->is_next(sequence_)) stage_ahead(", ") stage_ahead(")],
        "staged-broadcast-root-late-2-bounded",
    ),
    Mutant(
        "a window that several receive is given back by each",
        STAGED_RUNS,
        [("several_receive_ ? kernels::copy_lines(into", "false ? kernels::copy_lines(into")],
        "staged-broadcast-3-bounded",
    ),
    Mutant(
        "what several ranks read is given back by each",
        "csrc/node/short_call.cpp",
        [("return engine.size() == 2 && nbytes", "return nbytes")],
        "moved-now-3-bounded",
    ),
    Mutant(
        "runs to different ranks share their place in a stage",
        STAGED_RUNS,
        [("+ lane * lane_nbytes_ +", "+ 0 * lane * lane_nbytes_ +")],
        "staged-swap-3-bounded",
    ),
    Mutant(
        "a rank leaves while others still take from its stage",
        MOVEMENT,
        [("return group_->arena->is_at(sequence_, peer, Arena::kLastStep);", "return true;")],
        "staged-broadcasts-2-bounded",
    ),
    Mutant(
        "a full ring is written to",
        MAILBOX,
        [("- read > room) return false;", "- read > 2 * room) return false;")],
        "mailed-ring-bounded",
    ),
    Mutant(
        "a frame runs over the end of the ring",
        MAILBOX,
        [("at + frame.nbytes > room ? room - at : 0", "at + frame.nbytes > 2 * room ? room - at : 0")],
        "mailed-ring-bounded",
    ),
    Mutant(
        "a message that is taken at once is given back before it is copied",
        MAILBOX,
        [
            (
                "  return {place + sizeof frame, frame.length};",
                "  skip(source);\n  return {place + sizeof frame, frame.length};",
            )
        ],
        "mailed-now-ring-bounded",
    ),
    Mutant(
        "a short call is released before its data is copied",
        "csrc/node/node_communicator.cpp",
        [
            (
                "if (agreed && short_call::finish(engine, sequence, call)) {\n    meeting.release(sequence);",
                "if (agreed) meeting.release(sequence);\n  if (agreed && short_call::finish(engine, sequence, call)) {",
            )
        ],
        "moved-ahead-2-bounded",
    ),
    Mutant(
        "a message is written without release",
        MAILBOX,
        [(WRITTEN + RELEASE, WRITTEN + RELAXED)],
        "mailed-both-ways",
    ),
    Mutant(
        "room is given back before the message is taken",
        MAILBOX,
        [("    try {", f"    ring.read.value.store(read, {RELEASE});\n    try {{")],
        "mailed-ring-bounded",
    ),
    Mutant(
        "an offered message counts as taken before it is pulled",
        MAILBOX,
        [(TAKEN, ""), (PEER, f"{PEER}\n  if (host_->reaches_memory()) {TAKEN}")],
        "mailed-offer-bounded",
    ),
    Mutant(
        "a message in pieces counts as taken with its first piece",
        MAILBOX,
        [("record.moved == record.nbytes", "record.moved != 0")],
        "exchanged-now-pieces-bounded",
    ),
    Mutant(
        "the dead are not looked for", MAILBOX, [("host_->ended(members_[peer])", "false")], "killed-line-2"
    ),
    Mutant(
        "only its farewell tells that a rank has given up",
        MAILBOX,
        [("some_left ? arena_->left(rank)", "false ? arena_->left(rank)")],
        "given-up-full-ring-2-bounded",
    ),
    Mutant(
        "a rank's mark is believed before the count of marks",
        MAILBOX,
        [("const std::uint64_t left = some_left ?", "const std::uint64_t left = some_left || true ?")],
        "given-up-dealt-2",
    ),
    Mutant(
        "the line with what the owner may still read is given back",
        "csrc/node/short_call.cpp",
        [("give_back(engine, sequence, kLine);", "give_back(engine, sequence, 0);")],
        "now-posted-2",
    ),
]


def mutated(mutant: Mutant) -> str:
    text = (ROOT / mutant.source).read_text()
    for old, new in mutant.changes:
        if text.count(old) != 1:
            raise SystemExit(f"{mutant.name}: {mutant.source} holds {text.count(old)} times: {old}")
        text = text.replace(old, new)
    return text


def build(mutant: Mutant, build: Path, folder: Path) -> Path:
    """The exploration of the mutant, linked from the objects of the build and one new one."""
    commands = json.loads((build / "compile_commands.json").read_text())
    entry = next(e for e in commands if e["file"] == str(ROOT / mutant.source))
    source, made, program = folder / "mutant.cpp", folder / "mutant.o", folder / "model"
    source.write_text(mutated(mutant))
    command: list[str] = entry["command"].split()
    replaced = command[command.index("-o") + 1]
    command[command.index("-o") + 1] = str(made)
    command[command.index("-c") + 1] = str(source)
    subprocess.run([*command, "-w", "-Wno-error"], check=True, cwd=entry["directory"])
    objects = sorted(str(path) for path in build.glob("CMakeFiles/model*.dir/**/*.o"))
    kept = [path for path in objects if path != str(build / replaced)]
    if len(kept) + 1 != len(objects):
        raise SystemExit(f"{mutant.name}: its object is not among those of {build}")
    wraps = [f"-Wl,--wrap={name}" for name in ("memcpy", "memmove", "memset", "sched_yield")]
    subprocess.run([command[0], *kept, str(made), *wraps, "-o", str(program)], check=True)
    return program


def told_by(mutant: Mutant, where: Path) -> str | None:
    """What the exploration says of the mutant; None if it finds nothing."""
    with tempfile.TemporaryDirectory() as folder:
        program = build(mutant, where, Path(folder))
        ran = subprocess.run(
            [str(program), mutant.scenario],
            stdout=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    first = ran.stdout.split("\n", 1)[0]
    return first if ran.returncode == 1 and "VIOLATED" in first else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("build", type=Path, help="where the target `model` has been built")
    parser.add_argument("names", nargs="*", help="of mutants; none: all")
    parser.add_argument("--third", type=int, choices=range(3), help="only every third one, from this one on")
    args = parser.parse_args()
    where = args.build.resolve()
    some = MUTANTS if args.third is None else MUTANTS[args.third :: 3]
    wanted = [m for m in some if not args.names or m.name in args.names]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        told = list(pool.map(lambda mutant: told_by(mutant, where), wanted))
    for mutant, text in zip(wanted, told, strict=True):
        print(f"{'found' if text else 'MISSED'}: {mutant.name}: {text or mutant.scenario}")
    print(f"{sum(t is not None for t in told)} of {len(told)} mutants found")
    return 0 if all(told) else 1


if __name__ == "__main__":
    sys.exit(main())
