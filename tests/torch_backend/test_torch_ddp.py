"""DistributedDataParallel over samestep gives the results of gloo, whatever its arguments."""

import functools
import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

import torch_models as models  # noqa: E402
from at_once import run_at_once  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch_versions import since  # noqa: E402

pytestmark = [
    pytest.mark.ranks(2, timeout=120, backends=["native"]),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch renames what it calls itself
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # which its optimizers use
]

SMALL_BUCKETS = {"bucket_cap_mb": 0.05}  # several in flight


def trained(dist, make, loop, **options):
    """The parameters after training, and the last loss; checked to be the same bits on all ranks."""
    net = DistributedDataParallel(models.seeded(make), **SMALL_BUCKETS, **options)
    loss = loop(dist, net)
    gathered = [None] * dist.get_world_size()
    mine = [p.detach().numpy().tobytes() for p in net.parameters()]
    dist.all_gather_object(gathered, mine)
    assert all(other == mine for other in gathered)
    return [p.detach().clone() for p in net.parameters()], loss


def assert_as_gloo(over, make, loop, **options):
    results = []
    for backend in ("samestep", "gloo"):
        with over(backend) as dist:
            results.append(trained(dist, make, loop, **options))
    (ours, our_loss), (theirs, their_loss) = results
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert our_loss == pytest.approx(their_loss, rel=1e-9)


def plainly(dist, net, n_steps=4):
    opt = torch.optim.SGD(net.parameters(), 0.05, momentum=0.5)
    x, y = models.batch(dist.get_rank(), dist.get_world_size())
    for _ in range(n_steps):
        opt.zero_grad()
        loss = models.loss_of(net, x, y)
        loss.backward()
        opt.step()
    return loss.item()


def with_unused(dist, net):
    opt = torch.optim.SGD(net.parameters(), 0.05)
    x, y = models.batch(dist.get_rank(), dist.get_world_size())
    for step in range(4):
        opt.zero_grad()
        loss = models.loss_of(net, x, y, use=(step + dist.get_rank()) % 2 == 0)
        loss.backward()
        opt.step()
    return loss.item()


def accumulating(dist, net):
    opt = torch.optim.SGD(net.parameters(), 0.05)
    x, y = models.batch(dist.get_rank(), dist.get_world_size())
    for _ in range(3):
        opt.zero_grad()
        with net.no_sync():
            models.loss_of(net, x[::2], y[::2]).backward()
        loss = models.loss_of(net, x[1::2], y[1::2])
        loss.backward()
        opt.step()
    return loss.item()


def unevenly(dist, net):
    opt = torch.optim.SGD(net.parameters(), 0.05)
    x, y = models.batch(dist.get_rank(), dist.get_world_size())
    with net.join():
        for _ in range(2 + dist.get_rank()):
            opt.zero_grad()
            models.loss_of(net, x, y).backward()
            opt.step()
    return 0.0


def unevenly_by_the_active(dist, net):
    """Divides by the ranks that still train, of whose number a Work tells that only C++ holds."""
    opt = torch.optim.SGD(net.parameters(), 0.05)
    x, y = models.batch(dist.get_rank(), dist.get_world_size())
    with net.join(divide_by_initial_world_size=False):
        for _ in range(2 + dist.get_rank()):
            opt.zero_grad()
            models.loss_of(net, x, y).backward()
            opt.step()
    return 0.0


def twice_through(dist, net):
    """Activation checkpoints inside, so that backward passes are nested."""
    opt = torch.optim.SGD(net.parameters(), 0.05)
    x, y = models.batch(dist.get_rank(), dist.get_world_size())
    x.requires_grad_()
    for _ in range(3):
        opt.zero_grad()
        output = torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)
        loss = functional.mse_loss(output, y)
        loss.backward()
        opt.step()
    return loss.item()


CASES = {
    "plain": (models.mlp, plainly, {}),
    "views of buckets": (models.mlp, plainly, {"gradient_as_bucket_view": True}),
    "static graph": (models.mlp, plainly, {"static_graph": True}),
    "unused": (models.Sometimes, with_unused, {"find_unused_parameters": True}),
    "unused, views": (
        models.Sometimes,
        with_unused,
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    ),
    "no_sync": (models.Sometimes, accumulating, {}),
    "join": (models.Sometimes, unevenly, {}),
    "join, unused": (models.Sometimes, unevenly, {"find_unused_parameters": True}),
    "join, active": (models.Sometimes, unevenly_by_the_active, {}),
    "checkpoints": (models.Sometimes, twice_through, {"static_graph": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_training_ends_where_it_does_over_gloo(over, case):
    make, loop, options = CASES[case]
    assert_as_gloo(over, make, loop, **options)


def hooks():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    def own(state, bucket):
        """Waits inside, and chains two operations."""
        dist = torch.distributed
        dist.all_reduce(bucket.buffer(), async_op=True).get_future().wait()
        again = dist.all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True).get_future()
        averaged = again.then(lambda f: f.value()[0] / (2 * dist.get_world_size()))
        return averaged.then(lambda f: f.value() * 2)

    around_allreduce = default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)

    def bf16(state, bucket):
        return default_hooks.bf16_compress_hook(state, bucket)

    def bf16_around(state, bucket):
        return around_allreduce(state, bucket)

    return {
        "allreduce": (None, default_hooks.allreduce_hook),
        "fp16": (None, default_hooks.fp16_compress_hook),
        # DistributedDataParallel knows these two by name, and refuses them without a GPU.
        "bf16": (None, bf16),
        "bf16 around allreduce": (None, bf16_around),
        "power": (power.PowerSGDState(None, 2, start_powerSGD_iter=2), power.powerSGD_hook),
        "own": (None, own),
    }


def losses_of(net, n_steps, x, y):
    opt = torch.optim.SGD(net.parameters(), 0.05)
    losses = []
    for _ in range(n_steps):
        opt.zero_grad()
        loss = models.loss_of(net, x, y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


# Beside one process and not gloo, whose threads call hooks of Python and may then wait for their group's end for ever.
@pytest.mark.parametrize("name", ["allreduce", "fp16", "bf16", "bf16 around allreduce", "power", "own"])
def test_hooks_that_send_gradients_in_other_ways(over, name):
    with over("samestep") as dist:
        net = DistributedDataParallel(
            models.seeded(models.Sometimes, torch.float32),
            gradient_as_bucket_view=name != "power",
            **SMALL_BUCKETS,
        )
        net.register_comm_hook(*hooks()[name])
        mean = torch.tensor(
            losses_of(net, 4, *models.batch(dist.get_rank(), dist.get_world_size(), torch.float32))
        )
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, [p.detach().numpy().tobytes() for p in net.parameters()])
        assert all(other == gathered[0] for other in gathered)
        if name == "power":  # an approximation from its second step on
            assert mean[-1] < mean[0]
            return
        whole = losses_of(
            models.seeded(models.Sometimes, torch.float32), 4, *models.batch(0, 1, torch.float32)
        )
        torch.testing.assert_close(mean, torch.tensor(whole), rtol=1e-2 if "16" in name else 1e-5, atol=0)


def test_a_builtin_hook_of_cpp(over):
    with over("samestep") as dist:
        net = DistributedDataParallel(models.seeded(models.Sometimes, torch.float32), **SMALL_BUCKETS)
        net._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        x = torch.full((2, 6), float(dist.get_rank()))
        net(x).sum().backward()
        whole = models.seeded(models.Sometimes, torch.float32)
        for rank in range(dist.get_world_size()):
            (whole(torch.full((2, 6), float(rank))).sum() / dist.get_world_size()).backward()
        for mine, all_of in zip(net.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, all_of.grad)


def test_a_language_model_learns_the_same(over):
    losses = []
    for backend in ("samestep", "gloo"):
        with over(backend) as dist:
            net = DistributedDataParallel(models.seeded(models.Language), **SMALL_BUCKETS)
            words = models.sentences(dist.get_rank(), dist.get_world_size())
            opt = torch.optim.AdamW(net.parameters(), 0.03)
            for _ in range(20):
                opt.zero_grad()
                logits = net(words[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
                loss.backward()
                opt.step()
            total = loss.detach().clone()
            dist.all_reduce(total)  # not AVG, which the gloo of torch 2.4 lacks
            losses.append(total.item() / 2)
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert losses[0] < 2.0  # guessing costs ln(17) = 2.83


def test_a_hook_that_lets_the_reducer_send(over):
    with over("samestep") as dist:
        net = DistributedDataParallel(models.seeded(models.Sometimes))

        def hook(state, bucket):
            net.reducer._run_allreduce_hook(bucket).wait()  # a future of C++: it takes a second
            done = torch.futures.Future()
            done.set_result(bucket.buffer() / dist.get_world_size())
            return done

        net.register_comm_hook(None, hook)
        ours = losses_of(net, 2, *models.batch(dist.get_rank(), dist.get_world_size()))
        mean = torch.tensor(ours)
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        whole = losses_of(models.seeded(models.Sometimes), 2, *models.batch(0, 1))
        torch.testing.assert_close(mean, torch.tensor(whole), rtol=1e-5, atol=0)


def test_an_error_in_a_callback_of_a_future_is_raised_by_backward(over):
    def hook(state, bucket):
        return torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: 1 / 0)

    with over("samestep"):
        net = DistributedDataParallel(models.seeded(models.Sometimes))
        net.register_comm_hook(None, hook)
        with pytest.raises(ZeroDivisionError):
            net(torch.ones(2, 6, dtype=torch.float64)).sum().backward()


def test_a_compiled_model(over):
    losses = []
    for compiled in (False, True):
        with over("samestep") as dist:
            net = DistributedDataParallel(models.seeded(models.Sometimes))  # it refuses buckets below 1 MiB
            torch._dynamo.reset()
            run = torch.compile(net, backend="aot_eager") if compiled else net
            x, y = models.batch(dist.get_rank(), dist.get_world_size())
            opt = torch.optim.SGD(net.parameters(), 0.05)
            for _ in range(3):
                opt.zero_grad()
                loss = models.loss_of(run, x, y)
                loss.backward()
                opt.step()
            losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_verify_names_the_parameter_that_has_drifted(over, monkeypatch):
    monkeypatch.setenv("SAMESTEP_VERIFY", "2")
    with over("samestep") as dist:
        net = DistributedDataParallel(models.seeded(models.mlp))
        plainly(dist, net)
        if dist.get_rank() == 1:
            with torch.no_grad():
                next(net.module.parameters())[0] += 1
        with pytest.raises(
            ValueError, match=r"differs between ranks 0-1 before step 4 of .*; equal before step 2"
        ):
            plainly(dist, net)


def test_backward_passes_of_several_threads(over):
    """Each thread trains its own model in its own group, and its gradients are its ranks' means after every pass."""

    def train(dist, part, seed):
        torch.manual_seed(seed)
        net = DistributedDataParallel(
            torch.nn.Linear(300, 200, bias=False), process_group=part, **SMALL_BUCKETS
        )
        for step in range(20):
            net.zero_grad()
            inputs = [
                torch.full((1, 300), float(100 * seed + step + r)) for r in range(dist.get_world_size())
            ]
            net(inputs[dist.get_rank()]).sum().backward()
            expected = sum(inputs) / len(inputs)
            assert torch.equal(net.module.weight.grad, expected.expand(200, 300))

    with over("samestep") as dist:
        parts = [dist.new_group() for _ in range(3)]
        run_at_once([functools.partial(train, dist, part, seed) for seed, part in enumerate(parts)])


class Passing(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def nested(depth, act):
    return nested(depth - 1, act) if depth else act()


@pytest.mark.parametrize("depth", [0, 50])
def test_works_that_only_cpp_holds_answer_whatever_the_stack_is(over, depth):
    """DistributedDataParallel.join gives the reducer a Work that tells by how many ranks to divide."""

    def train():
        with Passing():
            return trained(dist, models.Sometimes, unevenly_by_the_active)[0]

    with over("samestep") as dist:
        expected = trained(dist, models.Sometimes, unevenly_by_the_active)[0]
        for a, b in zip(expected, nested(depth, train), strict=True):
            assert torch.equal(a, b)


@since(2, 5, "registry of works")
@pytest.mark.parametrize("n", [1, 100_000])
def test_cpp_waits_for_a_work_that_python_has_dropped(over, n):
    from torch._C import _distributed_c10d as c10d

    with over("samestep") as dist:
        x = torch.full((n,), float(dist.get_rank() + 1))
        c10d._register_work(x, dist.all_reduce(x, async_op=True))
        gc.collect()
        for _ in range(5):
            dist.all_reduce(torch.ones(3), async_op=True).wait()
        torch.ops._c10d_functional.wait_tensor(x)
        assert torch.equal(x, torch.full((n,), 3.0))
        assert c10d._get_work_registry_size() == 0


def test_results_that_nobody_asks_for_are_freed(over):
    with over("samestep") as dist:
        for _ in range(3):
            x = torch.ones(100_000)
            dist.all_reduce(x, async_op=True)
        kept = weakref.ref(x)
        del x
        dist.barrier()
        dist.all_reduce(torch.ones(1), async_op=True).wait()
        assert kept() is None
