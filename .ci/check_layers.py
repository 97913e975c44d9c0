#!/usr/bin/env python3
"""Check that every file of csrc includes only from the folders its row allows."""

import re
import sys
from pathlib import Path

ALLOWED = {
    "core": set(),
    "os": {"core"},
    "kernels": {"core"},
    "communicator": {"core", "kernels"},
    "exchange": {"core", "kernels", "communicator"},
    "node": {"core", "os", "kernels", "communicator", "exchange"},
    "mpi": {"core", "os", "communicator", "exchange"},
    "tcp": {"core", "os", "kernels", "communicator", "exchange"},
    "hierarchy": {"core", "kernels", "communicator", "exchange", "node"},
    "nccl": {"core", "os", "kernels", "communicator", "exchange"},
    "select": {"core"},
    "bindings": {
        *("core", "os", "kernels", "communicator", "exchange", "node", "mpi", "tcp", "hierarchy", "nccl", "select")
    },
}
PREPROCESSOR_HOMES = {"os", "kernels"}

root = Path(__file__).resolve().parent.parent / "csrc"
wrong = []
for path in sorted(p for p in root.rglob("*") if p.suffix in {".h", ".cpp"}):
    folder = path.relative_to(root).parts[0]
    for number, line in enumerate(path.read_text().splitlines(), 1):
        where = f"csrc/{path.relative_to(root)}:{number}"
        include = re.match(r'\s*#\s*include\s+"([^"/]+)/', line)
        if include and include[1] != folder and include[1] not in ALLOWED.get(folder, set()):
            wrong.append(f"{where}: {folder}/ must not include {include[1]}/")
        if re.match(r"\s*#\s*include\s+<(Python\.h|pybind11/)", line) and folder != "bindings":
            wrong.append(f"{where}: only bindings/ may know Python")
        if re.match(r"\s*#\s*if", line) and folder not in PREPROCESSOR_HOMES:
            wrong.append(f"{where}: conditional compilation belongs to {sorted(PREPROCESSOR_HOMES)}")
    if folder not in ALLOWED:
        wrong.append(f"csrc/{folder}: a folder without a row in {Path(__file__).name}")
print("\n".join(wrong) or "layers: every include follows the table")
sys.exit(bool(wrong))
