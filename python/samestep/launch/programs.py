"""The programs that the launcher starts so that there is an agent for each rank."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from samestep import _settings
from samestep._util import launchers, start
from samestep.launch import mpirun, network
from samestep.launch.arguments import Options
from samestep.launch.bootstrap import BOOTSTRAP, FROM_STDIN
from samestep.launch.job import Program


def programs(options: Options, where: Mapping[str, Any]) -> list[Program]:
    """One `mpirun` that starts the agents; or the agents of this host, and one remote shell for each other host.

    Args:
      options: of the run.
      where: the launcher listens; for `BOOTSTRAP`.

    Raises:
      LaunchError: there is no `mpirun`, where one is needed.
    """
    agent = agent_command()
    env = launchers.outside_any_job(os.environ)
    if options.mpi:
        hosts = ",".join(f"{host.name}:{host.n_ranks}" for host in options.hosts) or None
        argv, extra = mpirun.command(
            options.n_ranks, agent, hosts=hosts, export=[BOOTSTRAP, *_for_agents(env)]
        )
        return [Program("mpirun", argv, env | extra | {BOOTSTRAP: json.dumps(where)})]
    where = {**where, "size": options.n_ranks}
    found: list[Program] = []
    first = 0
    for host, n_ranks in [(one.name, one.n_ranks) for one in options.hosts] or [("", options.n_ranks)]:
        ranks = range(first, first + n_ranks)
        first += n_ranks
        if not host or network.is_this_host(host):
            found += [
                Program(
                    f"agent of rank {rank}",
                    agent,
                    env | {BOOTSTRAP: json.dumps({**where, "ranks": [rank]})},
                    (rank,),
                    stdin=None if rank == 0 and not os.isatty(0) else b"",
                )
                for rank in ranks
            ]
        else:
            line = [*options.rsh, host, _for_shell(agent, env)]
            message = json.dumps({**where, "ranks": list(ranks)}).encode() + b"\n"
            found.append(Program(f"{options.rsh[0]} to {host}", line, env, tuple(ranks), stdin=message))
    return found


def agent_command() -> list[str]:
    """Of an agent on this host."""
    return [sys.executable, "-I", "-S", start.__file__, "launch.agent"]


def _for_agents(env: Mapping[str, str]) -> dict[str, str]:
    """The settings that an agent needs before its launcher has sent it any."""
    return {name: value for name, value in env.items() if name == _settings.HEARTBEAT}


def _for_shell(agent: list[str], env: Mapping[str, str]) -> str:
    """The command that starts all agents of a host: an sshd lets in only so many connections at a time.

    They read the address of the launcher from the shell, because everybody can read a command line.
    """
    variables = {
        name: env[name] for name in ("LD_LIBRARY_PATH",) if name in env
    }  # that Python may need to start
    variables |= _for_agents(env) | {BOOTSTRAP: FROM_STDIN}
    words = [f"{name}={value}" for name, value in variables.items()]
    return "exec env " + shlex.join([*words, *agent])
