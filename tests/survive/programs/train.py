"""Small trainings whose ranks are lost where the test says so. Rank 0 prints the hash of the result."""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import samestep as ss
from samestep import _settings, trees

N_ITEMS, N_FEATURES, EPOCHS = 200, 6, 2
UID = os.environ.get("SAMESTEP_UID", "")
if "SURVIVE_HOSTS" in os.environ:  # as many as that, on one machine
    os.environ["SAMESTEP_HOST_ID"] = str(int(UID.partition(".")[0]) % int(os.environ["SURVIVE_HOSTS"]))


def data():
    draw = np.random.RandomState(3)
    x = draw.standard_normal((N_ITEMS, N_FEATURES))
    return x, x @ draw.standard_normal(N_FEATURES)


class Deaths:
    """Ends this process at the places that the test names, as "1.0@4:mean": life 0 of rank 1, in step 4, at "mean"."""

    def __init__(self, planned):
        self.mine = {at for uid, _, at in (place.partition("@") for place in planned) if uid == UID}

    def at(self, step, where):
        if f"{step}:{where}" in self.mine:
            os.kill(os.getpid(), signal.SIGSTOP if where.endswith("stop") else signal.SIGKILL)


def report(state, *arrays):
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()
    backend = ss.get_distributed_backend()
    if backend.rank == 0 or "SURVIVE_ALL" in os.environ:
        print("result", digest, state.step, backend.size, flush=True)


def sampler_and_total(backend, shards, batch_size=24):
    sampler = ss.DistributedSampler(backend, N_ITEMS, batch_size=batch_size, shards=shards, seed=1)
    return sampler, ss.Accumulator(backend, shards=shards)


def numpy(planned=(), shards=8, timeout=20.0, pause=0.0):
    """New arrays in each step."""
    deaths, (x, y) = Deaths(planned), data()
    deaths.at(0, "import")
    backend = ss.initialize(timeout=timeout)
    deaths.at(0, "initialize")
    sampler, total = sampler_and_total(backend, shards)
    state = ss.TrainState(backend, params={"w": np.zeros(N_FEATURES), "b": 0.0}, sampler=sampler)
    state.on_change(lambda _: deaths.at(state.step + 1, "change"))
    for step in state.steps(epochs=EPOCHS):
        with step:
            deaths.at(state.step + 1, "begin")
            deaths.at(state.step + 1, "stop")
            for shard in step:
                error = x[shard.items] @ state.params["w"] + state.params["b"] - y[shard.items]
                n = max(1, len(shard))
                grads = {"w": x[shard.items].T @ error / n, "b": float(error.sum() / n)}
                total.add(grads, shard=shard.index, weight=len(shard))
                time.sleep(pause)
            deaths.at(state.step + 1, "added")
            mean = total.mean()
            deaths.at(state.step + 1, "mean")
            state.params = {name: state.params[name] - 0.1 * mean[name] for name in mean}
            deaths.at(state.step + 1, "updated")
    report(state, state.params["w"], np.array(state.params["b"]))


def grows(folder, n_at_end=1, waits=False, fails=False):
    """Rank 0 waits in step 4 for those that are to join, and in step 11 for the test; they know by files."""
    (x, y), folder = data(), Path(folder)
    _settings.VERSION = os.environ.get("OTHER_VERSION", _settings.VERSION)
    backend = ss.initialize(timeout=60.0)
    sampler, total = sampler_and_total(backend, 8)
    (folder / f"rank {UID}").write_text(str(os.getpid()))
    state = ss.TrainState(backend, w=np.zeros(N_FEATURES), sampler=sampler, save=folder / "state.npz")
    if state.step:
        print(f"rank {UID[0]} has gone on from step {state.step}", flush=True)
    for step in state.steps(epochs=EPOCHS):
        with step:
            if backend.rank == 0 and state.step == 3:
                await_that(lambda: len(list(folder.glob("rank *"))) >= n_at_end)
            if waits and backend.rank == 0 and state.step == 10:
                (folder / f"grown to {backend.size}").touch()
                await_that((folder / "go").exists)
            if fails and state.step == 10:
                raise ValueError("on purpose")
            for shard in step:
                error = x[shard.items] @ state.w - y[shard.items]
                total.add(x[shard.items].T @ error / max(1, len(shard)), shard=shard.index, weight=len(shard))
            time.sleep(0.3 if 3 < state.step < 10 and backend.size < n_at_end else 0.0)
            state.w = state.w - 0.1 * total.mean()
    report(state, state.w)


def await_that(condition):
    while not condition():
        time.sleep(0.01)


def without_state(folder):
    """Nobody can be given the state of such a program."""
    backend = ss.initialize(timeout=60.0)
    (Path(folder) / f"rank {UID}").touch()
    if backend.rank == 0:
        await_that((Path(folder) / "go").exists)
    backend.barrier()
    report_of_none = backend.allgather_object(UID)
    if backend.rank == 0:
        print("result", *report_of_none, flush=True)


def in_place(planned=(), undo=False, metric_after=False):
    """The parameters are changed in place; a metric may follow, which can find a rank lost."""
    deaths, (x, y) = Deaths(planned), data()
    backend = ss.initialize(timeout=20.0)
    sampler, total = sampler_and_total(backend, 5)
    w = np.zeros(N_FEATURES)
    state = ss.TrainState(backend, w=w, sampler=sampler, undo=undo)
    for step in state.steps(epochs=EPOCHS):
        with step:
            for shard in step:
                error = x[shard.items] @ w - y[shard.items]
                total.add(x[shard.items].T @ error / max(1, len(shard)), shard=shard.index, weight=len(shard))
            w -= 0.1 * total.mean()
            deaths.at(state.step + 1, "updated")
            if metric_after:
                backend.allreduce(1.0)
    assert state.w is w
    report(state, w)


def torch(planned=(), shards=8):
    """AdamW, whose state a newcomer does not have at first."""
    import torch

    deaths, (x, y) = Deaths(planned), data()
    x, y = torch.from_numpy(x).float(), torch.from_numpy(y).float()
    torch.manual_seed(int(UID.partition(".")[0] or 0))  # different everywhere: rank 0's holds
    torch.set_num_threads(1)
    backend = ss.initialize(timeout=20.0)
    sampler, total = sampler_and_total(backend, shards)
    model = torch.nn.Sequential(torch.nn.Linear(N_FEATURES, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.fill_(0.1 * (i + 1) + 0.01 * int(UID.partition(".")[0] or 0))
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    state = ss.TrainState(backend, model=model, opt=opt, sampler=sampler)
    for step in state.steps(epochs=EPOCHS):
        with step:
            for shard in step:
                model.zero_grad()
                if len(shard):
                    torch.nn.functional.mse_loss(model(x[shard.items])[:, 0], y[shard.items]).backward()
                grads = [p.grad for p in model.parameters()]
                total.add(grads, shard=shard.index, weight=len(shard))
            deaths.at(state.step + 1, "added")
            for p, grad in zip(model.parameters(), total.mean(), strict=True):
                p.grad = grad
            opt.step()
            deaths.at(state.step + 1, "updated")
    report(state, *(p.detach().numpy() for p in model.parameters()))


def jax(planned=(), shards=8):
    import jax
    import jax.numpy as jnp
    import optax

    deaths, (x, y) = Deaths(planned), data()
    backend = ss.initialize(timeout=20.0)
    sampler, total = sampler_and_total(backend, shards)
    opt = optax.adam(0.05)
    params = {"w": jnp.zeros(N_FEATURES), "b": jnp.zeros(())}
    gradients = jax.jit(jax.grad(lambda p, x, y: jnp.mean((x @ p["w"] + p["b"] - y) ** 2)))
    state = ss.TrainState(backend, params=params, opt_state=opt.init(params), sampler=sampler)
    for step in state.steps(epochs=EPOCHS):
        with step:
            for shard in step:
                items = shard.items
                grads = gradients(state.params, x[items], y[items]) if len(shard) else None
                total.add(grads, shard=shard.index, weight=len(shard))
            deaths.at(state.step + 1, "added")
            updates, state.opt_state = opt.update(total.mean(), state.opt_state, state.params)
            state.params = optax.apply_updates(state.params, updates)
            deaths.at(state.step + 1, "updated")
    report(state, *map(np.asarray, (state.params["w"], state.params["b"])))


class Momentum:
    """An optimizer of NumPy arrays, with a state of two arrays for each parameter and a count."""

    def init(self, params):
        zeros = [np.zeros_like(p) for p in params]
        return {"m": zeros, "v": [z.copy() for z in zeros], "count": 0}

    def update(self, grads, state, params=None):
        m = [0.9 * m + g for m, g in zip(state["m"], grads, strict=True)]
        v = [0.5 * v + g * g for v, g in zip(state["v"], grads, strict=True)]
        updates = [-0.05 * m / (np.sqrt(v) + 1.0) for m, v in zip(m, v, strict=True)]
        return updates, {"m": m, "v": v, "count": state["count"] + 1}


def divided(planned=(), library="numpy", save=None, stop_at=None, folder=None):
    """Ranks divide the optimizer's state; with `folder` rank 0 waits for a rank that is started again."""
    deaths, (x, y) = Deaths(planned), data()
    backend = ss.initialize(timeout=20.0)
    n_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    sampler, total = sampler_and_total(backend, 8)
    params, inner = (
        [np.zeros((40, N_FEATURES)), np.zeros(3)],
        Momentum(),
    )  # divided at other places by each number
    if library == "jax":
        import jax.numpy as jnp
        import optax

        params, inner = [*map(jnp.asarray, params)], optax.adam(0.05)
    opt = ss.ShardedOptimizer(backend, inner, op=None, copies=2)
    made = opt.init(params)
    deaths.at(0, "made")
    if folder and UID[-1] != "0":
        (Path(folder) / "back").touch()
    undo = library == "numpy"
    state = ss.TrainState(backend, params=params, opt_state=made, sampler=sampler, undo=undo, save=save)
    state.on_change(lambda _: deaths.at(state.step + 1, "change"))
    watch_copies(state, deaths)
    for step in state.steps(epochs=EPOCHS):
        with step:
            deaths.at(state.step + 1, "begin")
            wait_for_newcomers(state, backend, folder, n_ranks)
            if stop_at == state.step + 1 and backend.rank == backend.size - 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            for shard in step:
                weights, bias = map(np.asarray, state.params)
                error = x[shard.items] @ weights.sum(0) + bias.sum() - y[shard.items]
                n = max(1, len(shard))
                grads = [
                    np.outer(np.arange(40.0), x[shard.items].T @ error / n) / 40,
                    np.arange(3) * error.sum() / n,
                ]
                total.add(grads, shard=shard.index, weight=len(shard))
            mean = total.mean()
            deaths.at(state.step + 1, "mean")
            updates, state.opt_state = opt.update(mean, state.opt_state, state.params)
            state.params = [p + u for p, u in zip(state.params, updates, strict=True)]
            deaths.at(state.step + 1, "updated")
    whole = state.state_dict()["parts"]["opt_state"]
    report(state, *map(np.asarray, state.params), *map(np.asarray, trees.flatten(whole).leaves))


def divided_by_torch(planned=(), save=None, stop_at=None, folder=None):
    """As `divided`, by the object of torch: one parameter has no state before step 4, one is frozen."""
    import torch

    deaths, (x, y) = Deaths(planned), data()
    x, y = torch.from_numpy(x).float(), torch.from_numpy(y).float()
    torch.set_num_threads(1)
    backend = ss.initialize(timeout=20.0)
    n_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    sampler, _ = sampler_and_total(backend, 8)
    model = torch.nn.ParameterList(
        [torch.zeros(40, N_FEATURES), torch.zeros(3), torch.zeros(70), torch.ones(5)]
    )
    weights, bias, late, frozen = model
    frozen.requires_grad_(False)
    inner = torch.optim.AdamW(model.parameters(), lr=0.05, amsgrad=True)
    opt = ss.ShardedOptimizer(backend, inner, shards=8, copies=2)
    deaths.at(0, "made")
    if folder and UID[-1] != "0":
        (Path(folder) / "back").touch()
    state = ss.TrainState(backend, model=model, opt=opt, sampler=sampler, undo=True, save=save)
    state.on_change(lambda _: deaths.at(state.step + 1, "change"))
    watch_copies(state, deaths)
    for step in state.steps(epochs=EPOCHS):
        with step:
            deaths.at(state.step + 1, "begin")
            wait_for_newcomers(state, backend, folder, n_ranks)
            if stop_at == state.step + 1 and backend.rank == backend.size - 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            for group in opt.param_groups:
                group["lr"] = 0.05 / (1 + state.step)
            for shard in step:
                with opt.shard(shard.index, weight=len(shard)):
                    if len(shard):
                        found = x[shard.items] @ weights.sum(0) + bias.sum()
                        if state.step >= 3:
                            found = found + late.sum()
                        torch.nn.functional.mse_loss(found, y[shard.items]).backward()
            opt.average()
            deaths.at(state.step + 1, "mean")
            opt.step()
            deaths.at(state.step + 1, "updated")
    whole = trees.flatten(state.state_dict()["parts"]["opt"]["state"]).leaves
    report(state, *(p.detach().numpy() for p in model), *map(np.asarray, whole))


def thaws(planned=()):
    """A parameter of a torch optimizer, in the ranks' order without shards, is trained from step 6 on."""
    import torch

    deaths = Deaths(planned)
    torch.set_num_threads(1)
    backend = ss.initialize(timeout=20.0)
    model = torch.nn.ParameterList([torch.zeros(40, 6), torch.ones(130)])
    first, late = model
    late.requires_grad_(False)
    opt = ss.ShardedOptimizer(backend, torch.optim.AdamW(model.parameters(), lr=0.05), copies=2)
    state = ss.TrainState(backend, model=model, opt=opt, undo=True)

    def gradient(of, step, factor):  # equal on all ranks, and their mean is exact
        wave = torch.arange(float(of.numel())).view(of.shape) - of.detach() * factor
        return torch.round(wave % step * 64) / 64

    for step in state.steps(steps=12):
        with step:
            late.requires_grad_(state.step >= 5)
            first.grad = gradient(first, 7, 37)
            late.grad = gradient(late, 5, 11) if state.step >= 5 else None
            deaths.at(state.step + 1, "mean")
            opt.step()
            deaths.at(state.step + 1, "updated")
    whole = trees.flatten(state.state_dict()["parts"]["opt"]["state"]).leaves
    report(state, *(p.detach().numpy() for p in model), *map(np.asarray, whole))


def two_divided(planned=()):
    """Two torch optimizers, as of a GAN; ranks die also between the exchanges of their states after a loss."""
    import torch

    deaths = Deaths(planned)
    torch.set_num_threads(1)
    backend = ss.initialize(timeout=20.0)
    model = torch.nn.ParameterList([torch.zeros(40, 6), torch.zeros(40, 6)])
    opts = [ss.ShardedOptimizer(backend, torch.optim.AdamW([p], lr=0.05), copies=2) for p in model]
    state = ss.TrainState(backend, model=model, first=opts[0], second=opts[1], undo=True)
    of_second = state._copies._of["second"]
    usual = of_second.divided_anew

    def divided_anew(*args):
        deaths.at(state.step + 1, "between")
        return usual(*args)

    of_second.divided_anew = divided_anew
    for step in state.steps(steps=8):
        with step:
            for k, p in enumerate(model):  # equal on all ranks, and their mean is exact
                wave = torch.arange(float(p.numel())).view(p.shape) - p.detach() * (37 + k)
                p.grad = torch.round(wave % 7 * 64) / 64
            deaths.at(state.step + 1, "mean")
            for opt in opts:
                opt.step()
    whole = [trees.flatten(state.state_dict()["parts"][name]["state"]).leaves for name in ("first", "second")]
    report(state, *(p.detach().numpy() for p in model), *map(np.asarray, [*whole[0], *whole[1]]))


def watch_copies(state, deaths):
    """Die, or seem to be interrupted, where the copies of step k are passed on."""
    renew = state._copies.renew

    def renewed(parts):
        renew(parts)
        deaths.at(state.step + 1, "copied")
        if (once := f"{state.step + 1}:interrupted") in deaths.mine:
            deaths.mine.remove(once)
            raise ss.PeerLostError("as if this rank had not come that far")

    state._copies.renew = renewed


def wait_for_newcomers(state, backend, folder, n_ranks):
    if folder and backend.rank == 0 and state.step == 7:
        await_that((Path(folder) / "back").exists)
    time.sleep(0.3 if folder and state.step > 7 and backend.size < n_ranks else 0.0)


def shrunk(*gone):
    """A state that was divided among other ranks, in a loop of the program's own."""
    import torch

    backend = ss.initialize(timeout=20.0)
    opt, params = ss.ShardedOptimizer(backend, Momentum()), [np.zeros(3)]  # all in the part of rank 0
    made = opt.init(params)
    weight = torch.zeros(3, requires_grad=True)
    weight.grad = torch.ones(3)
    sgd = ss.ShardedOptimizer(backend, torch.optim.SGD([weight], lr=0.1))
    if UID in gone:
        os.kill(os.getpid(), signal.SIGKILL)
    while backend.size > 3 - len(gone):
        try:
            backend.barrier()
        except ss.PeerLostError:
            backend.shrink()
    for call in (lambda: opt.update([np.ones(3)], made, params), sgd.step):
        try:
            call()
        except ss.InvalidArgumentError as error:
            print("refused:", error, flush=True)
    updates, made = opt.update([np.ones(3)], opt.init(params), params)
    print("updates", *updates, flush=True)


def refused():
    backend, params = ss.initialize(), [np.zeros(300)]
    made = {n: ss.ShardedOptimizer(backend, Momentum(), copies=n).init(params) for n in (1, 2)}
    for call in (
        lambda: ss.ShardedOptimizer(backend, Momentum(), copies=3),
        lambda: ss.TrainState(backend, state=made[2]),
        lambda: ss.TrainState(backend, state=made[1]),
        lambda: ss.TrainState(backend, state=(params, made[2]), undo=True),
    ):
        try:
            call()
        except ss.InvalidArgumentError as error:
            print(error, flush=True)
    opt = ss.ShardedOptimizer(backend, Momentum(), op=None, copies=2)
    _, updated = opt.update(params, opt.init(params), params)
    ss.TrainState(backend, state=updated, undo=True)
    print("kept after an update", flush=True)


def compiled(planned=(), verb="allreduce", folder=None, how=()):
    """A program of JAX with a collective inside; with `folder` rank 0 waits for a rank that is started again.

    `how`: words of "donates", "undo", and "then jax" or "then numpy": a collective follows the update.
    """
    import jax
    import jax.numpy as jnp

    deaths, x = Deaths(planned), np.arange(N_ITEMS * 3.0, dtype=np.float32).reshape(-1, 3) % 7
    backend = ss.initialize(timeout=60.0 if folder else 20.0)
    sampler, _ = sampler_and_total(backend, 8)
    totals = {
        "allreduce": backend.allreduce,
        "allgather": lambda mine: backend.allgather(mine).sum(0),
        "tree": lambda mine: backend.allreduce_tree({"mine": mine})["mine"],
        "gradient": lambda all_: jax.grad(lambda x: backend.allreduce(x * all_, "avg").sum())(jnp.ones(3)),
    }
    update = jax.jit(
        lambda w, mine: 0.5 * w + totals[verb](mine), donate_argnums=(0,) if "donates" in how else ()
    )
    update(jnp.zeros(3), jnp.ones(3))  # with the ranks of that time: a newcomer has none but itself
    if folder and UID[-1] != "0":
        (Path(folder) / "back").touch()
    w = np.zeros(3, np.float32) if "then numpy" in how else jnp.zeros(3)
    state = ss.TrainState(backend, w=w, sampler=sampler, undo="undo" in how)
    state.on_change(lambda world: print("ranks", world.size, flush=True))
    for step in state.steps(epochs=EPOCHS):
        with step:
            deaths.at(state.step + 1, "begin")
            if folder and backend.rank == 0 and state.step == 7:
                await_that((Path(folder) / "back").exists)
            time.sleep(0.3 if folder and state.step > 7 and backend.size < 3 else 0.0)
            mine = sum((x[shard.items].sum(0) for shard in step), start=np.zeros(3, np.float32))
            made = update(state.w, backend.allreduce(mine) if verb == "gradient" else mine)
            if "then numpy" in how:
                state.w[...] = made
            else:
                state.w = made
            deaths.at(state.step + 1, "updated")
            if any("then" in word for word in how):
                backend.allreduce(1.0)
    report(state, np.asarray(state.w))


def shrink(planned=()):
    """A loop of the program's own."""
    deaths = Deaths(planned)
    backend = ss.initialize(timeout=20.0)
    seen, step = [], 0
    pair = backend.split(backend.rank % 2)
    while step < 6:
        deaths.at(step, "begin")
        try:
            total = backend.allreduce(float(int(UID.partition(".")[0]) + 1))
        except ss.PeerLostError:
            backend.shrink()
            continue
        seen.append(total)
        step += 1
    try:
        pair.allreduce(1.0)
    except ss.NotInitializedError:
        seen.append("closed")
    if backend.rank == 0:
        print("result", json.dumps(seen), backend.size, flush=True)


def raises(planned=()):
    """An exception of the program is none of a lost rank."""
    backend = ss.initialize(timeout=20.0)
    state = ss.TrainState(backend, w=np.zeros(2))
    for step in state.steps(steps=4):
        with step:
            if state.step == 2 and backend.rank == backend.size - 1:
                raise ValueError("on purpose")
            backend.barrier()


def audited(rate, flips=(), shards=8):
    """`flips`: "2@7:once" or "2@7", a bit of what rank 2 computes in step 7, the first time or each time."""
    (x, y), n_audits, done = data(), 0, set()
    backend = ss.initialize(timeout=20.0)
    sampler, total = sampler_and_total(backend, shards)
    metrics = ss.Accumulator(backend)  # of which nothing is audited
    state = ss.TrainState(backend, w=np.zeros(N_FEATURES), sampler=sampler, audit=rate)
    for step in state.steps(epochs=EPOCHS):
        with step:
            for shard in step:
                error = x[shard.items] @ state.w - y[shard.items]
                grads = x[shard.items].T @ error / max(1, len(shard))
                place = f"{backend.rank}@{state.step + 1}"
                n_audits += shard.index not in total.indices
                if place in flips or (f"{place}:once" in flips and place not in done):
                    grads.view(np.uint64)[2] ^= np.uint64(1) << np.uint64(17)
                done.add(place) if shard is list(step)[-1] else None
                total.add(grads, shard=shard.index, weight=len(shard))
            state.w = state.w - 0.1 * total.mean()
            metrics.add(np.ones(1))
            metrics.mean()
    n_audits = backend.allreduce(n_audits, "sum")
    if backend.rank == 0:
        print("audits", n_audits)
    report(state, state.w)


def stops(path, at=None, planned=()):
    """Asked to stop in the middle, by a signal to one rank."""
    (x, y), deaths = data(), Deaths(planned)
    backend = ss.initialize(timeout=20.0)
    sampler, total = sampler_and_total(backend, 8)
    state = ss.TrainState(backend, w=np.zeros(N_FEATURES), sampler=sampler, save=path)
    for step in state.steps(epochs=EPOCHS):
        with step:
            deaths.at(state.step + 1, "begin")
            if at == state.step + 1 and backend.rank == backend.size - 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            for shard in step:
                error = x[shard.items] @ state.w - y[shard.items]
                total.add(x[shard.items].T @ error / max(1, len(shard)), shard=shard.index, weight=len(shard))
            state.w = state.w - 0.1 * total.mean()
    report(state, state.w)


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))
