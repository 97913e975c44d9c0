"""Ranks with fake devices."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in ("fakes", "conformance"):
    if str(HERE.parent / folder) not in sys.path:
        sys.path.append(str(HERE.parent / folder))

import fake_libraries  # noqa: E402
import fake_worlds  # noqa: E402

if fake_libraries.compiler() is None:
    pytest.skip("the fake devices need a C++ compiler", allow_module_level=True)
fake_worlds.offer()
