"""Programs of test_device_torch.py: torch's optimizers over parameters in device memory."""

import functools
import json
import os
import signal
import sys
import time

import torch_on_fakes

torch = torch_on_fakes.load()

import samestep as ss  # noqa: E402
from device_rank import attempt, rank, report, size, start  # noqa: E402
from samestep.optimizer import no_sync  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

nn = torch.nn
LARGE = 140_000  # of which no copy is made


class Model(nn.Module):
    """Sums of products with whole numbers, so that every order of additions gives the same bits."""

    def __init__(self):
        super().__init__()
        self.small = nn.ParameterList(nn.Parameter(torch.ones(n)) for n in (1, 3, 7, 500) * 10)
        self.large = nn.ParameterList(nn.Parameter(torch.ones(LARGE)) for _ in range(2))
        self.turned = nn.Parameter(torch.ones(6, 5).t())  # its rows do not lie one after another
        self.wide = nn.ParameterList(nn.Parameter(torch.ones(n, dtype=torch.float64)) for n in (2, 9))
        self.turning = nn.ParameterList(nn.Parameter(torch.ones(n, dtype=torch.complex64)) for n in (4, 5))
        self.of_one_rank = nn.Parameter(torch.ones(11))
        self.never = nn.Parameter(torch.ones(12))
        self.replaced = nn.Parameter(torch.ones(13))
        self.twice = nn.Parameter(torch.ones(14))  # with a pass inside the pass

    def forward(self, factor):
        used = [p for name, p in self.named_parameters() if name not in ("of_one_rank", "never")]
        if rank == size - 1:
            used.append(self.of_one_rank)
        terms = [(p * (factor + i)).sum() for i, p in enumerate(used)]
        again = functools.partial(checkpoint, lambda x: (x * self.twice).sum(), preserve_rng_state=False)
        terms += [again(self.twice.detach().requires_grad_(), use_reentrant=True) for _ in range(2)]
        return sum(term.real.double() for term in terms)


def gradients(net):
    return [
        None if p.grad is None else p.grad.detach().clone().cpu().resolve_conj() for p in net.parameters()
    ]


def steps(group, net, **options):
    """The gradients after each of some passes, in which everything happens that users do."""
    opt = torch.optim.SGD(net.parameters(), 0.0, foreach=False)
    opt = ss.DistributedOptimizer(group, opt)
    net.replaced.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.clone() * 2))
    net.turning[0].register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", (p.grad * 1j).conj()))
    seen = []
    for turn in range(5):
        opt.zero_grad(set_to_none=turn != 2)
        if turn == 3:
            net.double()
        if turn == 4:
            with no_sync(opt):
                net(rank + 10).backward()
        net(rank + turn).backward()
        seen.append(gradients(net))
        opt.step()
    return seen


def train(backend):
    """The same on the device as on the host, bit by bit."""
    group = start(backend, only=False)
    device = f"cuda:{group.device}"
    got, expected = (steps(group, net) for net in (Model().to(device), Model()))
    assert all(p.is_cuda for p in Model().to(device).parameters())
    report(
        same=[
            all((a is None and b is None) or torch.equal(a, b) for a, b in zip(g, e, strict=True))
            for g, e in zip(got, expected, strict=True)
        ],
        none=[sum(grad is None for grad in grads) for grads in expected],
        largest=[max(grad.abs().max().item() for grad in grads if grad is not None) for grads in expected],
    )
    group.close()


def count_copies(n, at_once):
    """The kernels that copy gradients in passes over `n` small parameters, and in one that finds them there."""
    if not at_once:
        del torch._foreach_copy_  # before anything has looked for it
    group = start("native", only=False)
    parameters = [nn.Parameter(torch.ones(1 + i % 5).to(f"cuda:{group.device}")) for i in range(n)]
    opt = ss.DistributedOptimizer(group, torch.optim.SGD(parameters, 0.0, foreach=False))
    copies = []
    for set_to_none in (True, True, False):
        opt.zero_grad(set_to_none=set_to_none)
        loss = sum((p * 2).sum() for p in parameters)  # whose gradients autograd need not copy
        before = torch.cuda_copies()
        loss.backward()
        copies.append(torch.cuda_copies() - before)
    report(copies=copies, mean=[p.grad.cpu().tolist() for p in parameters[:2]])
    group.close()


def leaves_of(backend, seed):
    """Tensors of several dtypes, sizes and orders of axes, of which some lie alone."""
    whole = [
        (torch.arange(n) % 31 + seed).to(dtype)
        for n, dtype in [
            (1, torch.float32),
            (0, torch.float32),
            (140_000, torch.float32),
            (6, torch.bfloat16),
            (7, torch.bfloat16),
            (30, torch.float64),
            (5, torch.int32),
            (3, torch.int32),
            (3, torch.uint32),
            (2, torch.uint32),
        ]
    ]
    whole.append((torch.arange(30.0) + seed).reshape(5, 6).t())
    whole[0] = whole[0].reshape(())
    return whole if backend is None else [x.to(f"cuda:{backend.device}") for x in whole]


def trees():
    """Reductions and broadcasts of many tensors: as on the host, and with one kernel for a bucket and a direction."""
    group = start("nccl", only=False)
    same, copies = {}, {}
    for op in ("sum", "avg", "max"):
        on_device, on_host = leaves_of(group, rank), leaves_of(None, rank)
        parameter = on_device[0].requires_grad_(True)
        version = parameter._version
        before = torch.cuda_copies()
        reduced = group.allreduce_tree(on_device, op)
        copies[op] = torch.cuda_copies() - before
        group.allreduce_tree(on_host, op)
        # Averages of whole numbers go through the host.
        same[op] = [torch.equal(x.detach().cpu(), y) for x, y in zip(reduced, on_host, strict=True)]
        assert all(x is y for x, y in zip(reduced, on_device, strict=True))
        assert size == 1 or parameter._version > version
    on_device, root = leaves_of(group, rank), size - 1
    before = torch.cuda_copies()
    ss.synchronize(group, on_device, root=root)
    copies["bcast"] = torch.cuda_copies() - before
    same["bcast"] = [torch.equal(x.cpu(), y) for x, y in zip(on_device, leaves_of(None, root), strict=True)]
    report(same={key: all(found) for key, found in same.items()}, copies=copies)
    group.close()


def differ():
    """Trees that the last rank holds in another way, and after each the same tree with all."""
    group = start("nccl", only=False)

    def moved(*shape, **more):
        return torch.ones(*shape, **more).to(f"cuda:{group.device}")

    x, of_host = moved(3), torch.ones(3)
    for a, b in (
        (moved(3), of_host),
        (moved(3), moved(3, dtype=torch.float64)),
        (moved(3), moved(4)),
        (moved(2, 3), moved(3, 2).t()),  # elements in another order
        (moved(3), None),
        (x, x),  # one tensor twice
    ):
        given = b if rank == size - 1 else a
        tree = {"a": torch.ones(3) if given is b and b is of_host else x, "b": given}
        attempt(lambda tree=tree: len(group.allreduce_tree(tree)))
        same = group.allreduce_tree({"a": moved(2), "b": [moved(3)]})
        report(then=[same["a"].tolist(), same["b"][0].tolist()])
    group.close()


def survive(died_at=(), back=""):
    """A training with sums and state in device memory. With `back`, lost ranks are started again, and waited for."""
    torch.cuda.is_initialized = lambda: True  # as after the first tensor
    uid = os.environ["SAMESTEP_UID"]
    x = torch.arange(60.0).reshape(20, 3) % 7
    y = x @ torch.tensor([1.0, -2.0, 3.0])
    group = ss.initialize(ss.NCCLBackend, timeout=60.0)
    if back and not uid.endswith(".0"):
        open(back, "w").close()
    device = f"cuda:{group.device}"
    sampler = ss.DistributedSampler(group, 20, batch_size=8, shards=4, seed=1)
    total = ss.Accumulator(group, shards=4)
    state = ss.TrainState(group, w=torch.zeros(3).to(device), sampler=sampler)
    for step in state.steps(epochs=40):
        with step:
            w = state.w.cpu()
            for shard in step:
                error = x[shard.items] @ w - y[shard.items]
                grad = x[shard.items].T @ error / max(1, len(shard))
                total.add(grad.to(device), shard=shard.index, weight=len(shard))
            mean = total.mean()
            ranks = group.allreduce(torch.ones(4).to(device), "sum")  # by NCCL
            if f"{uid}@{state.step + 1}" in died_at:
                os.kill(os.getpid(), signal.SIGKILL)
            while back and state.step == 9 and not os.path.exists(back):
                time.sleep(0.01)
            state.w = (w - 0.01 * mean.cpu()).to(device)
        time.sleep(0.02 if back else 0.0)  # newcomers are asked for four times a second
    bits = state.w.cpu().numpy().tobytes().hex()
    print("result", uid, bits, state.step, ranks[0].item(), state.w.device, group.device, flush=True)
    group.close()


def refuse_one():
    """A gradient that cannot be averaged: that of the parameter before it is what autograd has computed."""
    group = start("native", only=False)
    first, second = (nn.Parameter(torch.ones(4).to(f"cuda:{group.device}")) for _ in range(2))
    opt = ss.DistributedOptimizer(group, torch.optim.SGD([first, second], 0.0, foreach=False))
    (first + 2 * second).sum().backward()
    lent = second.grad
    first.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", lent))
    opt.zero_grad()
    attempt(lambda: (first + 3 * second).sum().backward())
    report(grad=second.grad.cpu().tolist())
    group.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))
