"""Several devices on each rank: lists of arrays go through a clique of NCCL with a member for each device."""

import device_jobs
import pytest

# Rank r has devices 2 r and 2 r + 1, of which neither need be the one it was started with.
SETTINGS = {"FAKE_GPU_DEVICES": "8", "FAKE_GPU_DELAY_US": "300"}

ON_PAIRS = """
def on(device, values, stream=None):
    before = fake_arrays.ctypes.c_int()
    fake_arrays.call("GetDevice", fake_arrays.ctypes.byref(before))
    fake_arrays.call("SetDevice", device)
    array = Array.of(values, Stream() if stream is None else stream)
    fake_arrays.call("SetDevice", before.value)
    return array

def part(k, j, count=37, dtype="float32"):
    return (np.arange(count) % 7 + 10 * k + 3 * j).astype(dtype)

def mine(count=37, dtype="float32"):
    return [on(2 * rank + j, part(rank, j, count, dtype)) for j in range(2)]

def got(arrays):
    return [a.numpy().tolist() if hasattr(a, "numpy") else a.get().tolist() for a in arrays]

def calls(act):
    before = fake_arrays.nccl_calls()
    result = act()
    tell(calls=fake_arrays.nccl_calls() - before)
    return result

everyones = [part(k, j) for k in range(size) for j in range(2)]
total = sum(everyones)
last = size - 1
"""

LAWS = (
    ON_PAIRS
    + """
backend = start()
for turn in range(2):
    xs = mine()
    ys = calls(lambda: backend.allreduce_multi(xs))
    tell(ok=got(ys) == [total.tolist()] * 2 and all(x is y for x, y in zip(xs, ys)))
    xs = mine()
    calls(lambda: backend.reduce_multi(xs, root=last, root_array=1))
    told_ = [part(rank, 0), total if rank == last else part(rank, 1)]
    tell(ok=got(xs) == [x.tolist() for x in told_])
    xs = mine()
    calls(lambda: backend.bcast_multi(xs, root=last, root_array=1))
    tell(ok=got(xs) == [part(last, 1).tolist()] * 2)
    ys = calls(lambda: backend.allgather_multi(mine()))
    tell(ok=got(ys) == [np.stack(everyones).tolist()] * 2)
    xs = mine()
    backend.allreduce_multi(xs, ss.premul(rank + 1.0))
    tell(ok=got(xs) == [sum((k + 1) * (part(k, 0) + part(k, 1)) for k in range(size)).tolist()] * 2)
    xs = mine(dtype="float64")
    backend.allreduce_multi(xs, "avg")
    tell(ok=np.allclose(got(xs), [total / (2 * size)] * 2))
backend.close()
"""
)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize(
    "how",
    [{}, {"FAKE_NCCL_IN_PROGRESS": "1"}, {"SAMESTEP_NCCL_CHECK": "before"}],
    ids=["", "late", "checked"],
)
def test_the_verbs_go_through_nccl(tmp_path, n, how):
    ended = device_jobs.run(tmp_path, LAWS, n, **SETTINGS, **how)
    for rank in ended:
        assert rank.code == 0, ended
        assert [told["calls"] for told in rank.told if "calls" in told] == [2] * 8, ended
        assert all(told["ok"] for told in rank.told if "ok" in told), ended


def test_the_functions_of_2019_do_too(tmp_path):
    script = (
        ON_PAIRS
        + """
import samestep.distributed as dist
dist.init_process_group("nccl", init_method=f"file://{place}/meeting", rank=rank, world_size=size)
xs = mine()
calls(lambda: dist.all_reduce_multigpu(xs))
tell(ok=got(xs) == [total.tolist()] * 2)
xs = mine()
request = calls(lambda: dist.reduce_multigpu(xs, last, dst_tensor=1, async_op=True))
request.wait()
tell(ok=got(xs) == [part(rank, 0).tolist(), (total if rank == last else part(rank, 1)).tolist()])
xs = mine()
calls(lambda: dist.broadcast_multigpu(xs, last, src_tensor=1))
tell(ok=got(xs) == [part(last, 1).tolist()] * 2)
slots = [[on(2 * rank + i, np.zeros(37, "float32")) for _ in range(2 * size)] for i in range(2)]
calls(lambda: dist.all_gather_multigpu(slots, mine()))
tell(ok=[got(row) for row in slots] == [[x.tolist() for x in everyones]] * 2)
dist.destroy_process_group()
"""
    )
    ended = device_jobs.run(tmp_path, script, 2, **SETTINGS)
    for rank in ended:
        assert rank.code == 0, ended
        assert [told["calls"] for told in rank.told if "calls" in told] == [2, 2, 2, 8], ended
        assert all(told["ok"] for told in rank.told if "ok" in told), ended


def test_what_nccl_does_not_take_goes_through_the_host(tmp_path):
    script = (
        ON_PAIRS
        + """
backend = start()
def law(xs, op="sum"):
    values = [x.get() for x in xs]
    tables = backend.allgather_object(values)
    calls(lambda: backend.allreduce_multi(xs, op))
    reduce = np.add if op == "sum" else np.bitwise_xor
    expected = reduce.reduce([x for values in tables for x in values])
    tell(ok=got(xs) == [expected.tolist()] * len(xs))
law([on(2 * rank, part(rank, j)) for j in range(2)])       # two on one device
law([on(j, part(rank, j)) for j in range(2)])              # devices of two ranks
law([on(j, part(rank, j)) for j in range(2)])
law(mine(dtype="int32"), "bxor")                           # no operator of NCCL
law(mine(0))                                               # no elements
law(mine(dtype="int16"))
host = [np.ones(3), np.ones(3)]
calls(lambda: backend.allreduce_multi(host))
tell(ok=host[0].tolist() == [2.0 * size] * 3)
mixed = [np.ones(3), on(0, np.ones(3))]
calls(lambda: backend.allreduce_multi(mixed))
tell(ok=mixed[0].tolist() == mixed[1].get().tolist() == [2.0 * size] * 3)
calls(lambda: backend.allreduce_multi(mine()))             # and this does not
backend.close()
"""
    )
    ended = device_jobs.run(tmp_path, script, 2, **SETTINGS)
    for rank in ended:
        assert rank.code == 0, ended
        assert [told["calls"] for told in rank.told if "calls" in told] == [0] * 8 + [2], ended
        assert all(told["ok"] for told in rank.told if "ok" in told), ended


def test_groups_and_orders_of_devices_have_cliques_of_their_own(tmp_path):
    script = (
        ON_PAIRS
        + """
backend = start()
pair = backend.split(0 if rank < 2 else 1)
swapped = list(reversed(mine()))
for group, xs in [(backend, mine()), (pair, mine()), (backend, swapped), (backend, mine()), (pair, mine())]:
    group.allreduce_multi(xs)
    ranks = range(size) if group is backend else range(2) if rank < 2 else range(2, size)
    tell(ok=got(xs) == [sum(part(k, 0) + part(k, 1) for k in ranks).tolist()] * 2)
ys = backend.allgather_multi(list(reversed(mine())))
tell(ok=got(ys)[0] == [part(k, j).tolist() for k in range(size) for j in (1, 0)])
single = [on(backend.device, part(rank, 0))]
calls(lambda: backend.allreduce_multi(single))             # the communicator that each rank has anyhow
tell(ok=got(single) == [sum(part(k, 0) for k in range(size)).tolist()])
backend.close()
"""
    )
    for rank in device_jobs.run(tmp_path, script, 3, **SETTINGS):
        assert rank.code == 0, rank
        assert all(told["ok"] for told in rank.told if "ok" in told), rank
        assert {"calls": 1} in rank.told


TORTURE = (
    ON_PAIRS
    + """
backend = start()
wrong = 0
for turn in range(25):
    xs = [on(2 * rank + j, np.full(257, -1.0, "float32")) for j in range(2)]
    for x in xs:
        x.stream.synchronize()
        x.stream.delay(2000)
        x.set(np.full(257, turn + 1.0, "float32"))
    work = backend.iallreduce_multi(xs)
    work.wait()
    wrong += sum(int((x.get() != 2.0 * size * (turn + 1)).any()) for x in xs)
tell(wrong=wrong)
backend.close()
"""
)


def test_nothing_is_read_before_it_is_made(tmp_path):
    ended = device_jobs.run(tmp_path, TORTURE, 2, **SETTINGS | {"FAKE_GPU_DELAY_US": "1500"})
    assert [rank.told for rank in ended] == [[{"wrong": 0}]] * 2, ended


@pytest.mark.parametrize("who", ["library", "user"])
def test_that_is_found_out_if_one_side_does_not_wait(tmp_path, who):
    settings = SETTINGS | {"FAKE_GPU_DELAY_US": "1500", "FAKE_GPU_IGNORE_WAITS": who}
    if who == "user":
        settings["FAKE_NCCL_SLOW"] = "0"  # a result that nobody waits for is not there yet
    ended = device_jobs.run(tmp_path, TORTURE, 1, **settings)
    assert ended[0].told[0]["wrong"] > 0, ended


def test_nobody_waits_on_the_host_after_the_first_use(tmp_path):
    script = (
        ON_PAIRS
        + """
backend = start()
backend.allreduce_multi(mine())
xs = mine()
for x in xs:
    x.stream.delay(3_000_000)
begin = time.monotonic()
works = [backend.iallreduce_multi(xs) for _ in range(5)]
for work in works:
    work.wait()
tell(quick=time.monotonic() - begin < 2.5, ended=works[-1].done())
works[-1].wait(host=True)
tell(late=time.monotonic() - begin > 2.5)
backend.close()
"""
    )
    ended = device_jobs.run(tmp_path, script, 2, **SETTINGS)
    assert [rank.told for rank in ended] == [[{"quick": True, "ended": False}, {"late": True}]] * 2, ended


def test_a_default_stream_is_that_of_the_array_s_device(tmp_path):
    script = (
        ON_PAIRS
        + """
backend = start()
wrong = 0
for turn in range(10):
    xs = [on(2 * rank + j, np.full(257, turn + j, "float32"), fake_arrays.DEFAULT) for j in range(2)]
    backend.iallreduce_multi(xs).wait()
    for j, x in enumerate(xs):
        fake_arrays.call("SetDevice", 2 * rank + j)
        wrong += int((x.get() != size * (2.0 * turn + 1)).any())
    fake_arrays.call("SetDevice", backend.device)
tell(wrong=wrong)
backend.close()
"""
    )
    ended = device_jobs.run(tmp_path, script, 2, **SETTINGS | {"FAKE_GPU_DELAY_US": "1500"})
    assert [rank.told for rank in ended] == [[{"wrong": 0}]] * 2, ended


# ---- what goes wrong


DIFFERENT = {
    "lengths": "mine()[: 2 - rank]",
    "orders": "mine() if rank else list(reversed(mine()))",
    "ways": "mine() if rank else [np.ones(37, 'float32'), np.ones(37, 'float32')]",
    "counts": "mine(37 + rank)",
    "dtypes": "mine(dtype='float64' if rank else 'float32')",
    "operators": "mine(), 'avg' if rank else 'sum'",
    "operators on one device": "[on(2 * rank, part(rank, j)) for j in range(2)], 'avg' if rank else 'sum'",
}


@pytest.mark.parametrize("used_before", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_are_told_on_all_of_them(tmp_path, what, used_before):
    script = (
        ON_PAIRS
        + f"""
backend = start()
if {used_before}:
    backend.allreduce_multi(mine())
told(lambda: backend.iallreduce_multi({DIFFERENT[what]}).wait(host=True) and None)
told(lambda: backend.allreduce(np.ones(3)).tolist())
told(lambda: backend.iallreduce(on(backend.device, part(rank, 0))).wait(host=True) and None)
told(lambda: backend.close(timeout=20))
"""
    )
    ended = device_jobs.run(tmp_path, script, 2, **SETTINGS)
    for rank in ended:
        failed, host, after, closed = rank.told
        assert host == {"result": [2.0] * 3}, rank  # the host part of the group goes on
        if not used_before and what in ("orders", "ways"):  # they meet, and find a way
            assert failed == after == closed == {"result": None}, ended
            continue
        # NCCL goes on for all of them, or for none.
        assert after.get("kind") == ended[0].told[2].get("kind"), ended
        assert after.get("kind") == "MismatchError" or not used_before, ended
        assert closed == {"result": None}, ended
        assert after.get("seconds", 0) < 15
        assert failed["kind"] == "MismatchError", ended
        assert failed["seconds"] < 15
        told = "2 arrays on rank 0" if what == "lengths" and not used_before else "n-th list of devices"
        assert told in failed["text"], ended


def test_ranks_that_compare_first_go_on(tmp_path):
    script = (
        ON_PAIRS
        + """
backend = start()
backend.allreduce_multi(mine())
told(lambda: backend.allreduce_multi(mine(), "sum" if rank else "max"))
told(lambda: backend.bcast_multi(mine(), root_array=rank))
xs = mine()
backend.allreduce_multi(xs)
tell(ok=got(xs) == [total.tolist()] * 2)
backend.close()
"""
    )
    for rank in device_jobs.run(tmp_path, script, 2, **SETTINGS, SAMESTEP_NCCL_CHECK="before"):
        assert [told.get("kind") for told in rank.told] == ["MismatchError", "MismatchError", None], rank
        assert rank.told[2]["ok"]


LOOP = (
    ON_PAIRS
    + """
told(lambda: start(timeout=TIMEOUT) and None)
backend = ss.get_distributed_backend()
xs = mine(1000)
def work():
    for turn in range(10):
        backend.iallreduce_multi(xs).wait(host=True)
told(work)
told(lambda: backend.iallreduce_multi(xs).wait(host=True))
told(lambda: backend.iallreduce(on(backend.device, np.ones(3))).wait(host=True))
"""
)


def run(tmp_path, n, *, timeout=20.0, **variables):
    script = LOOP.replace("TIMEOUT", str(timeout))
    return device_jobs.run(tmp_path, script, n, **SETTINGS, **variables)


@pytest.mark.parametrize("member", [2, 3])
def test_a_rank_that_dies_while_devices_work(tmp_path, member):
    """Members 2 and 3 are the devices of rank 1."""
    ended = run(tmp_path, 3, FAKE_NCCL_FAIL=f"{member}:3:die")
    assert ended[1].code == -9
    for rank in (ended[0], ended[2]):
        assert rank.code == 0, ended
        _, failed, again, single = rank.told
        assert failed["kind"] == again["kind"] == single["kind"] == "PeerLostError", ended
        assert "rank 1" in failed["text"]
        assert failed["seconds"] < 15


@pytest.mark.parametrize("member", [2, 3])
def test_a_member_whose_operation_fails(tmp_path, member):
    ended = run(tmp_path, 2, FAKE_NCCL_FAIL=f"{member}:3:error")
    for rank in ended:
        assert rank.code == 0, ended
        assert rank.told[1]["kind"] in ("Error", "PeerLostError"), ended
        assert "injected error" in rank.told[1]["text"], ended
        assert rank.told[1]["seconds"] < 15


def test_a_member_that_hangs(tmp_path):
    ended = run(tmp_path, 2, timeout=3.0, FAKE_NCCL_FAIL="1:3:hang")
    kinds = [rank.told[1]["kind"] for rank in ended]
    assert "TimeoutError" in kinds, ended
    assert set(kinds) <= {"TimeoutError", "PeerLostError"}
    assert all(rank.told[1]["seconds"] < 30 and rank.code == 0 for rank in ended)


@pytest.mark.parametrize("what", ["error", "die", "hang"])
def test_a_member_that_fails_while_the_clique_starts(tmp_path, what):
    ended = run(tmp_path, 2, timeout=5.0, FAKE_NCCL_FAIL=f"3:init:{what}")  # the group's own has no member 3
    for number, rank in enumerate(ended):
        if what == "die" and number == 1:
            assert rank.code == -9
            continue
        assert rank.code == 0, ended
        expected = {"error": ("Error", "PeerLostError"), "die": ("PeerLostError",)}
        assert rank.told[1]["kind"] in expected.get(what, ("TimeoutError", "PeerLostError")), ended
        assert rank.told[1]["seconds"] < 30


def test_nothing_is_left_behind(tmp_path):
    script = (
        ON_PAIRS
        + """
import gc
for turn in range(3):
    backend = ss.initialize("nccl", init_method=f"file://{place}/meeting{turn}", rank=rank, world_size=size)
    xs = mine()
    backend.allreduce_multi(xs)
    backend.split(0).allgather_multi(xs)
    backend.allreduce_multi(list(reversed(xs)))
    got(xs)
    streams = [x.stream.handle for x in xs]
    del xs
    ss.finalize()
    backend = None
    gc.collect()
    for stream in streams:
        fake_arrays.call("StreamDestroy", fake_arrays.ctypes.c_void_p(stream))
    tell(left=[*fake_arrays.counts(), fake_arrays.nccl_comms()])
"""
    )
    for rank in device_jobs.run(tmp_path, script, 2, **SETTINGS):
        assert rank.code == 0, rank
        assert [told["left"] for told in rank.told] == [[0, 0, 0, 0, 0]] * 3, rank


def test_calls_of_several_members_outside_a_group_are_refused(tmp_path):
    """What NCCL may wait for without end, the stand-in refuses; the package makes no such call."""
    script = """
import ctypes
nccl = ctypes.CDLL(os.environ["SAMESTEP_NCCL_LIBRARY"])
class Id(ctypes.Structure):
    _fields_ = [("text", ctypes.c_char * 128)]
class Config(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), *((name, ctypes.c_int) for name in ("magic", "version", "blocking"))]
nccl.ncclCommInitRankConfig.argtypes = [ctypes.c_void_p, ctypes.c_int, Id, ctypes.c_int, ctypes.c_void_p]
def begin(comms, grouped):
    made, config = Id(), Config(ctypes.sizeof(Config), 0xcafebeef - 2**32, 21403, 0)
    assert nccl.ncclGetUniqueId(ctypes.byref(made)) == 0
    codes = []
    if grouped:
        nccl.ncclGroupStart()
    for j, comm in enumerate(comms):
        fake_arrays.call("SetDevice", j)
        codes.append(nccl.ncclCommInitRankConfig(ctypes.byref(comm), 2, made, j, ctypes.byref(config)))
    return codes + ([nccl.ncclGroupEnd()] if grouped else [])
first = [ctypes.c_void_p(), ctypes.c_void_p()]
tell(apart=begin(first, False))
nccl.ncclCommAbort(first[0])
comms = [ctypes.c_void_p(), ctypes.c_void_p()]
tell(together=begin(comms, True))
state = ctypes.c_int(7)
for comm in comms:
    while nccl.ncclCommGetAsyncError(comm, ctypes.byref(state)) == 0 and state.value == 7:
        time.sleep(0.001)
fake_arrays.call("SetDevice", 0)
x = Array.of(np.ones(4, "float32"), Stream())
data, stream = ctypes.c_void_p(x.address), ctypes.c_void_p(x.stream.handle)
tell(alone=nccl.ncclAllReduce(data, data, ctypes.c_size_t(4), 7, 0, comms[0], stream))
tell(ended=[nccl.ncclCommDestroy(comm) for comm in comms], left=fake_arrays.nccl_comms())
nccl.ncclGroupStart()
tell(ended=[*map(nccl.ncclCommDestroy, comms), nccl.ncclGroupEnd()], left=fake_arrays.nccl_comms())
"""
    (rank,) = device_jobs.run(tmp_path, script, 1, **SETTINGS)
    assert rank.code == 0, rank
    made = [{"apart": [7, 5]}, {"together": [0, 0, 7]}]
    assert rank.told == [
        *made,
        {"alone": 5},
        {"ended": [5, 5], "left": 2},
        {"ended": [0, 0, 0], "left": 0},
    ], rank
