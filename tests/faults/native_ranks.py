"""Ranks without a launcher, which would end the others when one dies; each runs the same program."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time

from running import script

PATIENCE_S = 60.0
FOUND_S = 10.0  # from a death to the error, on a busy machine; of deadlines of 30 s and more. Promised are 2


class Rank:
    """One of `Ranks`. `stdout`: all it writes; `wait`: for its exit code."""

    def __init__(self, ranks, fd):
        self.stdout = os.fdopen(fd)
        self.pid = self.code = None
        self._ranks = ranks

    def wait(self, seconds):
        deadline = time.monotonic() + seconds
        while self.code is None:
            self._ranks.receive(deadline)
        return self.code


class Ranks:
    """Processes that meet through a file store; what each prints is one JSON object a line.

    `transport`: `shm`, `tcp` or `hierarchical`.
    """

    def __init__(self, folder, program, n, transport):
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
        environment["SAMESTEP_NATIVE_TRANSPORT"] = "auto" if transport == "hierarchical" else transport
        environment |= {"TEST_SIZE": str(n), "TEST_FOLDER": str(folder)}
        pipes, ranks = [os.pipe() for _ in range(n)], []
        for rank, (_, writing) in enumerate(pipes):
            # As if pairs of ranks had a host each: two levels.
            host = {"SAMESTEP_HOST_ID": str(rank // 2)} if transport == "hierarchical" else {}
            ranks.append([writing, {"TEST_RANK": str(rank)} | host])
        self._starter = subprocess.Popen(
            [sys.executable, "-u", script("faults/fork_ranks"), json.dumps(ranks), *program],
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
            pass_fds=[writing for _, writing in pipes],
        )
        self.processes = [Rank(self, reading) for reading, _ in pipes]
        for _, writing in pipes:
            os.close(writing)
        for _ in range(n):
            self.receive(time.monotonic() + PATIENCE_S)

    def receive(self, deadline):
        """What the starter says: first the pid of each rank, later its exit code."""
        ready, _, _ = select.select([self._starter.stdout], [], [], max(0, deadline - time.monotonic()))
        assert ready, "the ranks have not ended"
        rank, number = json.loads(self._starter.stdout.readline())
        if self.processes[rank].pid is None:
            self.processes[rank].pid = number
        else:
            self.processes[rank].code = number

    def report(self, rank):
        text = self.processes[rank].stdout.readline()
        assert text.startswith("{"), text + self.processes[rank].stdout.read()
        return json.loads(text)

    def pids(self):
        """What all ranks have reported as `pid`."""
        return [self.report(rank)["pid"] for rank in range(len(self.processes))]

    def kill(self, victim):
        """Kills a rank once all have reported their `pid`. Returns the time of that."""
        pids = self.pids()
        killed_at = time.time()
        os.kill(pids[victim], signal.SIGKILL)
        return killed_at

    def end(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what is stopped dies of it, too
            process.stdout.close()
        self._starter.communicate()
