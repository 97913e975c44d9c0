"""Arrays whose memory somebody tries to move while an operation works on it."""

import threading
import time
import weakref

import numpy as np
import pytest

pytestmark = pytest.mark.ranks(1, 2, 3)

COUNT = 300_000
PATIENCE_S = 30.0


def resize(x):
    x.resize(10 * COUNT, refcheck=False)


def require_pinned(x):
    with pytest.raises(ValueError, match="cannot resize"):
        resize(x)


@pytest.mark.parametrize(
    "part", [slice(None), slice(5, None), slice(None, None, 2)], ids=["whole", "view", "strided"]
)
def test_an_operation_under_way_pins_its_arrays(group, part):
    if group.rank == 0:
        x = np.ones(COUNT)
        work = group.iallreduce(x[part])
        require_pinned(x)
        for other in range(1, group.size):
            group.send(np.zeros(1), other)
        np.testing.assert_array_equal(work.wait(), np.full_like(x[part], group.size))
        resize(x)
        assert x.size == 10 * COUNT
    else:
        group.recv(np.empty(1), 0)
        group.allreduce(np.ones(COUNT)[part])


def test_a_blocking_call_pins_its_array(group):
    messages = group.split(0)
    if group.rank == 0:
        x = np.ones(COUNT)
        seen = []

        def act():
            end = time.monotonic() + PATIENCE_S
            while group.size > 1 and not weakref.getweakrefcount(x) and time.monotonic() < end:
                time.sleep(0.001)
            try:
                if group.size > 1:
                    require_pinned(x)
                seen.append("pinned")
            finally:
                for other in range(1, group.size):
                    messages.send(np.zeros(1), other)

        thread = threading.Thread(target=act)
        thread.start()
        group.allreduce(x)
        thread.join()
        assert seen == ["pinned"]
        resize(x)
    else:
        messages.recv(np.empty(1), 0)
        group.allreduce(np.ones(COUNT))
    messages.close()


def test_what_has_failed_lets_go(group):
    x = np.ones(COUNT)
    with pytest.raises(ValueError, match="root"):
        group.ibcast(x, root=group.size)
    resize(x)
    y = bytearray(8)
    work = group.iallreduce(memoryview(y).cast("d"))
    with pytest.raises(BufferError):
        y.append(1)
    work.wait()
    del work
