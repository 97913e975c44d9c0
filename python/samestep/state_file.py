"""Files of a training state: arrays as NumPy writes them, parts of torch as torch does, and no pickle."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import secrets
import zipfile
from typing import Any, BinaryIO

import numpy as np

from samestep import arrays, trees
from samestep._util.loaded import is_a
from samestep.errors import MismatchError
from samestep.trees.structure import KEY_DATA

_ABOUT = "about.json"
_PLAIN = (type(None), bool, int, float, str)  # as JSON has them; other scalars keep their class as arrays


def write(path: str, state: dict[str, Any]) -> None:
    """Write `state`, as `TrainState.state_dict` returns it, to `path`: all of it, or nothing.

    Raises:
      OSError: the file cannot be written.
    """
    members: dict[str, np.ndarray[Any, Any]] = {}
    about = {name: state[name] for name in ("step", "sampler")}
    about["parts"] = {name: _add(members, name, value) for name, value in state["parts"].items()}
    members[_ABOUT] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    folder, name = os.path.split(os.path.abspath(path))
    _remove_left_over(folder, name)
    file = _begin(folder, name)
    try:
        with file:
            np.savez(file, **members)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(file.name)
        raise
    _sync_folder(folder)


def _begin(folder: str, name: str) -> BinaryIO:
    """A new file beside the one called `name`, locked as long as this process writes it."""
    while True:
        file = open(os.path.join(folder, f".{name}.{secrets.token_hex(8)}"), "xb")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # somebody takes it for one that is left over
            file.close()
            continue
        except OSError:  # this file system has no locks, so nobody removes it
            return file
        if os.path.exists(file.name):  # not removed before it was locked
            return file
        file.close()


def _remove_left_over(folder: str, name: str) -> None:
    """Remove what writers of this file have left that were killed: the kernel has ended their locks."""
    ours = re.compile(re.escape(f".{name}.") + "[0-9a-f]{16}")
    for left in filter(ours.fullmatch, os.listdir(folder)):
        with contextlib.suppress(OSError), open(os.path.join(folder, left), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(file.name)


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
    tensors = [is_a(leaf, "torch", "Tensor") for leaf in flat.leaves]
    if any(tensors):
        file = _by_torch(value)
        with contextlib.suppress(Exception):  # of a container that torch reads as a pickle only
            _read_by_torch(file)
            members[f"{part}/torch"] = file
            return None
    about: list[Any] = []
    for i, (name, leaf, is_tensor) in enumerate(zip(flat.names, flat.leaves, tensors, strict=True)):
        if type(leaf) in _PLAIN:
            about.append([name, leaf])
            continue
        members[f"{part}/{i}"] = array = _by_torch(leaf) if is_tensor else np.asarray(leaf)
        kind = _kind(flat, i, array)
        about.append([name, None, kind] if kind else [name])
        if array.dtype.hasobject:
            raise ValueError(f"{part}{name} is a {type(leaf).__name__}, which is neither array nor number")
    return about


def _found(members: Any, part: str, about: list[Any] | None, like: Any) -> Any:
    if about is None:
        return _read_by_torch(members[f"{part}/torch"])
    flat = trees.flatten(like)
    names = [name for name, *_ in about]
    if list(flat.names) != names:
        raise MismatchError(f"part {part} of the file has the leaves {names}, not {list(flat.names)}")
    return flat.rebuild(
        [
            value[0] if len(value) == 1 else _leaf(members[f"{part}/{i}"], flat, i, *value[1:])
            for i, (_, *value) in enumerate(about)
        ]
    )


def _kind(flat: trees.Flat, i: int, array: np.ndarray[Any, Any]) -> str:
    """What NumPy's files do not tell: the generator of a random key of JAX, and types of a library's own."""
    if (name := flat.names[i]).endswith(KEY_DATA):
        return f"a key of {dict(flat.static).get(name.removesuffix(KEY_DATA))}"
    return array.dtype.name if array.dtype.kind == "V" and array.dtype.names is None else ""


def _leaf(saved: np.ndarray[Any, Any], flat: trees.Flat, i: int, kind: str = "") -> Any:
    like = flat.leaves[i]
    if is_a(like, "torch", "Tensor"):
        return _read_by_torch(saved)
    dtype = np.asarray(like).dtype
    if kind and kind != (now := _kind(flat, i, np.asarray(like))):  # older files have none
        raise MismatchError(f"the file has {kind}, not {now or dtype}")
    if saved.dtype.kind == "V" == dtype.kind:  # of a library's own, as bfloat16
        saved = saved.view(dtype)
    if not arrays.is_array(like) and saved.dtype.kind != "V":  # which may have become an array
        return saved[()] if isinstance(like, (*_PLAIN, np.generic)) else type(like)(saved[()])
    if (saved.dtype, saved.shape) != (dtype, np.shape(like)):
        raise MismatchError(
            f"the file has {saved.dtype}{list(saved.shape)}, not {dtype}{list(np.shape(like))}"
        )
    return arrays.of(like).finish(saved, like=like)


def _by_torch(value: Any) -> np.ndarray[Any, Any]:
    import torch

    file = io.BytesIO()
    torch.save(value, file)
    return np.frombuffer(file.getvalue(), np.uint8)


def _read_by_torch(file: np.ndarray[Any, Any]) -> Any:
    """Without a pickle's code: tensors, plain containers, and what NumPy has in them, such as a learning rate."""
    import _codecs

    import torch

    of_numpy = [value.__reduce__()[0] for value in (np.float64(), np.zeros(0))]
    kinds = {type(np.dtype(code)) for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]}
    allow = getattr(torch.serialization, "safe_globals", contextlib.nullcontext)  # torch 2.4 has none
    with allow([*of_numpy, *kinds, np.ndarray, np.dtype, _codecs.encode]):
        # Whose device that was may be another rank's now; what takes the values has a device.
        return torch.load(io.BytesIO(file.tobytes()), map_location="cpu", weights_only=True)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
