"""What the launcher starts itself so that there is an agent for each rank."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from samestep.launch import mpirun
from samestep.launch.arguments import Options
from samestep.launch.bootstrap import BOOTSTRAP
from samestep.launch.job import Program


def programs(options: Options, where: Mapping[str, Any]) -> list[Program]:
    """One `mpirun` that starts the agents, or the agents.

    Args:
      options: of the run.
      where: the launcher listens; for `BOOTSTRAP`.

    Raises:
      LaunchError: there is no `mpirun`, where one is needed.
    """
    start = os.path.join(os.path.dirname(__file__), "start.py")
    agent = [sys.executable, "-I", "-S", start, "agent"]
    env = mpirun.outside_any_job(os.environ)
    if options.mpi:
        hosts = ",".join(f"{host.name}:{host.n_ranks}" for host in options.hosts) or None
        argv, extra = mpirun.command(options.n_ranks, agent, hosts=hosts, export=[BOOTSTRAP])
        return [Program("mpirun", argv, env | extra | {BOOTSTRAP: json.dumps(where)})]
    env.pop("SLURM_PROCID", None)  # a shell that srun has started is a task of its own; these ranks are not
    size = options.n_ranks
    return [
        Program(
            f"agent of rank {rank}",
            agent,
            env | {BOOTSTRAP: json.dumps({**where, "rank": rank, "size": size})},
            rank,
        )
        for rank in range(size)
    ]
