"""Kernels that pack many small arrays of a device into one: where their compiler is, and when they are used."""

from __future__ import annotations

import functools
import glob
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from samestep import _core, accelerators
from samestep.errors import Error, InvalidArgumentError

__all__ = ["below", "bucket_nbytes", "find_compiler", "packer"]

BELOW = 512 << 10
"""Arrays of as many bytes or more stay where they lie.

A packed array is read and written twice more: at half of an H100's 3.3 TB/s that takes 1.3 us for 512 KiB, about what
one more call in a group of NCCL takes on the host. `benchmarks/gpu/kit.sh` measures both.
"""

_ALIGNMENT = 16
_DRIVERS = {"cuda": "libcuda.so.1"}


def below() -> int:
    """Arrays of fewer bytes are packed: `SAMESTEP_PACK_BELOW`, or BELOW. 0 packs none.

    Raises:
      InvalidArgumentError: the variable is no number of bytes.
    """
    text = os.environ.get("SAMESTEP_PACK_BELOW", str(BELOW))
    if not text.isascii() or not text.isdigit():
        raise InvalidArgumentError(f"SAMESTEP_PACK_BELOW must be a number of bytes, got {text!r}")
    return int(text)


def bucket_nbytes(leaf_nbytes: list[int]) -> int:
    """Bytes of a bucket with these leaves, each of which begins at a multiple of 16.

    Example:
      >>> bucket_nbytes([1, 16, 17])
      64
    """
    return sum(-(-nbytes // _ALIGNMENT) * _ALIGNMENT for nbytes in leaf_nbytes)


@functools.cache
def packer(kind: str, device: int) -> _core.Packer:
    """The kernels of one device ("cuda" or "hip"), which are compiled when they are first needed.

    `Packer.problem()` compiles them and tells why that did not work.
    """
    from samestep import devices

    runtime = devices.gpu(kind)
    driver = os.environ.get("SAMESTEP_CUDA_DRIVER") or _DRIVERS.get(kind, runtime.path)
    compiler = find_compiler(kind, runtime.path)
    return _core.Packer(runtime, device, compiler, driver, cache_folder(os.environ))


def cache_folder(env: Mapping[str, str]) -> str:
    """Where compiled kernels are kept: `SAMESTEP_KERNEL_CACHE`, or below the user's cache; "" keeps none. Pure.

    Example:
      >>> cache_folder({"XDG_CACHE_HOME": "/cache"}), cache_folder({"SAMESTEP_KERNEL_CACHE": ""})
      ('/cache/samestep', '')
    """
    if "SAMESTEP_KERNEL_CACHE" in env:
        return env["SAMESTEP_KERNEL_CACHE"]
    home = env.get("XDG_CACHE_HOME") or os.path.join(env.get("HOME", ""), ".cache")
    return os.path.join(home, "samestep") if os.path.isabs(home) else ""


def find_compiler(kind: str, runtime: str) -> str:
    """NVRTC (`kind` "cuda") or hipRTC ("hip"): a file or a name the loader finds, "" if there is none.

    The order: SAMESTEP_NVRTC_LIBRARY; what this process has loaded already; beside the runtime; the wheels on
    `sys.path`; conda; the loader; CUDA_HOME or ROCM_PATH. Of the runtime's major version: the driver may be too
    old for the code of a newer one.

    Args:
      kind: of devices.
      runtime: the file of the CUDA or HIP runtime.
    """
    places = _hiprtc_places if kind == "hip" else _nvrtc_places
    for path in places(os.environ, runtime):
        if path and (os.path.exists(path) if "/" in path else accelerators._loads(path)):
            return path
    return ""


def describe(kind: str) -> str:
    """One sentence for `samestep doctor`. Never raises."""
    from samestep import devices

    try:
        limit, found = below(), find_compiler(kind, devices.gpu(kind).path)
    except Error as error:
        return str(error)
    if limit == 0:
        return "off (SAMESTEP_PACK_BELOW=0)"
    if not found:
        return "off: there is no NVRTC or hipRTC; small arrays go to NCCL one by one, in groups"
    return (
        f"arrays below {limit} bytes, by {found}; kernels kept in {cache_folder(os.environ) or 'no folder'}"
    )


def _major(runtime: str) -> str:
    """ "13" for libcudart.so.13.0.48, "" where the name does not tell."""
    _, _, number = Path(os.path.realpath(runtime)).name.partition(".so.")
    return number.split(".")[0]


def _nvrtc_places(env: Mapping[str, str], runtime: str) -> Iterator[str]:
    if chosen := env.get("SAMESTEP_NVRTC_LIBRARY"):
        yield chosen
        return  # asked for: another would be a surprise
    yield next(iter(accelerators._loaded("libnvrtc.so")), "")
    majors = [_major(runtime)] if _major(runtime) else ["13", "12"]
    folders = [os.path.dirname(runtime)] if "/" in runtime else []
    for folder in sys.path:
        folders += [os.path.join(folder, "nvidia", part, "lib") for part in ("cu13", "cuda_nvrtc")]
    if conda := env.get("CONDA_PREFIX"):
        folders.append(os.path.join(conda, "lib"))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if home := env.get(name):
            folders += [os.path.join(home, "lib64"), os.path.join(home, "lib")]
    for major in majors:
        for folder in folders:
            yield os.path.join(folder, f"libnvrtc.so.{major}")
        yield f"libnvrtc.so.{major}"


def _hiprtc_places(env: Mapping[str, str], runtime: str) -> Iterator[str]:
    if chosen := env.get("SAMESTEP_NVRTC_LIBRARY"):
        yield chosen
        return
    yield next(iter(accelerators._loaded("libhiprtc.so")), "")
    if "/" in runtime:
        yield from sorted(glob.glob(os.path.join(glob.escape(os.path.dirname(runtime)), "libhiprtc.so*")))
    yield from accelerators._rocm_files("libhiprtc.so")
    yield "libhiprtc.so"
