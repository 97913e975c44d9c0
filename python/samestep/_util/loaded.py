"""Classes of modules that only some programs import."""

from __future__ import annotations

import sys
from typing import Any


def is_a(x: Any, module: str, name: str) -> bool:
    """Whether `x` is an instance of a class of a module; False while nobody has imported the module."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(x, kind)
