"""A part of the kit: the verbs under compute-sanitizer, which sees accesses that no number shows."""

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
    # Errors of the runtime's own functions are left out: torch makes some on purpose.
    flags = ["--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    words = [tool, *flags, sys.executable, "kit_checks.py", "verbs", "nccl"]
    # In torch's blocks of 2 MiB the arrays lie next to each other, where nothing is out of bounds.
    variables = {"KIT_SHORT": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(words, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    if done.returncode == SKIPPED:
        skip(done.stdout.strip().removeprefix("SKIPPED "))
    tell(what="sanitizer", exit_code=done.returncode, tail=done.stdout[-1500:])
    return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
