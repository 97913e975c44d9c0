"""Device memory of the package's own."""

from __future__ import annotations

import device_jobs
from running import program


def test_other_threads_run_while_memory_is_freed(tmp_path):
    ended = device_jobs.run(tmp_path, program("devices/device_memory", "free_while_the_device_is_busy"), 1)
    assert [rank.reports for rank in ended] == [[{"ended": True}]], ended
