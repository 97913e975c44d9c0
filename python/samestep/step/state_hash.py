"""Compares the bits of a tree between ranks, or runs: a hash, and which leaf differs on which ranks."""

from __future__ import annotations

import collections
import itertools
import os
import threading
from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from samestep import _core, _settings, arrays, trees
from samestep._util.json_layout import Many
from samestep._util.text import ranks_text
from samestep.errors import InvalidArgumentError, MismatchError
from samestep.group import compiled
from samestep.group.group import Group
from samestep.trees import signature
from samestep.trees.facts import static_texts
from samestep.trees.fusion import timer
from samestep.trees.identity import identity_of

_MAX_NAMED = 3  # number of leaves in an error text


def same(
    backend: Group, tree: Any, *, timeout: float | None = None, act: str = "same()", when: str = ""
) -> str:
    """See `Backend.same`. `act`: the call, for errors, whose text ends with `when`."""
    with _core.UserCall(act):
        left = timer(timeout)
        flat = trees.flatten(tree)
        if compiled.is_traced(flat.leaves):
            raise InvalidArgumentError(f"{act}: call it outside of compiled functions")
        looks = signature.describe_leaves(flat.names, flat.leaves, act, waiting=backend)
        described = list(zip(flat.leaves, looks.infos, strict=True))
        on_device = [leaf for leaf, info in described if info is not None and info.device != "cpu"]
        backend._await_streams(on_device, left())
        hashes = [leaf_hash(leaf, info) for leaf, info in described]
        kinds = looks.kinds
        if not all(hashes):
            why = (
                "which ranks cannot compare; pass its arrays and texts in a dict, or take it out of the tree"
            )
            unknown = {
                i: f"a {type(flat.leaves[i]).__name__}, {why}" for i, text in enumerate(hashes) if not text
            }
            kinds = signature.with_refusals(kinds, unknown)
        static = static_texts(flat)
        names, kinds = [*flat.names, *(name for name, _ in static)], [*kinds, *(text for _, text in static)]
        hashes += [b""] * len(static)
        digest = _digest(names, kinds, hashes)
        mine = np.frombuffer(digest, np.uint64)
        everyone = backend.allgather(mine, **({} if timeout is None else {"timeout": left()}))
        if not (everyone == mine).all():
            mine_in_full = [names, kinds, [leaf.hex() for leaf in hashes]]
            _raise_difference(backend, mine_in_full, left(), act, when)
        signature.raise_refused(backend.name, [signature.Description.of(act, names, kinds)])
    return digest.hex()


def leaf_hash(leaf: Any, info: arrays.ArrayInfo | None) -> bytes:
    """128 bits of an array, the value of a number or text; empty for an object that cannot be compared."""
    if info is None:
        return (identity_of(leaf) or "").encode(errors="surrogatepass")
    if not info.contiguous or info.device != "cpu":
        packed = np.empty(info.nbytes, np.uint8)
        _core.pack([leaf], packed, as_they_lie=True)  # the kinds name the order
        leaf = packed
    return _core.hash128(leaf)


def hash_of(leaf: Any) -> bytes:
    """`leaf_hash` of a leaf that has not been looked at."""
    return leaf_hash(leaf, arrays.info(leaf) if arrays.is_array(leaf) else None)


def _digest(names: Sequence[str], kinds: Sequence[str], hashes: Sequence[bytes]) -> bytes:
    from hashlib import blake2b  # imports OpenSSL

    whole = blake2b(digest_size=16)
    for name, what, leaf in zip(names, kinds, hashes, strict=True):
        whole.update(f"{name}\0{what}\0{leaf.hex()}\0".encode(errors="surrogatepass"))
    return whole.digest()


def _raise_difference(
    backend: Group, mine: list[list[str]], timeout: float | None, act: str, when: str
) -> None:
    everyone = backend._allgather_facts(mine, [Many(str), Many(str), Many(str)], timeout)
    described = [signature.Description.of(act, names, kinds) for names, kinds, _ in everyone]
    signature.check_same(backend.name, described, cure=when)
    raise MismatchError(
        f"{act} in group {backend.name}: {first_difference(mine[0], [row for *_, row in everyone])}{when}"
    )


def first_difference(names: Sequence[str], hashes: Sequence[Sequence[str]]) -> str:
    """Which leaves differ, and which ranks differ from the majority. `hashes`: of the leaves, by rank; not all equal.

    Example:
      >>> first_difference(["['b']", "['w']"], [["0", "1"], ["0", "2"], ["0", "1"]])
      "leaf ['w'] of rank 1 differs from that of ranks 0, 2"
      >>> first_difference(["['w']"], [["1"], ["2"]])
      "leaf ['w'] differs between ranks 0-1"
    """
    differing = [i for i, column in enumerate(zip(*hashes, strict=True)) if len(set(column)) > 1]
    first = differing[0]
    column = [row[first] for row in hashes]
    ranked = collections.Counter(column).most_common(2)
    name = signature.leaf_text(names[first])
    if ranked[0][1] == ranked[1][1]:
        text = f"{name} differs between {ranks_text(range(len(column)))}"
    else:
        most = ranked[0][0]
        odd = ranks_text([rank for rank, value in enumerate(column) if value != most])
        text = f"{name} of {odd} differs from that of {ranks_text([r for r, v in enumerate(column) if v == most])}"
    if len(differing) == 1:
        return text
    others = ", ".join(signature.leaf_text(names[i]) for i in differing[1:_MAX_NAMED])
    more = f" and {len(differing) - _MAX_NAMED} more" if len(differing) > _MAX_NAMED else ""
    return f"{text}; so do {others}{more}, of {len(names)} leaves"


def verify_interval() -> int:
    """The interval in steps at which optimizers compare the parameters of all ranks: `SAMESTEP_VERIFY`; 0 for never."""
    text = _settings.get(_settings.VERIFY) or "0"
    if not text.isdecimal():
        raise InvalidArgumentError(f"SAMESTEP_VERIFY must be a number of steps, got {text!r}")
    return int(text)


class Verifier:
    """Compares a state between ranks every `interval` steps, first before step 0; says since when they differ."""

    def __init__(self, backend: Group, what: str, interval: int) -> None:
        self._backend, self._what, self._interval = backend, what, interval
        self._step = 0

    @classmethod
    def wanted(cls, backend: Group, what: str) -> Verifier | None:
        """The verifier that the environment asks for, or None."""
        interval = verify_interval() if backend.size > 1 else 0
        return cls(backend, what, interval) if interval else None

    def before_step(self, tree: Any) -> None:
        """To be called before each step, with the state at its beginning. Collective once in each interval.

        Raises:
          MismatchError: ranks differ, on all ranks.

        Nothing is compared while JAX compiles a function: its arrays have no elements yet.
        """
        step, self._step = self._step, self._step + 1
        if step % self._interval or compiled.is_traced(trees.flatten(tree).leaves):
            return
        since = f"; equal before step {step - self._interval}" if step else ""
        act = "same() of SAMESTEP_VERIFY"  # which ranks may have set differently
        same(self._backend, tree, act=act, when=f" before step {step} of {self._what}{since}")


RECORD_NAME = "means"
"""The file in the folder that the environment names."""

_numbers = itertools.count()
_lock = threading.Lock()  # of the numbers, held for moments only


class Recorder:
    """Writes a line for each mean of one accumulator: its number, the step, the weight, and the hash of each leaf."""

    def __init__(self, folder: str) -> None:
        with _lock:
            self._number = next(_numbers)
        self._step = 0
        self._file: IO[str] = open(  # noqa: SIM115 - closed with the recorder
            os.path.join(folder, RECORD_NAME), "a", encoding="utf-8", buffering=1
        )

    @classmethod
    def wanted(cls, group: Group) -> Recorder | None:
        """A recorder on rank 0 of the group, if that is rank 0 of all, and if the environment names a folder."""
        folder = _settings.get(_settings.RECORD)
        if not folder or group.rank > 0:
            return None
        whole = group
        while whole._parent is not None and (parent := whole._parent()) is not None:
            whole = parent
        return cls(folder) if whole.rank == 0 else None

    def add(self, weight: float, names: Sequence[str], leaves: Sequence[Any]) -> None:
        """Write the line of one mean."""
        import json  # not needed by `import samestep`

        hashes = [[name, _hash_of(leaf)] for name, leaf in zip(names, leaves, strict=True)]
        self._file.write(json.dumps([self._number, self._step, weight.hex(), hashes]) + "\n")
        self._step += 1


def _hash_of(leaf: Any) -> str:
    if not arrays.is_array(leaf):
        return repr(leaf)
    info = arrays.info(leaf)
    return f"{info.dtype} {leaf_hash(leaf, info).hex()}"
