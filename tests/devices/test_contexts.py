"""A process has a context on the device of its rank alone, whichever thread calls: each takes hundreds of MB."""

import device_jobs
import pytest
from running import program


@pytest.mark.parametrize("backend", ["nccl", "native"])
def test_calls_of_a_thread_without_a_device(tmp_path, backend):
    called = program("devices/device_contexts", "calls_of_a_thread", backend)
    for ended in device_jobs.run(tmp_path, called, 3):
        assert ended.code == 0, ended
        assert ended.reports == [{"result": None}], ended
