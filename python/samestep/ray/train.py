"""Ray Train for arrays of any library: the workers of a trainer are the ranks of a job."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from samestep.errors import Error
from samestep.launch import plan
from samestep.world.lifecycle import finalize


@dataclass
class SamestepConfig(BackendConfig):
    """Makes the workers of a `DataParallelTrainer` the ranks of a job, which `samestep.initialize()` joins.

    Each worker is a process with one rank, numbered as Ray numbers its workers. The job has a secret of its own, which
    travels through Ray. A worker that fails ends the others with an error that names its rank, and Ray restarts or
    fails the run as its `FailureConfig` says.

    Example:
      >>> def train():
      ...     import numpy as np, samestep as ss
      ...     backend = ss.initialize()
      ...     mean = backend.allreduce(np.full(3, backend.rank), "avg")
      >>> from ray.train import ScalingConfig  # doctest: +SKIP
      >>> from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # doctest: +SKIP
      >>> trainer = DataParallelTrainer(
      ...     train, backend_config=samestep.ray.SamestepConfig(), scaling_config=ScalingConfig(num_workers=4)
      ... )  # doctest: +SKIP
      >>> trainer.fit()  # doctest: +SKIP
    """

    @property
    def backend_cls(self) -> type[Backend]:
        """What Ray Train calls at the start and the end of a run."""
        return _SamestepBackend


class _SamestepBackend(Backend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        address, port = worker_group.execute_single(0, _free_address)
        of_ranks = plan.of_new_job(
            worker_group.execute(_host), launcher="samestep.ray", master_addr=address, master_port=port
        )
        ray.get(
            [
                worker_group.execute_single_async(rank, _set, variables)
                for rank, variables in enumerate(of_ranks)
            ]
        )

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # of a worker that has died
            worker_group.execute(_end)


def _host() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _free_address() -> tuple[str, int]:
    """Of this worker's node: its address in the cluster, and a port that was free just now."""
    host = ray.util.get_node_ip_address()
    with socket.create_server((host, 0)) as listener:
        return host, listener.getsockname()[1]


def _set(variables: Mapping[str, str]) -> None:
    os.environ.update(variables)


def _end() -> None:
    with contextlib.suppress(Error):  # the others may be at no common end, and Ray shows the first error
        finalize()
