"""Programs of test_device_lists.py: rank r has devices 2 r and 2 r + 1, and calls with a list of two arrays."""

import ctypes
import gc
import json
import sys

import fake_arrays
import numpy as np
import samestep as ss
import samestep.distributed as dist
from device_rank import attempt, rank, report, size, start, store
from fake_arrays import Array, Stream

LAST = size - 1


def on(device, values, stream=None):
    before = ctypes.c_int()
    fake_arrays.call("GetDevice", ctypes.byref(before))
    fake_arrays.call("SetDevice", device)
    array = Array.of(values, Stream() if stream is None else stream)
    fake_arrays.call("SetDevice", before.value)
    return array


def part(k, j, count=37, dtype="float32"):
    """What array j of rank k contains."""
    return (np.arange(count) % 7 + 10 * k + 3 * j).astype(dtype)


def mine(count=37, dtype="float32"):
    return [on(2 * rank + j, part(rank, j, count, dtype)) for j in range(2)]


def values_of(arrays):
    return [a.numpy().tolist() if hasattr(a, "numpy") else a.get().tolist() for a in arrays]


PARTS = [part(k, j) for k in range(size) for j in range(2)]
TOTAL = sum(PARTS)


def use_each_operation():
    backend = start()
    for _ in range(2):
        xs = mine()
        ys = list(xs)
        dist.all_reduce_multigpu(xs)
        report(ok=values_of(ys) == [TOTAL.tolist()] * 2 and all(x is y for x, y in zip(xs, ys, strict=True)))
        xs = mine()
        dist.reduce_multigpu(xs, LAST, dst_tensor=1)
        reduced = [part(rank, 0), TOTAL if rank == LAST else part(rank, 1)]
        report(ok=values_of(xs) == [x.tolist() for x in reduced])
        xs = mine()
        dist.broadcast_multigpu(xs, LAST, src_tensor=1)
        report(ok=values_of(xs) == [part(LAST, 1).tolist()] * 2)
        xs = mine()
        dist.all_reduce_multigpu(xs, ss.premul(rank + 1.0))
        expected = sum((k + 1) * (part(k, 0) + part(k, 1)) for k in range(size))
        report(ok=values_of(xs) == [expected.tolist()] * 2)
        xs = mine(dtype="float64")
        dist.all_reduce_multigpu(xs, "avg")
        report(ok=np.allclose(values_of(xs), [TOTAL / (2 * size)] * 2))
    backend.close()


def use_samestep_distributed():
    dist.init_process_group("nccl", init_method=store(), rank=rank, world_size=size)
    xs = mine()
    dist.all_reduce_multigpu(xs)
    report(ok=values_of(xs) == [TOTAL.tolist()] * 2)
    xs = mine()
    dist.reduce_multigpu(xs, LAST, dst_tensor=1, async_op=True).wait()
    report(ok=values_of(xs) == [part(rank, 0).tolist(), (TOTAL if rank == LAST else part(rank, 1)).tolist()])
    xs = mine()
    dist.broadcast_multigpu(xs, LAST, src_tensor=1)
    report(ok=values_of(xs) == [part(LAST, 1).tolist()] * 2)
    slots = [[on(2 * rank + i, np.zeros(37, "float32")) for _ in range(2 * size)] for i in range(2)]
    dist.all_gather_multigpu(slots, mine())
    report(ok=[values_of(row) for row in slots] == [[x.tolist() for x in PARTS]] * 2)
    dist.destroy_process_group()


def use_lists_of_any_kind():
    backend = start()

    def check(xs, op="sum"):
        tables = backend.allgather_object([np.array(x.get() if isinstance(x, Array) else x) for x in xs])
        dist.all_reduce_multigpu(xs, op)
        reduce = np.add if op == "sum" else np.bitwise_xor
        expected = reduce.reduce([x for values in tables for x in values])
        report(
            ok=values_of([x for x in xs if isinstance(x, Array)] or [on(0, x) for x in xs])[0]
            == expected.tolist()
        )

    check([on(2 * rank, part(rank, j)) for j in range(2)])  # two on one device
    check([on(j, part(rank, j)) for j in range(2)])  # devices of two ranks
    check(mine(dtype="int32"), "bxor")  # no operator of NCCL
    check(mine(0))  # no elements
    check(list(reversed(mine(dtype="int16"))))
    check([np.ones(3), np.ones(3)])
    check([np.ones(3), on(0, np.ones(3))])
    check([on(backend.device, part(rank, 0))])
    backend.close()


def reduce_late_arrays():
    """Each array is made late in its own stream and used at once; its value before that is -1."""
    backend = start()
    wrong = 0
    for turn in range(25):
        xs = [on(2 * rank + j, np.full(257, -1.0, "float32")) for j in range(2)]
        for x in xs:
            x.stream.synchronize()
            x.stream.delay(2000)
            x.set(np.full(257, turn + 1.0, "float32"))
        work = dist.all_reduce_multigpu(xs, async_op=True)
        work.wait()
        wrong += sum(int((x.get() != 2.0 * size * (turn + 1)).any()) for x in xs)
    report(wrong=wrong)
    backend.close()


def use_default_streams():
    backend = start()
    wrong = 0
    for turn in range(10):
        xs = [on(2 * rank + j, np.full(257, turn + j, "float32"), fake_arrays.DEFAULT) for j in range(2)]
        dist.all_reduce_multigpu(xs, async_op=True).wait()
        for j, x in enumerate(xs):
            fake_arrays.call("SetDevice", 2 * rank + j)
            wrong += int((x.get() != size * (2.0 * turn + 1)).any())
        fake_arrays.call("SetDevice", backend.device)
    report(wrong=wrong)
    backend.close()


DIFFERENT = {
    "lengths": lambda: (mine()[: 2 - rank],),
    "counts": lambda: (mine(37 + rank),),
    "dtypes": lambda: (mine(dtype="float64" if rank else "float32"),),
    "operators": lambda: (mine(), "avg" if rank else "sum"),
}


def differ_in(what):
    backend = start()
    attempt(lambda: dist.all_reduce_multigpu(*DIFFERENT[what](), async_op=True).wait(host=True) and None)
    attempt(lambda: backend.allreduce(np.ones(3)).tolist())
    attempt(lambda: backend.close(timeout=20))


def start_and_end_three_times():
    for turn in range(3):
        ss.initialize("nccl", init_method=store(f"store{turn}"), rank=rank, world_size=size)
        xs = mine()
        dist.all_reduce_multigpu(xs)
        dist.broadcast_multigpu(xs, 0)
        dist.all_reduce_multigpu(list(reversed(xs)))
        values_of(xs)
        streams = [x.stream.handle for x in xs]
        del xs
        ss.finalize()
        gc.collect()
        for stream in streams:
            fake_arrays.call("StreamDestroy", ctypes.c_void_p(stream))
        report(left=[*fake_arrays.counts_at_rest(), fake_arrays.nccl_comms()])


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))
