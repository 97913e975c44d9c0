"""Ranks on the workers of a Dask cluster: `run(client, function)`."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from samestep.errors import Error
from samestep.launch import plan
from samestep.world.lifecycle import finalize

__all__ = ["run"]

_GRACE_S = 10.0  # for the other ranks to end after one has failed


def run(
    client: Any,
    function: Callable[..., Any],
    *arguments: Any,
    workers: Sequence[str] | None = None,
    **keywords: Any,
) -> list[Any]:
    """Calls a function on every worker of a Dask cluster, each as one rank of a job; returns their results by rank.

    The function starts with `samestep.initialize()`, as a script does, and returns something that can be pickled. Ranks
    are numbered host by host. The workers have to be processes, one for each rank: `LocalCluster(processes=True)`.

    Args:
      client: a `distributed.Client`.
      function: called with `arguments` and `keywords`. Its backend is finalized when it returns.
      workers: their addresses; None = all that the cluster has now.

    Raises:
      ValueError: the cluster has no such workers, or several ranks would share a process.
      Exception: of the first rank that failed by an error of its own. The others end by the errors that they get in
        consequence, and what still runs is cancelled. A worker that dies is a `PeerLostError` of the others that names
        its rank.

    Example:
      >>> def total():
      ...     import numpy as np, samestep as ss
      ...     return float(ss.initialize().allreduce(np.ones(1))[0])
      >>> from distributed import Client, LocalCluster  # doctest: +SKIP
      >>> samestep.dask.run(Client(LocalCluster(n_workers=2)), total)  # doctest: +SKIP
      [2.0, 2.0]
    """
    distributed: Any = importlib.import_module("distributed")  # without types

    addresses, hosts = _places(client, workers)
    host, port = client.run(_free_address, workers=addresses[:1])[addresses[0]]
    of_ranks = plan.of_new_job(hosts, launcher="samestep.dask", master_addr=host, master_port=port)
    job = secrets.token_hex(4)
    futures = [
        client.submit(
            *(_rank, function, arguments, keywords, variables),
            key=f"samestep-{job}-rank-{rank}",
            workers=[address],
            allow_other_workers=False,
            pure=False,
            retries=0,
        )
        for rank, (address, variables) in enumerate(zip(addresses, of_ranks, strict=True))
    ]
    try:
        if all(
            future.status == "finished" for future in distributed.as_completed(futures, raise_errors=False)
        ):
            return [future.result() for future in futures]
        with contextlib.suppress(TimeoutError):  # a rank that does not end after another one has failed
            distributed.wait(list(futures), timeout=_GRACE_S)
        errors = [future.exception() for future in futures if future.status == "error"]
        raise next((error for error in errors if not isinstance(error, Error)), errors[0])
    finally:
        client.cancel(list(futures), force=True)


def _places(client: Any, workers: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Address and host of each rank, host by host."""
    known = client.scheduler_info(n_workers=-1)["workers"]
    chosen = sorted(known if workers is None else workers)
    if not chosen or (unknown := [address for address in chosen if address not in known]):
        asked = ", ".join(unknown) if chosen else "any"
        raise ValueError(
            f"samestep.dask.run: the cluster has no worker {asked}; it has {', '.join(known) or 'none'}"
        )
    processes = client.run(_process, workers=chosen)
    if len(set(processes.values())) < len(chosen):
        raise ValueError(
            "samestep.dask.run: several workers share a process, and a rank needs one of its own: "
            "LocalCluster(processes=True), or one worker for each process"
        )
    hosts = [known[address]["host"] for address in chosen]
    in_order = sorted(range(len(chosen)), key=lambda i: hosts.index(hosts[i]))
    return [chosen[i] for i in in_order], [hosts[i] for i in in_order]


def _process() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


def _free_address(dask_worker: Any) -> tuple[str, int]:
    """Of this worker's host: its address in the cluster, and a port that was free just now."""
    host = dask_worker.address.rpartition("/")[2].rpartition(":")[0].strip("[]")
    with socket.create_server((host, 0)) as listener:
        return host, listener.getsockname()[1]


def _rank(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    variables: Mapping[str, str],
) -> Any:
    """Runs on a worker: the function as a rank of the job that the variables describe."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        found = function(*arguments, **keywords)
        finalize()
        return found
    except BaseException:
        # The others are not at their end, and the first error is the one to show.
        with contextlib.suppress(Error):
            finalize()
        raise
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
