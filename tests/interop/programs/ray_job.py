"""What `samestep.ray` does on a Ray of four CPUs on this machine; the words name the cases to run. Prints JSON."""

import json
import logging
import os
import signal
import sys
import tempfile

import numpy as np
import ray
import ray.train
import samestep.ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util import collective


@ray.remote(num_cpus=1, max_restarts=0)
class Actor:
    def __init__(self, rank, size, group):
        samestep.ray.register_collective_backend()
        collective.init_collective_group(size, rank, "samestep", group)
        self.rank, self.size, self.group = rank, size, group

    def verbs(self, make):
        """What each verb leaves, on arrays that `make` makes."""
        arrays = {"torch": torch.from_numpy, "numpy": np.array}[make]
        found = {}
        x = arrays(np.arange(5.0) + self.rank)
        collective.allreduce(x, self.group)
        found["allreduce"] = x.tolist()
        x = arrays(np.arange(5) + self.rank)
        collective.allreduce(x, self.group, collective.types.ReduceOp.MAX)
        found["maximum"] = x.tolist()
        x = arrays(np.full((), float(self.rank)))
        collective.broadcast(x, 2, self.group)
        found["broadcast"] = x.tolist()
        x = arrays(np.full(2, 1 << self.rank))
        collective.reduce(x, 1, self.group)
        found["reduce"] = x.tolist()
        blocks = [arrays(np.zeros(2, np.int32)) for _ in range(self.size)]
        collective.allgather(blocks, arrays(np.full(2, self.rank, np.int32)), self.group)
        found["allgather"] = [block.tolist() for block in blocks]
        x = arrays(np.zeros(1))
        collective.reducescatter(x, [arrays(np.full(1, 10.0 * to)) for to in range(self.size)], self.group)
        found["reducescatter"] = x.tolist()
        x = arrays(np.full(3, self.rank))
        if self.rank == 0:
            collective.send(x, 2, self.group)
        if self.rank == 2:
            collective.recv(x, 0, self.group)
        found["message"] = x.tolist()
        collective.barrier(self.group)
        return found

    def in_a_second_group(self, rank, size, group):
        collective.init_collective_group(size, rank, "samestep", group)
        x = np.full(9, float(self.rank))
        collective.allreduce(x, group)
        collective.destroy_collective_group(group)
        collective.allreduce(x, self.group)
        return x[8]

    def read_only(self, x):
        try:
            collective.allreduce(x, self.group)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def after(self, die):
        if self.rank == die:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            collective.allreduce(np.zeros(9), self.group)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None


def actors(group, size=3):
    return [Actor.remote(rank, size, group) for rank in range(size)]


def verbs(make):
    return ray.get([actor.verbs.remote(make) for actor in actors(f"verbs of {make}")])


def two_groups():
    three = actors("three")
    return ray.get(
        [actor.in_a_second_group.remote(number, 2, "two") for number, actor in enumerate(three[1:])]
        + [three[0].after.remote(-1)]
    )[:2]


def read_only():
    return ray.get(actors("one", 1)[0].read_only.remote(np.zeros(1000)))


def killed():
    three = actors("killed")
    futures = [actor.after.remote(1) for actor in three]
    errors = []
    for future in futures:
        try:
            errors.append(ray.get(future))
        except ray.exceptions.ActorDiedError:
            errors.append("died")
    return errors


# Ray Train keeps what workers report only together with a checkpoint, so rank 0 writes it to a file.


def tell(where, rank, facts):
    if rank == 0:
        with open(os.path.join(where, "found.json"), "w", encoding="utf-8") as file:
            json.dump(facts, file)


def report_total(where):
    import samestep as ss

    backend = ss.initialize()
    total = float(backend.allreduce(np.full(9, backend.rank + 1.0))[8])
    tell(where, backend.rank, {"total": total, "size": backend.size})
    ray.train.report({"total": total})


def report_with_torch(where):
    import torch.distributed as dist

    x = torch.ones(9) * (dist.get_rank() + 1)
    dist.all_reduce(x)
    tell(where, dist.get_rank(), {"total": float(x[8]), "backend": dist.get_backend()})


def fail_once(where):
    import samestep as ss

    backend = ss.initialize()
    marker = os.path.join(where, "failed")
    if backend.rank == 1 and not os.path.exists(marker):
        open(marker, "w").close()
        raise ValueError("bad batch")
    tell(where, backend.rank, {"total": float(backend.allreduce(np.full(9, backend.rank + 1.0))[8])})


def fitted(trainer, function, **keywords):
    with tempfile.TemporaryDirectory() as folder:
        run = RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1))
        trainer(
            function,
            train_loop_config=folder,
            scaling_config=ScalingConfig(num_workers=3),
            run_config=run,
            **keywords,
        ).fit()
        with open(os.path.join(folder, "found.json"), encoding="utf-8") as file:
            return json.load(file)


def trained():
    return fitted(DataParallelTrainer, report_total, backend_config=samestep.ray.SamestepConfig())


def trained_with_torch():
    return fitted(TorchTrainer, report_with_torch, torch_config=TorchConfig(backend="samestep"))


def trained_after_a_failure():
    return fitted(DataParallelTrainer, fail_once, backend_config=samestep.ray.SamestepConfig())


CASES = {
    "numpy": lambda: verbs("numpy"),
    "torch": lambda: verbs("torch"),
    "two_groups": two_groups,
    "read_only": read_only,
    "killed": killed,
    "trained": trained,
    "trained_with_torch": trained_with_torch,
    "trained_after_a_failure": trained_after_a_failure,
}

if __name__ == "__main__":
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    samestep.ray.register_collective_backend()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        print(json.dumps({name: CASES[name]() for name in sys.argv[1:]}), flush=True)
    finally:
        ray.shutdown()
