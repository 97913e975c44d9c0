"""The processes of a launch: one interpreter, an `mpirun` of several, or several that meet without MPI."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from samestep import _settings
from samestep.launch import mpirun, network, plan
from samestep.testing.scheduling import Start

# MPICH's launcher signals the other ranks and ends when one dies; a shell between them hides the death.
SURVIVE = 'trap "" USR1; "$@"; true'


class Processes:
    """Starts the ranks; each connects to the socket `s` in `folder`.

    Args:
      start: how many ranks, and whether by `mpirun`.
      folder: of the socket and the logs.
      tolerant: ask the launcher to let the others live when a rank dies.

    Raises:
      mpirun.LaunchError: there is no `mpirun`, where one is needed.
    """

    def __init__(self, start: Start, folder: Path, *, tolerant: bool) -> None:
        self._port = network.reserve_port() if start.size > 1 and not start.mpi else None
        worker = [sys.executable, "-m", "samestep.testing.worker", str(folder / "s"), str(folder)]
        env = {"OMP_NUM_THREADS": "1", **os.environ}
        if start.mpi:
            commands = [_under_mpirun(start.size, worker, env, tolerant=tolerant)]
        elif self._port is None:
            commands = [(worker, env)]
        else:
            port = self._port.getsockname()[1]
            variables_of_ranks = plan.of_new_job(
                [""] * start.size, launcher="samestep run", master_addr="127.0.0.1", master_port=port
            )
            commands = [
                (
                    [*worker, str(rank)],
                    {**env, **variables, _settings.ERROR_FILE: str(folder / f"error_{rank}.json")},
                )
                for rank, variables in enumerate(variables_of_ranks)
            ]
        self._all: list[subprocess.Popen[bytes]] = []
        with (folder / "launcher.log").open("ab") as log:
            for argv, variables in commands:
                self._all.append(
                    subprocess.Popen(
                        argv,
                        env=variables,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )

    def first_code(self) -> int | None:
        """The exit code of a process that has ended, a failure if there is one; None while all run."""
        codes = [code for process in self._all if (code := process.poll()) is not None]
        return next((code for code in codes if code), codes[0] if codes else None)

    def wait(self, timeout: float) -> int:
        """Wait for all to end; returns the first exit code that is a failure, or 0.

        Raises:
          subprocess.TimeoutExpired: some have not ended within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in self._all]
        return next((code for code in codes if code), 0)

    def terminate(self, timeout: float) -> None:
        """Ask all to end, by SIGTERM, and wait for at most `timeout` seconds."""
        for process in self._all:
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout)

    def kill(self) -> None:
        """End what is left, by SIGKILL."""
        for process in self._all:
            process.kill()
        for process in self._all:
            process.wait()
        self.close()

    def close(self) -> None:
        """Give the port back."""
        if self._port is not None:
            self._port.close()


def _under_mpirun(
    size: int, argv: list[str], env: Mapping[str, str], *, tolerant: bool
) -> tuple[list[str], dict[str, str]]:
    hydra = mpirun.find()[1] == "hydra"
    if hydra and tolerant:
        argv = ["sh", "-c", SURVIVE, "sh", *argv]
    command, extra = mpirun.command(size, argv)
    if tolerant:
        command.insert(1, "-disable-auto-cleanup" if hydra else "--continuous")
    return command, {**env, **extra}
