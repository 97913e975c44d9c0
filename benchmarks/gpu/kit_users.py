"""A part of the kit: `kit_users.py KIND`. What users of torch, CuPy and Numba call beyond verbs, on two ranks."""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import device_kinds
import numpy as np
import samestep as ss
import samestep.distributed as dist
from kit_failures import Findings
from kit_rank import RANK, SIZE, need, skip, start

DEVICE = "cpu" if device_kinds.on_fakes() else "cuda"  # on the host only this part itself is tried
GRANULE = 2 << 20  # bytes, see kit_lifetimes.py
GROUP_TIMEOUT_S = 4.0


def total(x: Any) -> Any:
    """The sum over ranks of x * (rank + 1)."""
    return x * (SIZE * (SIZE + 1) // 2)


def layouts(torch: Any, backend: Any, found: Findings) -> None:
    """channels_last, also where a gradient is missing on one rank."""
    whole = torch.arange(120.0, device=DEVICE).reshape(2, 3, 4, 5)
    image = whole.to(memory_format=torch.channels_last)

    def same(what: str, got: Any, expected: Any) -> None:
        found.expect(torch.equal(got, expected), f"{what}: wrong numbers")
        kept = DEVICE == "cpu" or got.stride() == image.stride()  # on the host some results are row-major
        found.expect(kept, f"{what}: another layout")

    same("allreduce", backend.allreduce(image * (RANK + 1)), total(whole))
    out = torch.empty_like(image)
    backend.bcast(whole * (RANK + 1), root=1, out=out)
    same("bcast(out=)", out, whole * 2)
    tree = {"image": (image * (RANK + 1)) if RANK == 0 else None, "other": torch.ones(3, device=DEVICE)}
    got = backend.allreduce_tree(tree, "sum")
    same("a leaf that is None on rank 1", got["image"], whole)
    for shards in (None, 2):
        mean = ss.Accumulator(backend, shards)
        mean.add([image * (RANK + 1)], shard=None if shards is None else RANK)
        same(f"Accumulator(shards={shards})", mean.mean()[0], total(whole) / 2)
    model = torch.nn.Conv2d(3, 4, 3).to(DEVICE, memory_format=torch.channels_last)
    ss.synchronize(backend, model)
    backend.same(model)


def streams(torch: Any, backend: Any, found: Findings) -> None:
    """Results that another library takes over in a stream of its own."""
    import cupy
    from numba import cuda

    for turn in range(20):
        result = backend.allgather(cuda.to_device(np.full(1 << 16, turn + RANK, "float32")))
        with torch.cuda.stream(torch.cuda.Stream()):
            seen = torch.from_dlpack(result) + 1
        with cupy.cuda.Stream(non_blocking=True):
            also = cupy.asnumpy(cupy.from_dlpack(result) + 1)
        expected = np.repeat([turn + 1, turn + 2], 1 << 16)
        torch.cuda.synchronize()
        found.expect(bool((seen.cpu().numpy().reshape(-1) == expected).all()), f"torch, turn {turn}")
        found.expect(bool((also.reshape(-1) == expected).all()), f"CuPy, turn {turn}")


def messages(torch: Any, backend: Any, found: Findings) -> None:
    """Messages with one tag keep their order, although the first array is computed late."""
    count, other = 300_000, 1 - RANK
    if RANK == 0:
        late = torch.zeros(count, device=DEVICE)
        busy(torch, 0.5)
        late.fill_(1.0)
        works = [
            backend.isend(late, other, tag=3),
            backend.isend(np.full(count, 2.0, "float32"), other, tag=3),
        ]
        works.append(backend.isend_object("third", other, tag=3))
        for work in works:
            work.wait(host=True)
    else:
        first, second = torch.zeros(count, device=DEVICE), np.zeros(count, "float32")
        backend.recv(first, other, tag=3)
        backend.recv(second, other, tag=3)
        found.expect(bool((first == 1).all()), "the first message is another")
        found.expect(bool((second == 2).all()), "the second message is another")
        found.expect(backend.recv_object(other, tag=3) == "third", "the third message is another")


def lists(torch: Any, backend: Any, found: Findings) -> None:
    """Two arrays on one device."""
    for count in (0, 5, 300_001):
        arrays = [torch.full((count,), 2.0 * RANK + k, device=DEVICE) for k in range(2)]
        dist.all_reduce_multigpu(arrays)
        found.expect(all(bool((x == 6).all()) for x in arrays), f"all_reduce_multigpu of {count}")
        arrays = [torch.full((count,), 2.0 * RANK + k, device=DEVICE) for k in range(2)]
        dist.broadcast_multigpu(arrays, 1)
        found.expect(all(bool((x == 2).all()) for x in arrays), f"broadcast_multigpu of {count}")


def sharded(torch: Any, backend: Any, found: Findings) -> None:
    """ShardedOptimizer does what the optimizer alone does with the mean of the gradients."""
    results = []
    for wrap in (False, True):
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.Linear(17, 5)).to(DEVICE)
        optimizer: Any = torch.optim.Adam(net.parameters(), lr=0.01)
        if wrap:
            optimizer = ss.ShardedOptimizer(backend, optimizer)
        for step in range(4):
            torch.manual_seed(10 + step)
            x = torch.randn(2, 8, 33).to(DEVICE)
            optimizer.zero_grad()
            if wrap:
                net(x[RANK]).square().mean().backward()
            else:  # both shards here, and the mean as the ranks take it
                grads = []
                for part in x:
                    grads.append(torch.autograd.grad(net(part).square().mean(), list(net.parameters())))
                for p, a, b in zip(net.parameters(), *grads, strict=True):
                    p.grad = (a + b) / 2
            optimizer.step()
        results.append([p.detach().clone() for p in net.parameters()])
    worst = max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
    found.seen["sharded_differs_by"] = worst
    found.expect(worst < 1e-5, "ShardedOptimizer differs from its optimizer")
    backend.same(results[1])


def training(torch: Any, backend: Any, found: Findings) -> None:
    """DistributedOptimizer: the gradients of all ranks, and no wait for the device where NCCL reduces."""
    torch.manual_seed(RANK)
    sizes = (512, 512, 512, 64, 512)  # large and small gradients
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    net = torch.nn.Sequential(*layers).to(DEVICE)
    ss.synchronize(backend, net)
    optimizer = ss.DistributedOptimizer(backend, torch.optim.SGD(net.parameters(), lr=0.01))
    x = torch.randn(16, 512, device=DEVICE)
    for _ in range(3):
        grads = torch.autograd.grad(net(x).square().mean(), list(net.parameters()))
        optimizer.zero_grad()
        net(x).square().mean().backward()
        for p, grad in zip(net.parameters(), grads, strict=True):
            close = torch.allclose(p.grad, backend.allreduce(grad, "avg"), atol=1e-6)
            found.expect(close, f"the gradient of {tuple(p.shape)} is no average")
        optimizer.step()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        backend.barrier()
        busy(torch, 1.0)
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        waited = torch.cuda.current_stream().query()
        found.expect(
            not waited or not isinstance(backend, ss.NCCLBackend), "DistributedOptimizer waits for the device"
        )
    backend.same(net)


def lengths(torch: Any, backend: Any, found: Findings) -> None:
    """Arrays of many lengths, twice: the second turn needs no more memory of the device than the first."""
    used = []
    for _ in range(2):
        for k in range(60):
            x = torch.ones(1000 + 7919 * k, device=DEVICE)
            found.expect(bool((backend.allreduce(x) == SIZE).all()), f"wrong numbers of {len(x)}")
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            backend.barrier()
            free, whole = torch.cuda.mem_get_info()
            used.append(whole - free)
        backend.barrier()
    found.seen["device_bytes"] = used
    found.expect(not used or used[1] - used[0] <= GRANULE, "memory of the device grows")


def deadlines(torch: Any, backend: Any, found: Findings) -> None:
    """A call may wait longer than its group, whose timeout is GROUP_TIMEOUT_S, and shorter, while a stream is busy."""
    x = torch.ones(1000, device=DEVICE)
    backend.allreduce(x)
    backend.barrier()
    if RANK == 1 and DEVICE == "cuda":
        time.sleep(1.5 * GROUP_TIMEOUT_S)
    found.expect(
        bool((backend.allreduce(x, timeout=30.0) == SIZE * SIZE).all()), "wrong numbers after a wait"
    )
    backend.barrier()
    busy(torch, 8.0)
    x.fill_(1.0)
    begin = time.monotonic()
    try:
        backend.allreduce_tree({"x": x, "y": torch.ones(3, device=DEVICE)}, timeout=1.0)
        found.expect(DEVICE != "cuda", "no error, though the stream is busy")
    except ss.TimeoutError as error:
        found.seen["tree"] = str(error)[:300]
    found.seen["tree_after_s"] = round(time.monotonic() - begin, 2)
    found.expect(time.monotonic() - begin < 4, "the deadline of a tree came late")


def torch_names(torch: Any, kind: str, found: Findings) -> None:
    """samestep.distributed with averages of 16 bits, which one rank waits for in the call and one later."""
    import samestep.distributed as dist

    place = os.environ["KIT_PLACE"]
    backend = kind if kind == "nccl" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{place}/names", rank=RANK, world_size=SIZE)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for shape in ((1000,), (10, 20), (0,)):
            x = torch.full(shape, float(RANK), dtype=dtype, device=DEVICE)
            work = dist.all_reduce(x, op=dist.ReduceOp.AVG, async_op=RANK == 0)
            if work is not None:
                work.wait()
            found.expect(bool((x == 0.5).all()), f"all_reduce of {shape} {dtype}")
            parts = [torch.empty(shape, dtype=dtype, device=DEVICE) for _ in range(SIZE)]
            dist.all_gather(parts, x + RANK)
            found.expect(bool((parts[1] == 1.5).all()), f"all_gather of {shape} {dtype}")
    dist.destroy_process_group()


def busy(torch: Any, seconds: float) -> None:
    if DEVICE == "cuda":
        torch.cuda._sleep(int(seconds * 1.5e9))


def main(kind: str) -> int:
    torch = need("torch")
    if DEVICE == "cuda" and not torch.cuda.is_available():
        skip("torch sees no device")
    found = Findings(f"as users call it, {kind}")
    checks: list[Callable[[Any, Any, Findings], None]] = [
        layouts,
        messages,
        lists,
        sharded,
        training,
        lengths,
    ]
    missing = [name for name in ("cupy", "numba") if not importlib.util.find_spec(name)]
    if DEVICE == "cuda" and not missing:
        checks.append(streams)
    found.seen["missing"] = missing
    with start(kind) as backend:
        for check in checks:
            begin = time.monotonic()
            try:
                check(torch, backend, found)
            except Exception as error:  # the other checks still say what they find
                found.expect(False, f"{check.__name__}: {type(error).__name__}: {error}"[:600])
            found.seen[f"{check.__name__}_s"] = round(time.monotonic() - begin, 2)
    torch_names(torch, kind, found)
    backend = start(kind, "deadlines", timeout=GROUP_TIMEOUT_S if DEVICE == "cuda" else 60.0)
    deadlines(torch, backend, found)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    ss.finalize()
    return found.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
