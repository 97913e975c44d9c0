"""`jax.distributed.initialize()` without arguments, for processes that `samestep run` or torchrun started."""

from __future__ import annotations

import socket

from jax._src import clusters

from samestep._util import launchers
from samestep.rendezvous.rendezvous import open_rendezvous


class SamestepCluster(clusters.ClusterEnv):
    """What JAX asks about the job: the launcher's variables, and a port that rank 0 chooses."""

    name = "samestep"

    @classmethod
    def is_env_present(cls) -> bool:
        """Whether a launcher that tells where ranks meet has started this process."""
        return bool(launchers.launcher().name) and "MASTER_PORT" in launchers.own_variables()

    @classmethod
    def get_coordinator_address(cls, timeout_secs: int | None, override_coordinator_port: str | None) -> str:
        """Where process 0 listens. Collective."""
        host = launchers.own_variables().get("MASTER_ADDR", "127.0.0.1")
        if override_coordinator_port:
            return f"{host}:{override_coordinator_port}"
        rendezvous = open_rendezvous("env://", timeout=float(timeout_secs or 300))
        try:
            port = _free_port() if rendezvous.rank == 0 else 0
            return f"{host}:{rendezvous.allgather_json([port], [int])[0][0]}"
        finally:
            rendezvous.close()

    @classmethod
    def get_process_count(cls) -> int:
        """The number of ranks."""
        return launchers.launcher().size

    @classmethod
    def get_process_id(cls) -> int:
        """This rank."""
        return launchers.launcher().rank


def _free_port() -> int:
    """A port that was free just now: JAX takes a number, not a socket."""
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])
