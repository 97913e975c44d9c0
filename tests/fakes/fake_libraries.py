"""Builds the stand-ins of the GPU runtime and NCCL with the machine's C++ compiler, once for each content.

They are kept in this user's cache, are never installed and never on a search path: only the variables that
`environment` gives lead to them.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import real_libraries

HERE = Path(__file__).parent
FLAGS = [
    "-std=c++17",
    "-O1",
    "-g1",
    "-fPIC",
    "-shared",
    "-pthread",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Werror",
]


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


@functools.cache
def build(hip: bool = False) -> tuple[Path, Path]:
    """The runtime and the communication library. Where they are in use already: those, wherever they were built."""
    used = os.environ.get("SAMESTEP_HIP_LIBRARY" if hip else "SAMESTEP_CUDART_LIBRARY", "")
    if os.path.basename(used).startswith("libfake_"):
        return Path(used), Path(os.environ["SAMESTEP_NCCL_LIBRARY"])
    suffix = "-hip" if hip else ""
    text = b"".join(path.read_bytes() for path in sorted([*HERE.glob("fake_*.cpp"), *HERE.glob("*.h")]))
    with _folder(f"fakes{suffix}", text) as folder:
        runtime = folder / ("libfake_amdhip64.so" if hip else "libfake_cudart.so")
        nccl = folder / ("libfake_rccl.so" if hip else "libfake_nccl.so")
        if not nccl.exists():
            sources = [str(HERE / f"fake_{part}.cpp") for part in ("gpu", "queues", "controls")]
            _compile(runtime, *sources, *(["-DFAKE_HIP"] if hip else []))
            link = [f"-L{folder}", f"-l:{runtime.name}", "-Wl,-rpath,$ORIGIN"]
            _compile(nccl, *(str(HERE / f"fake_{part}.cpp") for part in ("nccl", "launches")), *link)
    return runtime, nccl


@functools.cache
def build_torch() -> Path:
    """CUDA tensors for the installed torch; see torch_on_fakes.cpp."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations is not None, "torch is not installed"
    torch = Path(spec.submodule_search_locations[0])
    source = HERE / "torch_on_fakes.cpp"
    headers = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    link = [f"-L{torch / 'lib'}", *(f"-l{name}" for name in ("c10", "torch_cpu", "torch_python"))]
    text = source.read_bytes() + (torch / "version.py").read_bytes() + str(torch).encode()
    with _folder("torch", text) as folder:
        library = folder / "libtorch_on_fakes.so"
        if not library.exists():
            words = ["-std=c++20", *(f"-isystem{path}" for path in headers)]
            _compile(library, *words, str(source), *link, f"-Wl,-rpath,{torch / 'lib'}")
    return library


@contextlib.contextmanager
def _folder(name: str, content: bytes) -> Iterator[Path]:
    """Where libraries of this content are kept, and nobody else's to write."""
    digest = hashlib.sha256(content + repr(FLAGS).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samestep-tests"
    folder = folder / f"{name}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def _compile(target: Path, *words: str) -> None:
    part = target.with_suffix(".part")
    subprocess.run(
        [compiler() or "c++", *FLAGS, f"-Wl,-soname,{target.name}", "-o", str(part), *words],
        check=True,
    )
    part.rename(target)


def environment(hip: bool = False) -> dict[str, str]:
    """The variables that lead to the stand-ins; none where the machine's own libraries are wanted."""
    if real_libraries.wanted():
        return {}
    runtime, nccl = build(hip)
    name = "SAMESTEP_HIP_LIBRARY" if hip else "SAMESTEP_CUDART_LIBRARY"
    return {name: str(runtime), "SAMESTEP_NCCL_LIBRARY": str(nccl)}
