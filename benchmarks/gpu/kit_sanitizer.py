"""A part of the kit: the packing kernels under compute-sanitizer, which sees accesses that no number shows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from kit_rank import SKIPPED, skip, tell

PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")


def find() -> str | None:
    folders = [
        str(Path(home) / "bin") for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))
    ]
    return shutil.which(
        "compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *folders, *PLACES])
    )


def main() -> int:
    tool = find()
    if tool is None:
        skip("there is no compute-sanitizer")
    words = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "kit_times.py", "packing"]
    done = subprocess.run(
        words, env={**os.environ, "KIT_SHORT": "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode == SKIPPED:
        skip(done.stdout.strip().removeprefix("SKIPPED "))
    tell(what="sanitizer", exit_code=done.returncode, tail=done.stdout[-1500:])
    return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
