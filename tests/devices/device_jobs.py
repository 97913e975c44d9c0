"""Ranks as processes of their own, that meet through a file and have fake devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_libraries

PATIENCE_S = 90.0
FAKES = str(Path(fake_libraries.__file__).parent)

PRELUDE = f"""
import json, os, sys, time
sys.path.insert(0, {FAKES!r})
import numpy as np
import samestep as ss
import fake_arrays
from fake_arrays import Array, Stream, array_of

rank, size, place = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def start(backend="nccl", timeout=30.0, **more):
    return ss.initialize(
        backend, init_method=f"file://{{place}}/meeting", rank=rank, world_size=size, timeout=timeout, **more
    )

def tell(**what):
    os.write(1, ("\\0" + json.dumps(what) + "\\n").encode())

def told(act):
    begin = time.monotonic()
    try:
        tell(result=act())
    except Exception as error:
        tell(kind=type(error).__name__, text=str(error), seconds=time.monotonic() - begin)

"""


class Ended:
    """How one rank has ended, and what it told."""

    def __init__(self, code: int, text: str) -> None:
        self.code, self.text = code, text
        self.told: list[dict[str, Any]] = [
            json.loads(line[1:]) for line in text.split("\n") if line.startswith("\0")
        ]

    def __repr__(self) -> str:
        return f"ended with {self.code}:\n{self.text}"


def run(
    folder: Path, script: str, n: int, *, of_rank: dict[int, dict[str, str]] | None = None, **variables: str
) -> list[Ended]:
    """Run `script` after PRELUDE on `n` ranks; `of_rank`: more variables for some of them."""
    program = folder / "program.py"
    program.write_text(PRELUDE + script)
    hidden = ("RANK", "WORLD_SIZE", "MASTER_PORT")
    common = {k: v for k, v in os.environ.items() if k not in hidden and not k.startswith("OMPI_")}
    common |= fake_libraries.environment() | {"TMPDIR": str(folder)} | variables
    processes = [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(program), str(rank), str(n), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=common | (of_rank or {}).get(rank, {}),
            text=True,
        )
        for rank in range(n)
    ]
    try:
        texts = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
        return [Ended(process.wait(), text) for process, text in zip(processes, texts, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.wait()
