"""samestep.distributed on device arrays: through NCCL, and through the host."""

import device_jobs
import pytest
from running import program


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_verbs_of_2019(tmp_path, backend):
    size = 3
    ended = device_jobs.run(
        tmp_path, program("devices/device_distributed", "use_each_operation", backend), size
    )
    for number, rank in enumerate(ended):
        assert rank.code == 0, ended
        start, reduced, parts, exchanged, wide, received, lists = rank.reports
        assert exchanged == {"mine": [float(number)] * 7, "parts": [[float(r)] * 7 for r in range(size)]}
        assert wide == {"wide": [[6.0] * 3] * 2}
        assert start["nccl"] is True
        assert reduced["sum"] == [6.0] * 7
        assert parts["parts"] == [[float(r)] * 7 for r in range(size)]
        assert received["received"] == [float((number - 1) % size)] * 3
        assert lists["lists"] == [[sum(10.0 * r + i for r in range(size) for i in range(2))] * 5] * 2
