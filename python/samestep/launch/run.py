"""`samestep run`: from the command line to the exit code."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from samestep import _settings
from samestep._util import descriptors, launchers, silence
from samestep._util.unknown_settings import warn_unknown
from samestep.errors import InvalidArgumentError
from samestep.launch import processes, programs
from samestep.launch.arguments import RESTARTED, Options, parse
from samestep.launch.find_launcher import BOOTSTRAP
from samestep.launch.job_secret import job_secret
from samestep.launch.mpirun import LaunchError
from samestep.launch.network import loopback_is_up, may_leave_host
from samestep.launch.supervisor import Supervisor

_REFUSED = 2  # exit code


def main(argv: Sequence[str]) -> int:
    """Runs what follows `samestep run` on the command line; returns the exit code."""
    return start(lambda: parse(argv), "samestep run", argv)


def start(parsed: Callable[[], Options], command: str, argv: Sequence[str] = ()) -> int:
    """Runs what a command line asks for, `argv` again where its ranks are to be restarted; returns the exit code."""
    descriptors.open_closed()
    options = parsed()
    say = partial(print, f"{command}:", file=sys.stderr)
    if why := _what_is_missing() or _why_not(options):
        say(why)
        return _REFUSED
    env = {**os.environ, **options.env}
    # Once: the ranks, and a restarted launcher, do not repeat it.
    if unknown := warn_unknown(say, env):
        _settings.set_here(_settings.REPORTED, ",".join(unknown))
    _settings.set_here(_settings.HEARTBEAT, _settings.get(_settings.HEARTBEAT, env))
    if options.cluster:
        where = f"node {options.node_rank} of {options.n_nodes}, and node 0 is {options.master_addr}"
        say(f"{where}, by {options.cluster}; --nnodes 1 runs on this node alone")
    if outer := _note_of_outer_launcher(options, os.environ):
        say(outer)
    descriptors.allow(3 * options.n_ranks + 100)  # a connection and two log files for each rank
    try:
        silence.patience()  # which this process needs, too
        if options.join is not None:
            return join(options, job_secret(options, os.environ, say))
        supervisor = Supervisor(options)
    except (LaunchError, InvalidArgumentError) as error:
        say(error)
        return _REFUSED
    except OSError as error:
        say(f"{error.strerror}: {error.filename}" if error.filename else error)
        return _REFUSED
    code = supervisor.run()
    if supervisor.a_rank_failed and options.min_ranks is None and options.n_restarts < options.max_restarts:
        _run_again(options, argv)
    return code


def _note_of_outer_launcher(options: Options, env: Mapping[str, str]) -> str:
    """What the first rank of another launcher says, if that launcher has started this one several times; else ""."""
    outer = launchers.launcher(env)
    if outer.size == 1 or outer.rank != 0 or options.n_nodes > 1 or options.n_restarts:
        return ""
    return (
        f"another launcher ({outer.variable}={outer.size}) has started this one {outer.size} times, and each time it "
        f"starts {options.n_ranks} ranks of its own; leave one of the two out to start the program once"
    )


def _run_again(options: Options, argv: Sequence[str]) -> None:
    """Execute this program anew, so that nothing remains of the previous ranks and their supervision."""
    count = options.n_restarts + 1
    print(f"samestep: restart {count} of {options.max_restarts}", file=sys.stderr, flush=True)
    command = argv[2:] if argv[0] == RESTARTED else argv
    os.execv(sys.executable, [sys.executable, "-m", "samestep", "run", RESTARTED, str(count), *command])


def _what_is_missing() -> str:
    """What this process needs of its host, and does not have; else ""."""
    try:
        os.getcwd()
    except OSError as error:
        return f"there is no working folder ({error.strerror}): it has been deleted; cd to one that exists"
    if not loopback_is_up():
        return "the loopback interface is down, so no rank can reach another; as root: ip link set lo up"
    return ""


def _why_not(options: Options) -> str:
    """The error that every rank would print if the program cannot be found; else ""."""
    program = options.program
    if may_leave_host(host.name for host in options.hosts):
        if options.hosts and not options.mpi and shutil.which(options.rsh[0]) is None:
            return f"there is no {options.rsh[0]} in PATH, to start ranks on other hosts; --rsh names another"
        if options.hosts or options.mpi:
            return ""
    if options.kind == "script":
        is_python = re.fullmatch(r"python[0-9.]*", os.path.basename(program)) and shutil.which(program)
        if is_python and not os.path.exists(os.path.join(program, "__main__.py")):
            return f"leave {program} out: give the script, or -m module, and the ranks run it with Python"
    if options.kind == "script" and not os.path.exists(program):
        return f"there is no file {program} in {os.getcwd()}; a module needs -m, a program --no-python"
    if options.kind == "program" and shutil.which(program) is None:
        return f"there is no program {program} in PATH, or it may not be executed"
    return ""


_GRACE_S = 5  # for the agents to tell the launcher that their ranks have ended


def join(options: Options, secret: str) -> int:
    """Start the agents, and return the exit code of the job once they have ended.

    The ranks run the command line of this launcher, here, whatever the other one runs. SIGINT, SIGTERM and SIGHUP end
    them, and not the job.
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
        stderr = None if number == 0 else subprocess.DEVNULL  # one speaks for all
        agents.append(programs.start(programs.agent_command(), env, stdin=subprocess.DEVNULL, stderr=stderr))
    codes = [agent.wait() for agent in agents]
    return 128 + stopped[0] if stopped else max(code if code >= 0 else 1 for code in codes)
