"""For tests on several hosts."""

import lab as labs
import pytest


@pytest.fixture
def lab(request):
    """Two hosts, or as many as an indirect parameter says."""
    if reason := labs.missing():
        pytest.skip(reason)
    made = labs.Lab(getattr(request, "param", 2))
    yield made
    made.close()


@pytest.fixture
def begin(lab):
    """Starts a job over the hosts of the lab."""
    jobs = []

    def start(program, n_each, **options):
        jobs.append(labs.LabJob(lab, program, n_each, number=len(jobs), **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()
