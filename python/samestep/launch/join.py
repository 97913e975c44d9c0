"""`samestep run --join`: more ranks for a job that runs, each under an agent that obeys the launcher of the job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial

from samestep import _settings
from samestep._util import launchers
from samestep.launch import processes
from samestep.launch.arguments import Options
from samestep.launch.bootstrap import BOOTSTRAP
from samestep.launch.programs import agent_command

_GRACE_S = 5  # for the agents to tell the launcher that their ranks have ended


def join(options: Options, secret: str) -> int:
    """Start the agents, and return the exit code of the job once they have ended.

    The ranks run the command line of this launcher, here, whatever the other one runs. SIGINT, SIGTERM and SIGHUP end
    them, and not the job.

    Args:
      options: of this launcher, with `join`.
      secret: of the job.
    """
    assert options.join is not None
    host, port = options.join
    own = {"argv": options.rank_argv(sys.executable), "cwd": os.getcwd()}
    where = {"host": host, "addresses": [host], "port": port, "token": secret, "network": ""}
    # All ranks need the same of these, so those of the job hold.
    of_job = {name for group in ("native", "devices") for name in _settings.must_agree(group)}
    here = launchers.outside_any_job(os.environ) | options.env
    env = {name: text for name, text in here.items() if name not in of_job}
    env[BOOTSTRAP] = json.dumps({**where, "ranks": [-1], "size": 0, "own": own})
    agents: list[subprocess.Popen[bytes]] = []
    stopped: list[int] = []

    def end(signum: int, _: object) -> None:
        stopped.append(signum)
        processes.send_signal([agent.pid for agent in agents if agent.returncode is None], signal.SIGTERM)
        signal.alarm(_GRACE_S)

    def kill(*_: object) -> None:
        processes.send_signal([agent.pid for agent in agents if agent.returncode is None], signal.SIGKILL)

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup
            signal.signal(signum, end)
    signal.signal(signal.SIGALRM, kill)
    for number in range(options.n_ranks):
        agents.append(
            subprocess.Popen(
                agent_command(),
                env=env,
                stdin=subprocess.DEVNULL,
                stderr=None if number == 0 else subprocess.DEVNULL,  # one speaks for all
                start_new_session=True,
                preexec_fn=partial(processes.die_with_parent, os.getpid(), signal.SIGTERM),  # noqa: PLW1509
            )
        )
    codes = [agent.wait() for agent in agents]
    return 128 + stopped[0] if stopped else max(code if code >= 0 else 1 for code in codes)
