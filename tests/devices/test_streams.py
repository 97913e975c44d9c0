"""Work on device memory is ordered with the streams of those who make and use it, and nobody waits on the host."""

import device_jobs
import pytest

# Each array is made late in its own stream and used at once; what the device finds before it is made is -1.
TORTURE = """
backend = start()
wrong = 0
for turn in range(25):
    streams = [Stream() for _ in range(3)]
    arrays = []
    for i, stream in enumerate(streams):
        x, y = Array((257,), "float32", stream), Array((257,), "float32", stream)
        for a in (x, y):
            a.set(np.full(257, -1.0, "float32"))
        stream.synchronize()
        stream.delay(2000)
        x.set(np.full(257, turn + i, "float32"))
        arrays.append((x, y))
    works = [backend.iallreduce(x, ss.premul(2.0), out=y) for x, y in arrays]
    works += [backend.iallreduce(x, ss.premul(2.0)) for x, _ in arrays]
    for work in works:
        work.wait()
    for i, (x, y) in enumerate(arrays):
        expected = np.full(257, 2.0 * (turn + i) * size, "float32")
        wrong += int((y.get() != expected).any()) + int((x.get() != expected).any())
tell(wrong=wrong)
backend.close()
"""


@pytest.mark.parametrize("backend", ["nccl", "native"])
def test_nothing_is_read_before_it_is_made(tmp_path, backend):
    script = TORTURE.replace("start()", f"start({backend!r})")
    ended = device_jobs.run(tmp_path, script, 2, FAKE_GPU_DELAY_US="1500")
    assert [rank.told for rank in ended] == [[{"wrong": 0}]] * 2, ended


@pytest.mark.parametrize("backend", ["nccl", "native"])
@pytest.mark.parametrize("who", ["library", "user"])
def test_that_is_found_out_if_one_side_does_not_wait(tmp_path, who, backend):
    """The test above can fail: without the waits of the one or the other side it finds wrong numbers."""
    script = TORTURE.replace("start()", f"start({backend!r})")
    variables = {"FAKE_GPU_DELAY_US": "1500", "FAKE_GPU_IGNORE_WAITS": who}
    ended = device_jobs.run(tmp_path, script, 1, **variables)
    assert ended[0].told[0]["wrong"] > 0, ended


def test_calls_do_not_wait_for_the_device(tmp_path):
    script = """
backend = start()
stream = Stream()
x = Array.of(np.ones(100, "float32"), stream)
backend.allreduce(x)
stream.delay(3_000_000)
begin = time.monotonic()
works = [backend.iallreduce(x) for _ in range(10)]
for work in works:
    work.wait()
backend.allreduce(x)
tell(quick=time.monotonic() - begin < 2.5, ended=works[-1].done())
works[-1].wait(host=True)
tell(late=time.monotonic() - begin > 2.5, ended=works[-1].done())
tell(result=float(x.get()[0]))
backend.close()
"""
    ended = device_jobs.run(tmp_path, script, 2)
    expected = [{"quick": True, "ended": False}, {"late": True, "ended": True}, {"result": 2.0**12}]
    assert [rank.told for rank in ended] == [expected] * 2, ended


def test_an_array_without_a_stream_is_waited_for_on_the_host(tmp_path):
    script = """
class Plain:
    def __init__(self, array):
        self.array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": None}

backend = start()
array = Array.of(np.full(5, rank + 1.0), Stream())
array.stream.synchronize()
work = backend.iallreduce(Plain(array))
work.wait()
tell(ended=work.done(), result=array.get().tolist())
backend.close()
"""
    ended = device_jobs.run(tmp_path, script, 2, FAKE_GPU_DELAY_US="20000")
    assert [rank.told for rank in ended] == [[{"ended": True, "result": [3.0] * 5}]] * 2, ended
