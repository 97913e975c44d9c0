"""Puts the values of one state into the arrays of another."""

from __future__ import annotations

from typing import Any

import numpy as np

from samestep import arrays
from samestep._util.loaded import is_a
from samestep.trees.structure import flatten

__all__ = ["fill"]


def fill(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The trees `new`, in the arrays of `old` that can take them, as the program may know those by other names.

    Leaves that are one array in `new` are one in the result, and others are not, whatever they are in `old`.

    Example:
      >>> import numpy as np
      >>> w = np.zeros(2)
      >>> filled = fill({"w": w, "before": w}, {"w": np.ones(2), "before": np.zeros(2)})
      >>> filled["w"] is w, w, filled["before"]
      (True, array([1., 1.]), array([0., 0.]))
    """
    # By the id of the leaf of `new`: that of the result, and itself, so that the id stays its own.
    made: dict[int, tuple[Any, Any]] = {}
    taken: set[int] = set()
    flats = {name: (flatten(old[name]), flatten(value)) for name, value in new.items()}
    for before, after in flats.values():
        olds = before.leaves if before.names == after.names else after.leaves
        for have, value in zip(olds, after.leaves, strict=True):
            if id(value) not in made:
                fits = id(have) not in taken and _put(have, value)
                made[id(value)] = (have if fits else _beside(have, value)), value
                taken.add(id(have))
    for key, (have, value) in made.items():
        # It may share elements with one that was written later.
        if have is not value and not _equal(have, placed := _beside(have, value)):
            made[key] = placed, value
    return {
        name: after.rebuild([made[id(value)][0] for value in after.leaves])
        for name, (_, after) in flats.items()
    }


def _put(have: Any, value: Any) -> bool:
    """Write `value` into the array `have`; whether that can be done."""
    # JAX's are never written; one that a program was given for good cannot be looked at, either.
    if have is value or type(have) is not type(value) or not arrays.is_array(have) or arrays.is_jax(have):
        return False
    if (have.dtype, have.shape) != (value.dtype, value.shape):
        return False
    if isinstance(have, np.ndarray):
        if have.flags.writeable:
            have[...] = value
        return have.flags.writeable
    if not arrays.info(have).writable:
        return False
    arrays.copy(value, have, "TrainState")
    return True


def _beside(have: Any, value: Any) -> Any:
    """`value`, on the device of `have`."""
    both = is_a(have, "torch", "Tensor") and is_a(value, "torch", "Tensor")
    return value.to(have.device) if both else value


def _equal(have: Any, value: Any) -> bool:
    return bool(((have == value) | (have != have)).all())  # noqa: PLR0124 (NaN is no other than NaN)
