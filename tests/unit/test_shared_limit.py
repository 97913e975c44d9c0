"""How much memory `shared_arrays=True` takes: the control group's limit counts, whichever version it is."""

import os

import pytest
from samestep.arrays.numpy_memory import available_memory, default_limit, usable_memory

GIB = 1 << 30
MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, MACHINE),
        ({"proc/self/cgroup": "0::/\n"}, MACHINE),
        ({"proc/self/cgroup": "0::/job\n", f"{V2}/job/memory.max": "max\n"}, MACHINE),
        ({"proc/self/cgroup": "0::/job\n", f"{V2}/job/memory.max": "1048576\n"}, 1 << 20),
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                f"{V2}/job/step/memory.max": "max\n",
                f"{V2}/job/memory.max": "9999\n",
            },
            9999,
        ),
        ({"proc/self/cgroup": "0::/../outside\n", f"{V2}/memory.max": "4096\n"}, 4096),
        (
            {
                "proc/self/cgroup": "8:pids:/\n4:cpu,memory:/job\n0::/\n",
                f"{V1}/job/memory.limit_in_bytes": "8192\n",
                f"{V1}/memory.limit_in_bytes": "9223372036854771712\n",
            },
            8192,
        ),
        ({"proc/self/cgroup": "no sense\n"}, MACHINE),
    ],
)
def test_usable_memory(tmp_path, files, expected):
    write(tmp_path, files)
    assert usable_memory(tmp_path) == expected


def test_default_limit():
    assert default_limit(64 * GIB, 1) == 32 * GIB
    assert default_limit(64 * GIB, 8) == 4 * GIB


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 4 kB\nSwapFree: 1 kB\n"}, 5120),
        (
            {
                "proc/meminfo": "MemAvailable: 4 kB\n",
                "proc/self/cgroup": "0::/job\n",
                f"{V2}/job/memory.max": "4000\n",
                f"{V2}/job/memory.current": "3000\n",
                f"{V2}/job/memory.stat": "anon 2200\ninactive_file 500\nactive_file 300\n",
            },
            1800,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/job\n",
                f"{V1}/job/memory.limit_in_bytes": "8192\n",
                f"{V1}/job/memory.usage_in_bytes": "192\n",
                f"{V1}/job/memory.stat": "inactive_file 0\n",
            },
            8000,
        ),
    ],
)
def test_available_memory(tmp_path, files, expected):
    write(tmp_path, files)
    assert available_memory(tmp_path) == expected
