"""A short part of the fuzzing; the programs beside this file do the rest."""

import arrays
import calls
import pytest


def test_arrays_of_any_library_are_refused_or_seen_as_they_are():
    for outcomes in arrays.run(seed=1, n_cases=6000).values():
        assert outcomes["refused"] > 500
        assert outcomes["seen"] + outcomes["compared"] > 500


@pytest.mark.ranks(1, 2, 3)
def test_calls_with_good_and_bad_arguments(group):
    outcomes = calls.run(group, seed=2, n_calls=40)
    assert outcomes["right"] > 25
    assert outcomes["refused"] > 1
