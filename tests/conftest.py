"""For all tests: what they need of pytest, and the worlds with fake devices that they may name as backends."""

import sys
from pathlib import Path

FAKES = str(Path(__file__).parent / "fakes")
if FAKES not in sys.path:
    sys.path.append(FAKES)

import fake_worlds  # noqa: E402
import pytest  # noqa: E402

pytest_plugins = ["pytester"]

fake_worlds.offer()


def pytest_collection_modifyitems(items):
    for item in items:
        if why := fake_worlds.why_left_out(item.nodeid):
            item.add_marker(pytest.mark.skip(reason=why))
