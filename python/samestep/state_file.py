"""Files of a training state: arrays as NumPy writes them, parts of torch as torch does, and no pickle."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import zipfile
from typing import Any

import numpy as np

from samestep import arrays, trees
from samestep.errors import MismatchError

__all__ = ["read", "write"]

_ABOUT = "about.json"


def write(path: str, state: dict[str, Any]) -> None:
    """Write `state`, as `TrainState.state_dict` returns it, to `path`: all of it, or nothing.

    Raises:
      OSError: the file cannot be written.
    """
    members: dict[str, np.ndarray[Any, Any]] = {}
    about = {name: state[name] for name in ("step", "epoch", "visited")}
    about["parts"] = {name: _add(members, name, value) for name, value in state["parts"].items()}
    members[_ABOUT] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    folder, name = os.path.split(os.path.abspath(path))
    number, unfinished = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
    try:
        with os.fdopen(number, "wb") as file:
            np.savez(file, **members)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
    _sync_folder(folder)


def read(path: str, parts: dict[str, Any]) -> dict[str, Any]:
    """The state in the file `path`.

    Args:
      parts: of the program, before: they say which containers and libraries the arrays are of.

    Raises:
      OSError, ValueError, KeyError: it cannot be read, or is no such file.
      MismatchError: the file has other parts, or other arrays in them.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as members:
            about = json.loads(members[_ABOUT].tobytes())
            if about["parts"].keys() != parts.keys():
                raise MismatchError(f"the file has the parts {list(about['parts'])}, not {list(parts)}")
            made = {name: _found(members, name, about["parts"][name], parts[name]) for name in parts}
    except (zipfile.BadZipFile, EOFError) as error:
        raise ValueError(str(error) or "it is empty") from error
    return {**about, "parts": made}


def _add(members: dict[str, np.ndarray[Any, Any]], part: str, value: Any) -> list[Any] | None:
    """Add a part; names of its leaves, with the values of those that are no arrays; None for one of torch."""
    flat = trees.flatten(value)
    torch = sys.modules.get("torch")
    if torch is not None and any(isinstance(leaf, torch.Tensor) for leaf in flat.leaves):
        file = io.BytesIO()
        torch.save(value, file)
        members[part] = np.frombuffer(file.getvalue(), np.uint8)
        return None
    about: list[Any] = []
    for i, (name, leaf) in enumerate(zip(flat.names, flat.leaves, strict=True)):
        if leaf is None or isinstance(leaf, (bool, int, float, str)):
            about.append([name, leaf])
            continue
        about.append([name])
        members[f"{part}/{i}"] = array = np.asarray(leaf)
        if array.dtype.hasobject:
            raise ValueError(f"{part}{name} is a {type(leaf).__name__}, which is neither array nor number")
    return about


def _found(members: Any, part: str, about: list[Any] | None, like: Any) -> Any:
    if about is None:
        import torch

        return torch.load(io.BytesIO(members[part].tobytes()), weights_only=True)
    flat = trees.flatten(like)
    names = [name for name, *_ in about]
    if list(flat.names) != names:
        raise MismatchError(f"part {part} of the file has the leaves {names}, not {list(flat.names)}")
    return flat.rebuild(
        [
            value[0] if value else _leaf(members[f"{part}/{i}"], leaf)
            for i, ((_, *value), leaf) in enumerate(zip(about, flat.leaves, strict=True))
        ]
    )


def _leaf(saved: np.ndarray[Any, Any], like: Any) -> Any:
    if not arrays.is_array(like):
        return type(like)(saved[()])
    dtype = np.asarray(like).dtype
    if saved.dtype.kind == "V":  # of a library's own, as bfloat16
        saved = saved.view(dtype)
    if (saved.dtype, saved.shape) != (dtype, np.shape(like)):
        raise MismatchError(
            f"the file has {saved.dtype}{list(saved.shape)}, not {dtype}{list(np.shape(like))}"
        )
    return saved if isinstance(like, np.ndarray) else arrays.to_library_of(like, saved)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
