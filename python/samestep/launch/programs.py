"""The programs that the launcher starts, so that there is an agent for each rank, while they run."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from samestep import _settings
from samestep._util import launchers
from samestep._util import start as starter
from samestep.launch import mpirun, network, processes
from samestep.launch.arguments import Options
from samestep.launch.causes import ProcessExit
from samestep.launch.find_launcher import BOOTSTRAP, FROM_STDIN
from samestep.launch.lines import Lines
from samestep.launch.loop import Loop
from samestep.launch.output import Output


@dataclass(frozen=True)
class Program:
    """What to start: its name in messages, command line and whole environment, and the ranks that it is for.

    Without ranks it is for all: its end is the end of the run. `stdin` is what it reads, short; None: the
    launcher's own standard input.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    ranks: tuple[int, ...] = ()
    stdin: bytes | None = b""


class LaunchedJob:
    """Running programs, each in a session of its own, and their own messages, which `output` gets unchanged."""

    def __init__(self, programs: Sequence[Program], loop: Loop, output: Output) -> None:
        self.quiet = False
        self._loop = loop
        self._output = output
        self._running: dict[int, Program] = {}
        self._lines = {1: Lines(), 2: Lines()}
        pipes = {fd: os.pipe() for fd in (1, 2)}
        self._pipes = {fd: reading for fd, (reading, _) in pipes.items()}
        try:
            for program in programs:
                piped = subprocess.PIPE if program.stdin else subprocess.DEVNULL
                stdin = None if program.stdin is None else piped
                process = start(
                    program.argv, program.env, stdin=stdin, stdout=pipes[1][1], stderr=pipes[2][1]
                )
                process.returncode = 0  # the launcher reaps all its children itself
                self._running[process.pid] = program
                if process.stdin is not None and program.stdin is not None:
                    with contextlib.suppress(BrokenPipeError):  # it has ended, which is noticed elsewhere
                        process.stdin.write(program.stdin)
                        process.stdin.close()
        finally:
            for _, writing in pipes.values():
                os.close(writing)
        for fd, pipe in self._pipes.items():
            os.set_blocking(pipe, False)
            loop.reading(pipe, partial(self._read, fd))

    @property
    def running(self) -> bool:
        """Whether one of the programs is still there."""
        return bool(self._running)

    def signal(self, signum: int) -> None:
        """Signal the first process group in the session of each running program."""
        processes.send_signal([-pid for pid in self._running], signum)

    def on_ended(self, pid: int, status: int) -> tuple[Program, ProcessExit] | None:
        """A child of this process ended: which program that was, or None."""
        program = self._running.pop(pid, None)
        if program is None:
            return None
        if not self._running:
            self._finish()
        return program, ProcessExit(program.name, pid, status, time.time())

    def _finish(self) -> None:
        for fd, pipe in self._pipes.items():
            while self._read(fd):
                continue
            self._loop.reading(pipe, None)
            self._show(fd, self._lines[fd].remainder())
            os.close(pipe)

    def _read(self, fd: int) -> bool:
        try:
            data = os.read(self._pipes[fd], 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._loop.reading(self._pipes[fd], None)
            return False
        self._show(fd, self._lines[fd].feed(data))
        return True

    def _show(self, fd: int, data: bytes) -> None:
        if data and not self.quiet:
            self._output.status(fd, data.replace(b"\0", b""))  # PRRTE ends some messages with zeros


def start(argv: Sequence[str], env: Mapping[str, str], **streams: Any) -> subprocess.Popen[bytes]:
    """Starts a program in a session of its own, which dies with this process."""
    # Two system calls, which take no lock that another thread might hold.
    first = partial(processes.die_with_parent, os.getpid(), signal.SIGTERM)
    return subprocess.Popen(argv, env=env, start_new_session=True, preexec_fn=first, **streams)  # noqa: PLW1509


def programs(options: Options, where: Mapping[str, Any]) -> list[Program]:
    """One `mpirun` that starts the agents; or the agents of this host, and one remote shell for each other host.

    `where` the launcher listens is for `BOOTSTRAP`. Raises LaunchError as `mpirun.command`.
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
    return [sys.executable, "-I", "-S", starter.__file__, "launch.agent"]


def _for_agents(env: Mapping[str, str]) -> dict[str, str]:
    """The settings that an agent needs before its launcher has sent it any."""
    return {name: value for name, value in env.items() if name == _settings.HEARTBEAT}


def _for_shell(agent: list[str], env: Mapping[str, str]) -> str:
    """The command that starts all agents of a host: an sshd lets in only so many connections at a time.

    They read the address of the launcher from the shell, because everybody can read a command line.
    """
    needed_to_start = {name: env[name] for name in ("LD_LIBRARY_PATH",) if name in env}
    variables = needed_to_start | _for_agents(env) | {BOOTSTRAP: FROM_STDIN}
    words = [f"{name}={value}" for name, value in variables.items()]
    return "exec env " + shlex.join([*words, *agent])
