"""A short part of `tests/fuzz/protocols.py` and of `answers.py`; their commands run everything."""

import answers
import protocols
import pytest


@pytest.mark.parametrize("entry_point", list(protocols.ENTRY_POINTS))
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_malformed_packets_hurt_nobody(entry_point):
    protocols.fuzz(entry_point, 100, seed=7)


def test_malformed_answers_of_a_store_are_errors_of_samestep():
    outcomes = answers.run(seed=1, n=100)
    assert outcomes["joined"] > 0
    assert set(outcomes) <= {"joined", "UnavailableError", "PeerLostError", "TimeoutError", "MismatchError"}
