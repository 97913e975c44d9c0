"""A short part of `tests/fuzz/protocols.py`; the rest by its command."""

import protocols
import pytest


@pytest.mark.parametrize("door", list(protocols.DOORS))
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_malformed_packets_hurt_nobody(door):
    protocols.fuzz(door, 100, seed=7)
