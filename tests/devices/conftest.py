"""Ranks with fake devices."""

import fake_libraries
import pytest

if fake_libraries.compiler() is None:
    pytest.skip("the fake devices need a C++ compiler", allow_module_level=True)
