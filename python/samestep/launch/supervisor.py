"""The launcher's main loop: starts the ranks, by `mpirun` or itself, shows their output, and ends them all.

One thread, one loop. Agents (see `agent.py`) report over TCP; `causes.py` finds the
root cause of a failure, `plan.py` makes the environments of the ranks.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from samestep import _settings
from samestep._util import jax_variables, launchers
from samestep._util.network_identity import network_identity
from samestep._util.text import ranks_text
from samestep.launch import frames, network, plan, processes
from samestep.launch.arguments import Options
from samestep.launch.causes import ProcessExit, others, root_cause
from samestep.launch.job_secret import job_secret
from samestep.launch.loop import Loop
from samestep.launch.mpirun import LaunchError
from samestep.launch.output import Logs, Output
from samestep.launch.programs import LaunchedJob, Program, programs
from samestep.launch.ranks import Rank, Ranks

if TYPE_CHECKING:
    from samestep.launch.elastic import Elastic

_MAX_WAITING = 8 << 20  # bytes not yet written, above which the ranks have to wait
_GIVE_UP_S = 3.0  # after SIGKILL, on an agent that does not answer
_JOB_GRACE_S = 2.0  # for `mpirun` or an agent to end by itself after its last rank
_LATE_S = 30.0
_LOOK_S = 1.0  # between checks that the hosts answer
_STOPPED = 128 + signal.SIGTERM  # exit code of a rank that was asked to end, and did
_CAUSE_S = 1.0  # for a rank whose failure another one noticed to end by itself, with its own exit code


@dataclass(frozen=True)
class _End:
    """Why and how the run ends before its ranks do. The exit code; None for that of the root cause."""

    why: str
    signals: tuple[tuple[float, int], ...]
    exit_code: int | None = None


_AFTER_FAILURE = _End("", ((0.0, signal.SIGTERM), (3.0, signal.SIGKILL)))
_SOON = ((0.0, signal.SIGTERM), (2.0, signal.SIGKILL))
_AFTER_SIGNAL = {
    signal.SIGINT: _End("SIGINT", ((0.0, signal.SIGINT), (2.0, signal.SIGTERM), (4.0, signal.SIGKILL)), 130),
    **{s: _End(s.name, _SOON, 128 + s) for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)},
}
# For ranks that end their step first.
_PATIENT = _End("SIGTERM", ((0.0, signal.SIGTERM), (25.0, signal.SIGKILL)), 143)
_WITHOUT_JOB = _End("", ((0.3, signal.SIGTERM), (1.3, signal.SIGKILL)))  # 0.3 s for ranks that mpirun ends


class Supervisor:
    """One run, from its start to the exit code.

    Raises:
      LaunchError: there is no `mpirun`, or the secret's file cannot be used; OSError: the log directory cannot be
        made. Nothing was started then.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._loop = Loop()
        self._started = False
        self._leaving = False
        self._left_first: ProcessExit | None = None  # a program that ended before its ranks did
        self._waits_for_cause = False
        self._end: _End | None = None
        self._elastic: Elastic | None = None  # where the job goes on after a loss
        self._running_at_end: list[int] = []

        logs = Logs(options) if options.logs else {}
        self._output = Output(
            self._loop, raw=options.raw, logs=logs, on_lost=self._on_output_lost, shown=options.shown
        )
        self._secret = job_secret(options, os.environ, self._say)
        hosts = [host.name for host in options.hosts]
        self._leaves = bool(hosts or options.mpi) and network.may_leave_host(hosts)
        self._leaves |= options.listen is not None
        try:
            server, addresses = network.listen(everywhere=self._leaves, port=options.listen or 0)
        except OSError as error:
            raise LaunchError(f"cannot listen at port {options.listen or 0}: {error.strerror}") from error
        where = {"host": socket.gethostname(), "addresses": addresses, "token": secrets.token_hex(16)}
        where |= {"network": network_identity(), "port": server.getsockname()[1]}
        if options.listen is not None:
            where["token"] = self._secret
            place = f"{where['host']}:{where['port']}"
            self._say(f"to add K ranks from any host: samestep run --join {place} -n K {options.program} ...")
        self._programs = programs(options, where)
        self._rank_0_reads_itself = any(program.stdin is None for program in self._programs)
        self._ranks = Ranks(
            self._loop,
            server,
            str(where["token"]),
            options.n_ranks,
            self._output,
            first_rank=options.first_rank,
            may_join=options.listen is not None,
        )

    def run(self) -> int:
        """Run until no process of the run is left, and return the exit code.

        Takes over the signals of this process, and all its descendants, which end with the run.
        """
        processes.adopt_orphans()
        ends = [signum for signum in _AFTER_SIGNAL if signal.getsignal(signum) != signal.SIG_IGN]  # nohup
        # SIGCONT: this may be the foreground now, and read the terminal.
        self._loop.on_signals([signal.SIGCHLD, signal.SIGCONT, *ends], self._on_signals)
        self._job = LaunchedJob(self._programs, self._loop, self._output)
        self._loop.after(_LATE_S, self._tell_who_is_late)
        self._look_for_silence()
        if self._options.timeout_s is not None:
            end = _End(f"--timeout {self._options.timeout_s:g} s", _SOON, 124)
            self._loop.after(self._options.timeout_s, lambda: self._begin_end(end))
        while self._job.running or any(not rank.all_gone for rank in self._ranks):
            self._output.watch()
            self._ranks.pause(self._output.n_waiting > _MAX_WAITING and self._end is None)
            if self._started and not self._rank_0_reads_itself:
                self._ranks.input.watch()
            self._loop.turn()
            self._advance()
        if self._elastic is not None:
            self._elastic.close()
        left = self._sweep()
        code = self._report(left)
        for rank in self._ranks:
            if rank.joined:
                rank.send(frames.LEAVE, code)
        self._output.flush(None if self._end is None or self._end.exit_code is None else 1.0)
        return code

    def _look_for_silence(self) -> None:
        self._ranks.mark_silent_lost()
        self._loop.after(_LOOK_S, self._look_for_silence)

    @property
    def a_rank_failed(self) -> bool:
        """Whether the run has ended because of a failure, not on request."""
        by_wish = self._end is not None and self._end.exit_code is not None
        by_wish |= any(rank.ending and rank.ending.status == _STOPPED for rank in self._ranks)
        return (
            not by_wish
            and not self._has_finished
            and any(rank.ending and rank.ending.failed for rank in self._ranks)
        )

    # --- what happens next

    def _advance(self) -> None:
        if not self._started and self._ranks.complete and self._end is None:
            self._start_ranks()
        failed = [rank.ending for rank in self._ranks if rank.ending and rank.ending.failed]
        if self._elastic is not None and self._end is None:
            self._elastic.advance()
            failed = failed if self._elastic.failed else []
        if failed and not all(ending.is_consequence for ending in failed):
            self._begin_end(_AFTER_FAILURE)
        elif failed and not self._waits_for_cause:
            self._waits_for_cause = True
            self._loop.after(_CAUSE_S, lambda: self._begin_end(_AFTER_FAILURE))
        if self._end is None and not self._leaving and (self._left_first or self._ranks.problem):
            self._begin_end(_WITHOUT_JOB)
        if not self._leaving and self._all_gone():
            self._let_go()

    def _all_gone(self) -> bool:
        """No rank is left, and none will connect."""
        settled = self._started or self._end is not None
        return settled and all(rank.all_gone for rank in self._ranks)

    @property
    def _has_finished(self) -> bool:
        """Members have ended as they should, so what became of others is no failure."""
        return self._elastic is not None and self._elastic.over and not self._elastic.failed

    def _start_ranks(self) -> None:
        self._started = True
        options = self._options
        here = plan.places([rank.host for rank in self._ranks if not rank.joined])
        places = plan.on_node(here, options.node_rank, options.n_nodes) if options.n_nodes > 1 else here
        address = options.master_addr or self._address_of_first_host()
        port = options.master_port or self._reserved_port()
        launcher = "" if options.mpi else "samestep run"

        def start(rank: Rank, place: plan.Place, extra: dict[str, str]) -> None:
            env = {}
            if rank.host or rank.joined:
                env = plan.for_other_hosts(launchers.outside_any_job(os.environ), paths=not rank.joined)
            env |= plan.environment(
                place,
                launcher=launcher,
                master_addr=address,
                master_port=port,
                secret=self._secret,
            )
            env |= jax_variables.for_ranks({**os.environ, **options.env}, options.jax)
            stdin = ("inherited" if self._rank_0_reads_itself else "pipe") if rank.number == 0 else ""
            argv = options.rank_argv(sys.executable, place.local_rank)
            how = {"argv": argv, "cwd": os.getcwd(), "live": self._output.live, "stdin": stdin}
            rank.send(frames.START, {**how, "env": env | options.env | extra})

        if options.min_ranks is None:
            for rank, place in zip(self._ranks, places, strict=True):
                start(rank, place, {})
            return

        def start_life(rank: Rank, uid: str) -> None:
            assert self._elastic is not None and rank.link is not None
            reached_at = rank.link.getsockname()[0]  # by its agent
            rank.pid, rank.ending, rank.all_gone = 0, None, False
            joined = plan.places([one.host for one in self._ranks])[len(places) :]
            at = [*places, *joined][rank.number]
            where = f"{reached_at}:{self._elastic.port}"
            start(rank, at, {_settings.MEMBERSHIP: where, _settings.UID: uid})

        from samestep.launch.elastic import Elastic  # and with it the store

        self._elastic = Elastic(
            self._loop,
            self._ranks,
            min_ranks=options.min_ranks,
            max_restarts=options.max_restarts,
            chaos_s=options.chaos_s,
            where="" if self._leaves else "127.0.0.1",
            secret=self._secret,
            start=start_life,
            kill=lambda rank: rank.send(frames.SIGNAL, int(signal.SIGKILL)),
            say=self._say,
        )
        self._elastic.begin()

    def _reserved_port(self) -> int:
        self._port_holder = network.reserve_port()  # until the run ends
        return int(self._port_holder.getsockname()[1])

    def _address_of_first_host(self) -> str:
        if not any(rank.host for rank in self._ranks):
            return "127.0.0.1"
        first = self._options.hosts[0].name if self._options.hosts else next(iter(self._ranks)).host
        return socket.gethostname() if not first or network.is_name_of_this_host(first) else first

    def _begin_end(self, end: _End) -> None:
        """Start to end all ranks. A second request to end meanwhile sends SIGKILL immediately."""
        if self._end is not None:
            if end.why.startswith("SIG"):
                self._signal_ranks(signal.SIGKILL)
            return
        self._end = end
        if self._elastic is not None:
            self._elastic.starts = False
        self._running_at_end = [rank.in_job for rank in self._ranks if rank.runs]
        for delay, signum in end.signals:
            self._loop.after(delay, partial(self._signal_ranks, signum))
        self._loop.after(end.signals[-1][0] + _GIVE_UP_S, self._give_up)
        if not self._started:
            self._let_go()
            self._job.signal(signal.SIGTERM)

    def _signal_ranks(self, signum: int) -> None:
        for rank in self._ranks:
            if not rank.all_gone:
                rank.send(frames.SIGNAL, int(signum))

    def _give_up(self) -> None:
        for rank in self._ranks:
            self._ranks.mark_lost(rank)

    def _let_go(self) -> None:
        """Release the agents. Then they and `mpirun` end by themselves, or are killed."""
        self._leaving = True
        self._ranks.close()
        self._job.quiet = self._started or self._end is not _WITHOUT_JOB
        for rank in self._ranks:
            if not rank.joined:  # they learn the exit code, too
                rank.send(frames.LEAVE)
            rank.all_gone = True
        self._loop.after(_JOB_GRACE_S, lambda: self._job.signal(signal.SIGTERM))
        self._loop.after(2 * _JOB_GRACE_S, lambda: self._job.signal(signal.SIGKILL))

    def _sweep(self) -> list[int]:
        """End the remaining descendants of this process; returns those that cannot be ended."""
        me = os.getpid()
        begin = time.monotonic()
        while left := processes.descendants(me):
            waited = time.monotonic() - begin
            if waited > _GIVE_UP_S:
                return left
            if waited > 0.5:  # agents need a moment to leave
                processes.send_signal(left, signal.SIGKILL)
            time.sleep(0.01)
            list(processes.reap())
        return []

    # --- messages

    def _tell_who_is_late(self) -> None:
        if not self._started and self._end is None:
            first = self._options.first_rank
            missing = sorted(set(range(self._options.n_ranks)) - set(self._ranks.by_number))
            missing = [first + number for number in missing]
            rsh = self._options.rsh[0]
            advice = f"; does {rsh} to every host work without a password?" if self._options.hosts else ""
            late = f"{ranks_text(missing)} did not start within {_LATE_S:.0f} s"
            late_programs = [program for program in self._programs if not self._have_reported(program)]
            self._say(f"{late}; still waiting for {late_programs[0].name}{advice}")

    def _report(self, left: Sequence[int]) -> int:
        if left:
            self._say(f"these processes cannot be ended: {', '.join(map(str, left))}")
        if self._end is not None and self._end.exit_code is not None:
            if self._end.why:
                self._say(f"{self._end.why}: {ranks_text(self._running_at_end)} still running, ended")
            return self._end.exit_code
        if self._elastic is not None and self._has_finished and self._end is None:
            return self._elastic.exit_code or 0
        endings = [rank.ending for rank in self._ranks if rank.ending is not None]
        if self._left_first is not None:
            endings.append(self._left_first)
        root = root_cause(endings)
        if root is None and self._end is None:
            return 1 if self._elastic is not None and self._elastic.failed else 0
        if root is None or self._ranks.problem:
            self._say(self._ranks.problem or f"{self._programs[0].name} ended before its ranks did")
            return 1
        self._say(f"root cause: {root}")
        if self._left_first and root.ending is self._left_first and self._started and root.exit_code < 128:
            self._say("mpirun ended the ranks by itself, as it does when one calls MPI_Abort")
        for line in others(endings, root):
            self._say(line)
        return root.exit_code

    def _say(self, text: str) -> None:
        self._output.status(2, f"samestep: {text}\n".encode(errors="backslashreplace"))

    def _on_output_lost(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError):  # the reader of our output has closed it
            self._begin_end(_End("", _SOON, 128 + signal.SIGPIPE))
        else:
            self._say(f"cannot write to standard output: {error.strerror}")
            self._begin_end(_End("", _SOON, 1))

    # --- signals and descriptors

    def _on_signals(self, signums: bytes) -> None:
        for signum in signums:
            if signum == signal.SIGUSR1 and self._started:  # what it means is the program's affair
                self._signal_ranks(signum)
            elif signum == signal.SIGTERM and self._elastic is not None:
                if self._end is not _PATIENT:  # who repeats it is no less patient
                    self._begin_end(_PATIENT)
            elif signum in _AFTER_SIGNAL:
                self._begin_end(_AFTER_SIGNAL[signal.Signals(signum)])
        for pid, status in processes.reap():
            ended = self._job.on_ended(pid, status)
            # The loss of an agent that has reported is noticed by its connection.
            if ended and not self._leaving and self._end is None and not self._have_reported(ended[0]):
                self._left_first = ended[1]

    def _have_reported(self, program: Program) -> bool:
        return bool(program.ranks) and all(rank in self._ranks.by_number for rank in program.ranks)
