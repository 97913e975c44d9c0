"""A short part of `tests/fuzz/protocols.py`; the rest by its command."""

import protocols
import pytest


@pytest.mark.parametrize("entry_point", list(protocols.ENTRY_POINTS))
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_malformed_packets_hurt_nobody(entry_point):
    protocols.fuzz(entry_point, 100, seed=7)
