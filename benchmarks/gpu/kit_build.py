"""Builds the package's extension from this tree with the C++ compiler alone: `kit_build.py`.

For machines with neither CMake nor scikit-build-core. pybind11's headers are its own or those that torch brings. The
result lies beside the Python files, where an import of this tree finds it, and is made again when a source is newer.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "csrc"
FLAGS = (
    "-std=c++20 -O2 -DNDEBUG -fPIC -fvisibility=hidden -fvisibility-inlines-hidden -ffp-contract=off -pthread"
)
# As in CMakeLists.txt: how many files of a folder are one compilation; of other folders all are.
AT_ONCE = {"bindings": 9, "kernels": 1}
BY_ITSELF = "os/peer_watch.cpp"
AVX2 = "-mavx2 -mf16c -fno-tree-vectorize"
OF_FILE = {  # as in CMakeLists.txt
    "kernels/avx2.cpp": AVX2,
    "kernels/avx512.cpp": f"{AVX2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512",
}


def target() -> Path:
    return ROOT / "python/samestep" / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"


def is_fresh() -> bool:
    made = target()
    newest = max(path.stat().st_mtime for path in SOURCES.rglob("*.*"))
    return made.exists() and made.stat().st_mtime >= newest


def pybind11_headers() -> Path:
    """The folder of pybind11 3.0 or newer."""
    found = []
    for module, below in (("pybind11", "include"), ("torch", "include")):
        spec = importlib.util.find_spec(module)
        if spec is None or not spec.submodule_search_locations:
            continue
        folder = Path(spec.submodule_search_locations[0]) / below
        common = folder / "pybind11/detail/common.h"
        if not common.exists():
            continue
        text = common.read_text(errors="replace")
        major = re.search(r"define PYBIND11_VERSION_MAJOR (\d+)", text)
        if major and int(major[1]) >= 3:
            return folder
        found.append(f"{folder} is too old")
    sys.exit(
        f"no headers of pybind11 3.0 or newer: {'; '.join(found) or 'neither pybind11 nor torch is installed'}"
    )


def units(folder: Path) -> list[tuple[Path, str]]:
    """What is compiled: sources, and files written to `folder` that include several of a folder of csrc."""
    by_folder: dict[str, list[str]] = {}
    for path in sorted(SOURCES.rglob("*.cpp")):
        name = path.relative_to(SOURCES).as_posix()
        by_folder.setdefault(name if name == BY_ITSELF else path.parent.name, []).append(name)
    made = []
    for of, names in by_folder.items():
        at_once = AT_ONCE.get(of, len(names))
        for start in range(0, len(names), at_once):
            some = names[start : start + at_once]
            if len(some) == 1:
                made.append((SOURCES / some[0], some[0]))
                continue
            unit = folder / f"{of}-{start}.cpp"
            unit.write_text("".join(f'#include "{name}"\n' for name in some))
            made.append((unit, unit.name))
    return sorted(made, key=lambda unit: not unit[1].startswith("bindings"))  # those take longest


def main() -> None:
    if is_fresh():
        print(f"{target()} is fresh")
        return
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        sys.exit(f"no Python.h in {headers}: install this Python's development package")
    begin = time.monotonic()
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or "c++"
    objects = ROOT / "build/kit" / str(sysconfig.get_config_var("SOABI"))
    objects.mkdir(parents=True, exist_ok=True)
    includes = [
        f"-I{SOURCES}",
        f"-isystem{pybind11_headers()}",
        f"-isystem{headers}",
    ]

    def compiled(unit: tuple[Path, str]) -> str:
        source, name = unit
        made = objects / (name.replace("/", "-") + ".o")
        words = [compiler, *FLAGS.split(), *OF_FILE.get(name, "").split(), *includes]
        words += os.environ.get("CXXFLAGS", "").split()
        subprocess.run([*words, "-c", str(source), "-o", str(made)], check=True)
        return str(made)

    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = list(pool.map(compiled, units(objects)))
    part = target().with_suffix(".part")
    subprocess.run([compiler, "-shared", "-pthread", "-o", str(part), *made, "-ldl"], check=True)
    part.rename(target())
    print(f"{target()}: {len(made)} compilations in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
