"""A process manager that speaks PMI-1, as Flux and Hydra do: it starts processes, and keeps keys and barriers."""

import os
import socket
import subprocess
import threading


class Manager:
    """Starts `n` processes of one command, each with its connection. Refuses what the protocol does not allow.

    Attributes:
      outputs: stdout and stderr of each, once `wait` has returned.
      values: what they have put.
      finalized: how many processes have said that they end in order.
    """

    def __init__(self, n, command, env, *, silent_at=""):
        self._n, self._silent_at = n, silent_at
        self.values, self._waiting = {}, []
        self._lock = threading.Lock()
        self.finalized = 0
        self._processes, self._threads = [], []
        for rank in range(n):
            ours, theirs = socket.socketpair()
            variables = {"PMI_FD": str(theirs.fileno()), "PMI_RANK": str(rank), "PMI_SIZE": str(n)}
            process = subprocess.Popen(
                [*command],
                env=env | variables,
                pass_fds=[theirs.fileno()],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            theirs.close()
            self._processes.append(process)
            self._threads.append(threading.Thread(target=self._serve, args=(ours,)))
            self._threads[-1].start()

    def wait(self, timeout=120):
        self.outputs = [process.communicate(timeout=timeout) for process in self._processes]
        for thread in self._threads:
            thread.join(timeout)
        return [process.returncode for process in self._processes]

    def _serve(self, connection):
        with connection, connection.makefile("rw") as lines:
            for line in lines:
                words = dict(word.partition("=")[::2] for word in line.split())
                command = words["cmd"]
                if command == self._silent_at:
                    continue
                answer = getattr(self, f"_{command}")(words, lines)
                if answer is not None:
                    print(answer, file=lines, flush=True)

    def _init(self, words, lines):
        assert words["pmi_version"] == "1"
        return "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"

    def _get_my_kvsname(self, words, lines):
        return "cmd=my_kvsname kvsname=kvs_7"

    def _put(self, words, lines):
        assert words["kvsname"] == "kvs_7" and len(words["key"]) <= 64 and len(words["value"]) <= 1024
        with self._lock:
            self.values[words["key"]] = words["value"]
        return "cmd=put_result rc=0 msg=success"

    def _get(self, words, lines):
        with self._lock:
            value = self.values.get(words["key"])
        return (
            "cmd=get_result rc=-1 msg=key_not_found"
            if value is None
            else f"cmd=get_result rc=0 value={value}"
        )

    def _barrier_in(self, words, lines):
        with self._lock:
            self._waiting.append(lines)
            if len(self._waiting) == self._n:
                for each in self._waiting:
                    print("cmd=barrier_out rc=0", file=each, flush=True)
                self._waiting = []

    def _finalize(self, words, lines):
        with self._lock:
            self.finalized += 1
        return "cmd=finalize_ack rc=0"


def environment(**variables):
    """Of a rank that finds no MPI library and no other launcher's variables."""
    foreign = ("PMI_", "PMIX_", "OMPI_", "SLURM_", "MPI_", "RANK", "WORLD_SIZE", "MASTER_", "SAMESTEP_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return clean | {"MPI4PY_LIBMPI": "/no/mpi"} | variables
