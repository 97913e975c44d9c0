"""For tests of `samestep run`."""

import pytest
from launching import WAYS, Run


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


@pytest.fixture
def begin(tmp_path):
    """Starts a run of the way and script it is given; whatever is left of it afterwards is an error."""
    runs = []

    def start(way, script, *words, **options):
        runs.append(Run(tmp_path, way, script, *words, **options))
        return runs[-1]

    yield start
    left = [run.left() for run in runs]
    for run in runs:
        run.end()
    assert left == [[] for _ in runs]
