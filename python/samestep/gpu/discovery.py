"""CUDA and HIP devices, and the path of NCCL or RCCL, found through the libraries themselves by ctypes.

A machine without a GPU, a driver or a library is the normal case here: it gives 0 and a text, never an error.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from samestep import _settings

_CODES = {
    3: "not initialized",
    34: "a stub library instead of a driver",
    35: "the driver is older than the runtime",
    100: "no device",
    802: "the system is not ready (fabric manager)",
    803: "driver and library versions differ",
    804: "the device does not support this driver's compatibility mode",
}
_HIP_LIBRARIES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")
_ROCM = "/opt/rocm"


@dataclass(frozen=True)
class Devices:
    """Usable devices of one kind ("cuda" or "hip"), and their names or what was looked for."""

    kind: str
    count: int
    detail: str


@dataclass(frozen=True)
class Library:
    """A library that was looked for.

    Attributes:
      name: "NCCL", "RCCL", "CUDA runtime" or "HIP runtime".
      path: its file, "" if none was found.
      version: "" if it was not opened.
      looked_in: the places tried, in order.
    """

    name: str
    path: str
    version: str
    looked_in: tuple[str, ...]

    @property
    def detail(self) -> str:
        """One sentence for people."""
        if self.version:
            return f"{self.name} {self.version} ({self.path})"
        if self.path and self.name.endswith("runtime"):
            return f"{self.name} ({self.path})"
        if self.path:
            return f"{self.name} at {self.path}, not opened because there is no device"
        return f"no {self.name}; looked in: {', '.join(self.looked_in)}"


def cuda_devices() -> Devices:
    """The devices that the CUDA driver shows this process, after CUDA_VISIBLE_DEVICES.

    With SAMESTEP_CUDART_LIBRARY that runtime is asked instead.
    """
    if chosen := _settings.get(_settings.CUDART_LIBRARY):
        return _devices_of_runtime("cuda", chosen, f"SAMESTEP_CUDART_LIBRARY={chosen}{_mask('CUDA')}")
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Devices("cuda", 0, "no CUDA driver (libcuda.so.1 does not load)")
    code, count = driver.cuInit(0), ctypes.c_int(0)
    code = code or driver.cuDeviceGetCount(ctypes.byref(count))
    if code or not count.value:
        return Devices("cuda", 0, f"CUDA driver: {_reason(code)}{_mask('CUDA')}")
    names = [_cuda_name(driver, device) for device in range(count.value)]
    return Devices("cuda", count.value, ", ".join(names) + _mask("CUDA"))


def hip_devices() -> Devices:
    """The devices that the HIP runtime shows this process, after HIP_ and ROCR_VISIBLE_DEVICES.

    With SAMESTEP_HIP_LIBRARY that runtime is asked.
    """
    if chosen := _settings.get(_settings.HIP_LIBRARY):
        return _devices_of_runtime("hip", chosen, f"SAMESTEP_HIP_LIBRARY={chosen}{_mask('HIP', 'ROCR')}")
    if not os.path.exists("/dev/kfd"):
        return Devices("hip", 0, "no AMD driver (/dev/kfd)")
    files = (*_loaded("libamdhip64.so"), *_rocm_files("libamdhip64.so"), *_HIP_LIBRARIES)
    path = next(filter(_loads, files), None)
    if path is None:
        return Devices("hip", 0, f"no HIP runtime ({_HIP_LIBRARIES[0]} does not load)")
    return _devices_of_runtime("hip", path, f"HIP{_mask('HIP', 'ROCR')}")


def _devices_of_runtime(kind: str, path: str, where: str) -> Devices:
    count = ctypes.c_int(0)
    try:
        code = getattr(ctypes.CDLL(path), f"{kind}GetDeviceCount")(ctypes.byref(count))
    except (OSError, AttributeError) as error:
        return Devices(kind, 0, f"{where}: {error}")
    if code or not count.value:
        return Devices(kind, 0, f"{where}: {_reason(code)}")
    return Devices(kind, count.value, f"{count.value} devices; {where}")


def runtime_library(kind: str) -> Library:
    """The CUDA runtime (`kind` "cuda") or the HIP runtime ("hip"), at the first place where it is. Not opened.

    The order: SAMESTEP_CUDART_LIBRARY or SAMESTEP_HIP_LIBRARY; what this process has loaded already; the wheels on
    `sys.path`; conda; the loader; CUDA_HOME or ROCM_PATH.
    """
    name, places = ("CUDA runtime", _cudart_places) if kind == "cuda" else ("HIP runtime", _hip_places)
    looked_in: list[str] = []
    for place, path in places(os.environ):
        looked_in.append(place)
        if path and (os.path.exists(path) if "/" in path else _loads(path)):
            return Library(name, path, "", tuple(looked_in))
        if place.startswith("SAMESTEP_"):  # asked for: another would be a surprise
            return Library(name, "", "", (f"{place}, which does not exist",))
    return Library(name, "", "", tuple(dict.fromkeys(looked_in)))


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _first_places(setting: str, env: Mapping[str, str], name: str) -> Iterator[tuple[str, str]]:
    if chosen := _settings.get(setting, env):
        yield f"{setting}={chosen}", chosen
    yield "libraries already loaded", next(iter(_loaded(name)), "")


def _cuda_places(env: Mapping[str, str], *files: str) -> Iterator[tuple[str, str]]:
    if conda := env.get("CONDA_PREFIX"):
        for file in files:
            yield "CONDA_PREFIX/lib", os.path.join(conda, "lib", file)
    for file in files:
        yield f"the loader's path ({file})", file
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := env.get(variable):
            for folder in ("lib64", "lib"):
                for file in files:
                    yield variable, os.path.join(home, folder, file)


def _cudart_places(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield from _first_places(_settings.CUDART_LIBRARY, env, "libcudart.so")
    for folder in sys.path:
        for file in ("nvidia/cu13/lib/libcudart.so.13", "nvidia/cuda_runtime/lib/libcudart.so.12"):
            yield "the nvidia wheels on sys.path", os.path.join(folder, file)
    yield from _cuda_places(env, "libcudart.so.13", "libcudart.so.12")


def _hip_places(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield from _first_places(_settings.HIP_LIBRARY, env, "libamdhip64.so")
    for path in _rocm_files("libamdhip64.so"):
        yield "ROCM_PATH", path
    for name in _HIP_LIBRARIES:
        yield f"the loader's path ({name})", name


def communication_library(kind: str, *, may_open: bool) -> Library:
    """NCCL (`kind` "cuda") or RCCL ("hip"), at the first place where it is.

    The order: SAMESTEP_NCCL_LIBRARY; what this process has loaded already, because a second copy would not be
    the one a framework uses; the wheels on `sys.path`; conda; the loader; CUDA_HOME or ROCM_PATH.

    Args:
      may_open: load it and ask its version. It is large, so without a device it is better left alone.
    """
    name, places = ("NCCL", _nccl_places) if kind == "cuda" else ("RCCL", _rccl_places)
    looked_in: list[str] = []
    for place, path in places(os.environ):
        looked_in.append(place)
        there = bool(path) and ("/" not in path or os.path.exists(path))
        if there and not may_open and "/" in path:
            return Library(name, path, "", tuple(looked_in))
        version = _ccl_version(path) if there and may_open else ""
        if version:
            return Library(name, path, version, tuple(looked_in))
        if place.startswith(_settings.NCCL_LIBRARY):  # asked for: another would be a surprise
            return Library(name, "", "", (f"{place}, which does not load",))
    return Library(name, "", "", tuple(dict.fromkeys(looked_in)))


def _nccl_places(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield from _first_places(_settings.NCCL_LIBRARY, env, "libnccl.so")
    for folder in sys.path:
        yield "nvidia/nccl/lib on sys.path", os.path.join(folder, "nvidia/nccl/lib/libnccl.so.2")
    yield from _cuda_places(env, "libnccl.so.2")


def _rccl_places(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield from _first_places(_settings.NCCL_LIBRARY, env, "librccl.so")
    for folder in sys.path:
        for path in _matching(folder, "_rocm_sdk_libraries*/lib/librccl.so.1"):
            yield "the ROCm wheels on sys.path", path
        yield "torch/lib on sys.path", os.path.join(folder, "torch/lib/librccl.so")
    for path in _rocm_files("librccl.so"):
        yield "ROCM_PATH", path
    yield "the loader's path (librccl.so.1)", "librccl.so.1"


def _ccl_version(path: str) -> str:
    """ "2.28.9" for an NCCL or RCCL that loads, else "". Works without a driver."""
    code = ctypes.c_int(0)
    try:
        if ctypes.CDLL(path).ncclGetVersion(ctypes.byref(code)) != 0:
            return ""
    except (OSError, AttributeError):
        return ""
    number = code.value
    if number < 10000:  # before 2.9: 2804 was 2.8.4
        return f"{number // 1000}.{number // 100 % 10}.{number % 100}"
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _loaded(name: str) -> list[str]:
    """Files of this process whose base name begins with `name`."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            files = {line.split(maxsplit=5)[5].strip() for line in maps if name in line}
    except OSError:
        return []
    return sorted(file for file in files if os.path.basename(file).startswith(name))


def _rocm_files(name: str) -> list[str]:
    return sorted(_matching(os.environ.get("ROCM_PATH", _ROCM), f"lib/{name}*"))


def _matching(folder: str, pattern: str) -> list[str]:
    import glob  # few machines have anything to look for

    return glob.glob(os.path.join(glob.escape(folder), pattern))


def _cuda_name(driver: ctypes.CDLL, device: int) -> str:
    text = ctypes.create_string_buffer(256)
    if driver.cuDeviceGetName(text, len(text), device):
        return f"device {device}"
    return text.value.decode(errors="replace")


def _reason(code: int) -> str:
    """Why there is no device, after a call that returned `code`; 0 is a count of 0."""
    code = code or 100
    return f"{_CODES.get(code, 'error')} ({code})"


def _mask(*kinds: str) -> str:
    set_here = {f"{kind}_VISIBLE_DEVICES": os.environ.get(f"{kind}_VISIBLE_DEVICES") for kind in kinds}
    text = ", ".join(f"{name}={value!r}" for name, value in set_here.items() if value is not None)
    return f"; {text}" if text else ""
