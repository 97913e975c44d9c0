#!/usr/bin/env python3
"""Break csrc/shm or csrc/node in one place at a time and check that the exploration finds it.

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
TIMEOUT_S = 120


class Mutant(NamedTuple):
    name: str
    source: str
    changes: list[tuple[str, str]]
    scenario: str


HEADERS, REDUCTION = "csrc/shm/shm_header_exchange.cpp", "csrc/node/node_reduction.cpp"
SINGLE_COPY, STAGED = "csrc/node/single_copy_reduction.cpp", "csrc/node/staged_reduction.cpp"
FENCE = "csrc/shm/write_fence.cpp"
STAGED_EXCHANGE = "csrc/node/staged_exchange.cpp"
TRANSPORT, EXCHANGE, OPERATION = (
    "csrc/shm/shm_transport.cpp",
    "csrc/node/shm_exchange.cpp",
    "csrc/engine/operation.cpp",
)
RELEASE, RELAXED = "std::memory_order_release", "std::memory_order_relaxed"
ALL_PRESENT = "if (!group_->header_exchange->all_present(sequence_)) return false;"
READY_TAG = "slot.ready_tag.store((cpu_ << ShmRegion::kSequenceBits) | (sequence + 1), "
WRITTEN = "ring.written.value.store(written + frame.nbytes, "
FIN = "send_fin(arrived.source, arrived.id);"
PEER = "const int peer = members_[static_cast<std::size_t>(arrived.source)];"

MUTANTS = [
    Mutant(
        "a slot is used again too early",
        HEADERS,
        [("min_released_ + ShmRegion::kSlots &&", "min_released_ + 2 * ShmRegion::kSlots &&")],
        "queue-slots-2-bounded",
    ),
    Mutant(
        "a block is used again before all have released it",
        HEADERS,
        [("block_users_[n_blocks_ % ShmRegion::kBlocks] <= min_released_", "true")],
        "queue-blocks-2-bounded",
    ),
    Mutant(
        "one block instead of several",
        HEADERS,
        [
            ("region_->block(rank_, n_blocks_++)", "region_->block(rank_, 0 * n_blocks_++)"),
            ("block(peer, number)", "block(peer, 0)"),
        ],
        "inline-block-2",
    ),
    Mutant(
        "a header is posted without release",
        HEADERS,
        [(f"{READY_TAG}{RELEASE})", f"{READY_TAG}{RELAXED})")],
        "inline-slot-2",
    ),
    Mutant(
        "an operation is released without release",
        HEADERS,
        [(f"store(released_, {RELEASE})", f"store(released_, {RELAXED})")],
        "queue-slots-2-bounded",
    ),
    Mutant(
        "peers that posted the operation before count for the next",
        HEADERS,
        [("  next_peer_ = 1;\n  region_->released", "  region_->released")],
        "inline-slot-2",
    ),
    Mutant(
        "an operation is released before it has been read",
        OPERATION,
        [
            (
                "    if (headers_agree(",
                "    headers().release(sequence_);\n    if (headers_agree(",
            )
        ],
        "queue-slots-2-bounded",
    ),
    Mutant(
        "signatures are not compared",
        OPERATION,
        [("if (header.digest != digest || ", "if (header.nbytes == 1 || digest == 0 || ")],
        "differing-2",
    ),
    Mutant(
        "takes that found no chunk are forgotten",
        SINGLE_COPY,
        [("n_chunks_ + static_cast<std::uint64_t>(context_.size());", "n_chunks_;")],
        "dynamic-again-2-bounded",
    ),
    Mutant(
        "a rank completes before all chunks are stored",
        SINGLE_COPY,
        [("!= finished + n_chunks_) return false;", "== 0) return false;")],
        "dynamic-2-bounded",
    ),
    Mutant(
        "a chunk is taken in two accesses",
        SINGLE_COPY,
        [
            (
                "return context_.group->region->next_chunk(context_.sequence)"
                ".fetch_add(1, std::memory_order_relaxed) - first;",
                "auto& c = context_.group->region->next_chunk(context_.sequence); "
                "const auto k = c.load(); c.store(k + 1); "
                "return k - first;",
            )
        ],
        "dynamic-2-bounded",
    ),
    Mutant(
        "chunks are finished without release",
        SINGLE_COPY,
        [("fetch_add(done, std::memory_order_acq_rel)", f"fetch_add(done, {RELAXED})")],
        "dynamic-2-bounded",
    ),
    Mutant(
        "a rank completes before the static chunks of another are stored",
        SINGLE_COPY,
        [("return context_.all_at(1);", "return true;")],
        "static-2",
    ),
    Mutant(
        "a rank publishes its step before its static chunks are stored",
        SINGLE_COPY,
        [
            (
                "std::uint64_t SingleCopyReduction::reduce_some() {\n",
                "std::uint64_t SingleCopyReduction::reduce_some() {\n"
                "  if (!is_dynamic_ && !std::exchange(notified_, true)) context_.set_step(1);\n",
            )
        ],
        "static-2",
    ),
    Mutant(
        "one stage for all segments",
        STAGED,
        [("region->stage(rank, segment)", "region->stage(rank, 0 * segment)")],
        "staged-2-bounded",
    ),
    Mutant(
        "a stage is used before the others are there",
        STAGED,
        [("if (step_ != first_segment_ && !context_.all_at(step_)) return false;", "")],
        "staged-2-bounded",
    ),
    Mutant(
        "a segment is prestaged while the operation before is pending",
        REDUCTION,
        [("group_->header_exchange->is_next(sequence_) &&", "true &&")],
        "staged-ahead-2-bounded",
    ),
    Mutant(
        "the first step is left out where one rank has not prestaged",
        STAGED,
        [("std::all_of(context_.descriptors", "std::any_of(context_.descriptors")],
        "staged-late-2-bounded",
    ),
    Mutant(
        "a reduction does not check for ranks that have left",
        REDUCTION,
        [(ALL_PRESENT, "")],
        "given-up-static-2",
    ),
    Mutant(
        "an exchange does not check for ranks that have left",
        EXCHANGE,
        [(ALL_PRESENT, "")],
        "given-up-gather-2",
    ),
    Mutant(
        "a write by CMA passes no gate",
        FENCE,
        [("write_peer(members_[index], gate, pieces)", "write_peer(members_[index], 0 * gate, pieces)")],
        "given-up-cma-2-bounded",
    ),
    Mutant(
        "a rank leaves its gate open",
        FENCE,
        [("  peers_->close_gate(gate);\n", "")],
        "given-up-cma-2-bounded",
    ),
    Mutant(
        "a rank gets its error while another writes by CMA",
        FENCE,
        [("while (words_[i].ended.load(std::memory_order_acquire) < begun) {", "while (begun == ~0UL) {")],
        "given-up-cma-2-bounded",
    ),
    Mutant(
        "a write is counted when it is over",
        FENCE,
        [
            ("  mine.begun.fetch_add(1, std::memory_order_seq_cst);\n", ""),
            ("    end();\n    return written;", "    mine.begun.fetch_add(1); end();\n    return written;"),
        ],
        "given-up-cma-2-bounded",
    ),
    Mutant(
        "a buffer is released before the others have copied it",
        EXCHANGE,
        [("return group_->region->is_at(sequence_, peer, ShmRegion::kLastStep);", "return true;")],
        "gathered-2",
    ),
    Mutant(
        "a segment is staged over one that is still in use",
        STAGED_EXCHANGE,
        [("step_ - depth_ + 2;", "step_ - depth_ + 1;")],
        "staged-broadcast-2-bounded",
    ),
    Mutant(
        "a segment is read before it is staged",
        STAGED_EXCHANGE,
        [("if (step_ != 0 && !region.is_at(sequence_, run.peer, step_)) return false;", "")],
        "staged-gather-2-bounded",
    ),
    Mutant(
        "each of several readers owns the lines of a segment",
        STAGED_EXCHANGE,
        [("has_several_readers_ ? kernels::copy_vectorized(into", "false ? kernels::copy_vectorized(into")],
        "staged-broadcast-3-bounded",
    ),
    Mutant(
        "each of several readers owns the lines of a header",
        "csrc/node/inline_collective.cpp",
        [("return engine.size() == 2 && nbytes", "return nbytes")],
        "moved-inline-3-bounded",
    ),
    Mutant(
        "transfers to different ranks share a lane of a stage",
        STAGED_EXCHANGE,
        [("+ lane * lane_nbytes_ +", "+ 0 * lane * lane_nbytes_ +")],
        "staged-swap-3-bounded",
    ),
    Mutant(
        "a rank completes while others still read its stage",
        EXCHANGE,
        [("return group_->region->is_at(sequence_, peer, ShmRegion::kLastStep);", "return true;")],
        "staged-broadcast-reduced-2-bounded",
    ),
    Mutant(
        "a full ring is written to",
        TRANSPORT,
        [("- read > room) return false;", "- read > 2 * room) return false;")],
        "messages-ring-bounded",
    ),
    Mutant(
        "a frame runs over the end of the ring",
        TRANSPORT,
        [("at + frame.nbytes > room ? room - at : 0", "at + frame.nbytes > 2 * room ? room - at : 0")],
        "messages-ring-bounded",
    ),
    Mutant(
        "a message that is read inline is consumed before it is copied",
        TRANSPORT,
        [
            (
                "  return {slot + sizeof frame, frame.length};",
                "  consume(source);\n  return {slot + sizeof frame, frame.length};",
            )
        ],
        "messages-inline-ring-bounded",
    ),
    Mutant(
        "a short call is released before its data is copied",
        "csrc/node/node_communicator.cpp",
        [
            (
                "if (agreed && InlineCollective::finish(engine, sequence, args)) {\n"
                "    header_exchange.release(sequence);",
                "if (agreed) header_exchange.release(sequence);\n"
                "  if (agreed && InlineCollective::finish(engine, sequence, args)) {",
            )
        ],
        "moved-ahead-2-bounded",
    ),
    Mutant(
        "a message is written without release",
        TRANSPORT,
        [(WRITTEN + RELEASE, WRITTEN + RELAXED)],
        "messages-both-directions",
    ),
    Mutant(
        "the room of a frame is released before the frame is handled",
        TRANSPORT,
        [("    try {", f"    ring.read.value.store(read, {RELEASE});\n    try {{")],
        "messages-ring-bounded",
    ),
    Mutant(
        "a FIN is sent before the message is read",
        TRANSPORT,
        [(FIN, ""), (PEER, f"{PEER}\n  if (peers_->has_cma()) {FIN}")],
        "messages-rts-bounded",
    ),
    Mutant(
        "a message in data frames completes with the first frame",
        TRANSPORT,
        [("if (record.moved != record.nbytes) return;", "")],
        "exchanged-inline-data-bounded",
    ),
    Mutant(
        "dead processes are not detected",
        TRANSPORT,
        [("peers_->ended(members_[peer])", "false")],
        "killed-slot-2",
    ),
    Mutant(
        "only its leave notice reports that a rank has left",
        TRANSPORT,
        [("    if (left != 0) {\n      Departure why;", "    if (false) {\n      Departure why;")],
        "given-up-full-ring-2-bounded",
    ),
    Mutant(
        "a rank's `left` is read without the count of leavers",
        TRANSPORT,
        [("const std::uint64_t left = some_left ?", "const std::uint64_t left = some_left || true ?")],
        "given-up-gather-2",
    ),
    Mutant(
        "a reader owns the line that its writer may still read",
        "csrc/node/inline_collective.cpp",
        [("own_read_lines(engine, sequence, kLine);", "own_read_lines(engine, sequence, 0);")],
        "inline-posted-2",
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


def reported_by(mutant: Mutant, where: Path) -> str | None:
    """The violation that the exploration reports for the mutant; None if it finds none."""
    with tempfile.TemporaryDirectory() as folder:
        program = build(mutant, where, Path(folder))
        ran = subprocess.run(
            [str(program), mutant.scenario],
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
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
    for mutant in MUTANTS:
        mutated(mutant)  # also those of the other thirds: a change of the sources may have removed their text
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reported = list(pool.map(lambda mutant: reported_by(mutant, where), wanted))
    for mutant, text in zip(wanted, reported, strict=True):
        print(f"{'found' if text else 'MISSED'}: {mutant.name}: {text or mutant.scenario}")
    print(f"{sum(t is not None for t in reported)} of {len(reported)} mutants found")
    return 0 if all(reported) else 1


if __name__ == "__main__":
    sys.exit(main())
