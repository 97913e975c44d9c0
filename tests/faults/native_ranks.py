"""Ranks without a launcher, which would end the others when one dies; each runs the same program."""

import contextlib
import json
import os
import signal
import time

import forked

PATIENCE_S = 60.0
FOUND_S = 10.0  # from a death to the error, on a busy machine; of deadlines of 30 s and more. Promised are 2


class Rank:
    """One of `Ranks`. `stdout`: all it writes; `wait`: for its exit code."""

    def __init__(self, program, environment):
        reading, writing = os.pipe()
        self.stdout = os.fdopen(reading)
        try:
            self._process = forked.start(program, environment, writing)
        finally:
            os.close(writing)
        self.wait = self._process.wait

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what is stopped dies of it, too
        self._process.wait(PATIENCE_S)
        self.stdout.close()


class Ranks:
    """Processes that meet through a file store; what each prints is one JSON object a line.

    `transport`: `shm`, `tcp` or `hierarchical`.
    """

    def __init__(self, folder, program, n, transport):
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
        environment["SAMESTEP_NATIVE_TRANSPORT"] = "auto" if transport == "hierarchical" else transport
        environment |= {"TEST_SIZE": str(n), "TEST_FOLDER": str(folder)}
        self.processes = []
        for rank in range(n):
            # As if pairs of ranks had a host each: two levels.
            host = {"SAMESTEP_HOST_ID": str(rank // 2)} if transport == "hierarchical" else {}
            self.processes.append(Rank(program, environment | {"TEST_RANK": str(rank)} | host))

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
            process.end()
