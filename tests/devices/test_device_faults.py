"""Ranks that fail, hang, die or disagree while devices work: every other rank gets an exception in time."""

import device_jobs
import pytest

LOOP = """
told(lambda: start(timeout=TIMEOUT) and None)
world = ss.get_distributed_backend()
x = Array.of(np.ones(1000, "float32"), Stream())
def work():
    for turn in range(20):
        world.iallreduce(x).wait(host=True)
told(work)
told(lambda: world.iallreduce(x).wait(host=True))
told(lambda: world.allreduce(np.ones(3)).tolist())
"""


def run(tmp_path, n, script=LOOP, *, timeout=20.0, **variables):
    return device_jobs.run(tmp_path, script.replace("TIMEOUT", str(timeout)), n, **variables)


def test_a_rank_whose_operation_fails(tmp_path):
    ended = run(tmp_path, 3, FAKE_NCCL_FAIL="1:5:error")
    for rank in ended:
        assert rank.code == 0, ended
        started, failed, again, host = rank.told
        assert "kind" not in started
        assert failed["kind"] in ("Error", "PeerLostError"), ended
        assert failed["seconds"] < 15
        assert again["kind"] == failed["kind"]
        assert host["kind"] in ("Error", "PeerLostError"), ended
    assert "injected error" in ended[1].told[1]["text"]
    assert "injected error" in ended[0].told[1]["text"], ended


def test_a_rank_that_dies_while_devices_work(tmp_path):
    ended = run(tmp_path, 3, FAKE_NCCL_FAIL="2:5:die")
    assert ended[2].code == -9
    for rank in ended[:2]:
        assert rank.code == 0, ended
        failed = rank.told[1]
        assert failed["kind"] == "PeerLostError", ended
        assert "rank 2" in failed["text"]
        assert failed["seconds"] < 15


def test_a_rank_whose_operation_hangs(tmp_path):
    ended = run(tmp_path, 2, timeout=3.0, FAKE_NCCL_FAIL="0:5:hang")
    kinds = []
    for rank in ended:
        assert rank.code == 0, ended
        kinds.append(rank.told[1]["kind"])
        assert rank.told[1]["seconds"] < 30
        assert "allreduce" in rank.told[1]["text"], ended
    assert "TimeoutError" in kinds
    assert set(kinds) <= {"TimeoutError", "PeerLostError"}


def test_a_rank_that_does_not_come(tmp_path):
    script = LOOP.replace("def work():", "def work():\n    if rank == 1: return time.sleep(8)")
    ended = run(tmp_path, 2, script, timeout=3.0)
    failed = ended[0].told[1]
    assert failed["kind"] == "TimeoutError", ended
    assert "not all ranks have come to it" in failed["text"]
    assert ended[1].told[2]["kind"] == "PeerLostError", ended


@pytest.mark.parametrize("what", ["error", "die", "hang"])
def test_a_rank_that_fails_while_nccl_starts(tmp_path, what):
    ended = run(
        tmp_path,
        3,
        "told(lambda: start(timeout=TIMEOUT) and None)",
        timeout=5.0,
        FAKE_NCCL_FAIL=f"1:init:{what}",
    )
    for number, rank in enumerate(ended):
        if what == "die" and number == 1:
            assert rank.code == -9
            continue
        assert rank.code == 0, ended
        failed = rank.told[0]
        assert (
            failed["kind"]
            in {
                "error": ("Error", "PeerLostError"),
                "die": ("PeerLostError",),
                "hang": ("TimeoutError", "PeerLostError"),
            }[what]
        ), ended
        assert failed["seconds"] < 30


@pytest.mark.parametrize(
    ("name", "value"),
    [("SAMESTEP_NCCL_CHECK", "before"), ("SAMESTEP_STAGING_PIECE", "4096"), ("SAMESTEP_PACK_BELOW", "0")],
)
def test_ranks_that_were_given_different_terms(tmp_path, name, value):
    script = "told(lambda: start(timeout=TIMEOUT) and None)"
    ended = run(tmp_path, 3, script, of_rank={1: {name: value}})
    for rank in ended:
        assert rank.told[0]["kind"] == "MismatchError", ended
        assert rank.told[0]["text"].endswith(f" on ranks 0, 2, {value} on rank 1"), ended


@pytest.mark.parametrize("mismatch", ["", "hang"])
def test_ranks_that_do_not_agree(tmp_path, mismatch):
    script = LOOP.replace(
        "world.iallreduce(x).wait(host=True)",
        "world.iallreduce(x, 'sum' if turn < 5 or rank else 'max').wait(host=True)",
        1,
    )
    for rank in run(tmp_path, 2, script, FAKE_NCCL_MISMATCH=mismatch):
        _, failed, again, host = rank.told
        assert failed["kind"] == "MismatchError", rank
        assert "op sum" in failed["text"]
        assert "op max" in failed["text"]
        assert again["kind"] == "MismatchError"
        assert host == {"result": [2.0] * 3}, rank  # the host part of the group goes on


def test_ranks_that_compare_first_go_on(tmp_path):
    script = """
world = start()
x = Array.of(np.full(7, rank + 1.0), Stream())
told(lambda: world.allreduce(x, "sum" if rank else "max"))
told(lambda: world.allreduce(x, "sum").get().tolist())
world.close()
"""
    for rank in device_jobs.run(tmp_path, script, 2, SAMESTEP_NCCL_CHECK="before"):
        assert rank.told[0]["kind"] == "MismatchError", rank
        assert rank.told[1] == {"result": [3.0] * 7}, rank


def test_what_ranks_agree_on_begins_though_nobody_waits(tmp_path):
    """To free device memory waits for what runs there: it must not need a rank that does the same."""
    script = """
world = start()
x = Array.of(np.full(7, rank + 1.0), Stream())
if rank == 0:
    work = world.iallreduce(x)  # before the other rank has come to it
    world.send(np.ones(1), 1)
else:
    world.recv(np.ones(1), 0)
    work = world.iallreduce(x)
until = time.monotonic() + 30
while fake_arrays.nccl_calls() == 0 and time.monotonic() < until:
    time.sleep(1e-3)
tell(calls=fake_arrays.nccl_calls())
told(lambda: work.wait().get().tolist())
world.close()
"""
    for rank in device_jobs.run(tmp_path, script, 2, SAMESTEP_NCCL_CHECK="before"):
        assert rank.told == [{"calls": 1}, {"result": [3.0] * 7}], rank


def test_what_ranks_agree_on_begins_while_one_of_them_holds_the_interpreter(tmp_path):
    """As a library of arrays may that frees device memory."""
    script = """
import ctypes
world = start()
x = Array.of(np.full(7, rank + 1.0), Stream())
pipe = f"{place}/pipe"
if rank == 0:
    os.mkfifo(pipe)
    work = world.iallreduce(x)
    world.send(np.ones(1), 1)
    ctypes.PyDLL(None).open(pipe.encode(), os.O_RDONLY)  # until the other rank has its result
else:
    world.recv(np.ones(1), 0)
    work = world.iallreduce(x)
    told(lambda: work.wait(timeout=20).get().tolist())
    os.close(os.open(pipe, os.O_WRONLY))
told(lambda: work.wait().get().tolist())
world.close()
"""
    settings = {"SAMESTEP_NCCL_CHECK": "before", "FAKE_NCCL_IN_PROGRESS": "10000"}
    ended = device_jobs.run(tmp_path, script, 2, **settings)
    assert [rank.told for rank in ended] == [[{"result": [3.0] * 7}] * n for n in (1, 2)], ended


def test_a_device_that_is_lost_ends_the_group_and_not_the_process(tmp_path):
    script = """
import ctypes
world = start()
stream = Stream()
x = Array.of(np.full(7, rank + 1.0), stream)
stream.synchronize()
if rank == 0:
    fake_arrays.runtime().fakeHold(ctypes.c_void_p(stream.handle))  # it is under way when that is found
else:
    os.environ["FAKE_GPU_DEVICES"] = "1"
work = world.iallreduce(x)
told(lambda: work.wait(host=True))
if rank == 0:
    fake_arrays.runtime().fakeRelease(ctypes.c_void_p(stream.handle))
told(lambda: world.allreduce(x))
"""
    for rank in device_jobs.run(tmp_path, script, 2):
        assert rank.code == 0, rank
        for told in rank.told:
            assert "failed: invalid device ordinal" in told["text"], rank


def test_wrong_arguments_change_nothing(tmp_path):
    script = """
world = start()
x = Array.of(np.full(7, rank + 1.0), Stream())
told(lambda: world.allreduce(x, out=Array((8,), "float64")))
told(lambda: world.bcast(x, root=5))
fake_arrays.call("SetDevice", 3)
there = Array.of(np.ones(7))
fake_arrays.call("SetDevice", world.device)
told(lambda: world.allreduce(there))
told(lambda: world.allreduce(x).get().tolist())
world.close()
"""
    for number, rank in enumerate(device_jobs.run(tmp_path, script, 2)):
        assert [told["kind"] for told in rank.told[:3]] == ["InvalidArgumentError"] * 3, rank
        assert f"device 3, but rank {number}" in rank.told[2]["text"]
        assert rank.told[3] == {"result": [3.0] * 7}, rank


def test_nothing_is_left_behind(tmp_path):
    script = """
import gc
for turn in range(3):
    world = ss.initialize("nccl", init_method=f"file://{place}/meeting{turn}", rank=rank, world_size=size)
    x = Array.of(np.ones(1000, "int16"), Stream())
    group = world.split(rank % 2)
    for op in ("sum", "bxor"):
        world.allreduce(x, op)
        group.allgather(x).numpy()
    x.get()
    stream = x.stream.handle
    del x
    ss.finalize()
    world = group = None
    gc.collect()
    fake_arrays.call("StreamDestroy", fake_arrays.ctypes.c_void_p(stream))
    tell(left=fake_arrays.counts())
"""
    for rank in device_jobs.run(tmp_path, script, 2):
        assert rank.code == 0, rank
        assert [told["left"] for told in rank.told] == [[0, 0, 0, 0]] * 3, rank
