"""The element types of NumPy by their names."""

from __future__ import annotations

from typing import Any

import numpy as np

from samestep.errors import InvalidArgumentError


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's type of that name; bfloat16 and the float8 types are those of ml_dtypes, which have to be installed."""
    try:
        known: np.dtype[Any] = np.dtype(name)
        return known
    except TypeError:
        try:
            import ml_dtypes
        except ImportError as error:
            raise InvalidArgumentError(
                f"a NumPy array of {name} needs the package ml_dtypes: pip install ml_dtypes"
            ) from error
        added: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return added
