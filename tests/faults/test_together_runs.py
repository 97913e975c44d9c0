"""Jobs whose ranks leave steps together: over every transport and layout of hosts, and where a rank ends within one."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import os, signal, sys
if hosts := os.environ.get("PRETENDED_HOSTS"):  # of each rank
    os.environ["SAMESTEP_HOST_ID"] = hosts[int(os.environ["RANK"])]
import numpy as np
import samestep as ss

backend = ss.initialize(timeout=60)
rank, size = backend.rank, backend.size
kinds = ("before", "between", "after", "message", "node", "interrupt")
for step in range(2 * len(kinds)):
    who, kind = step % size, kinds[step % len(kinds)]
    values = np.ones(200_000)

    def leave(when):
        if rank == who and kind == when:
            if kind == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
                backend.recv(values)
            raise ValueError(str(step))

    try:
        with backend.together():
            leave("before")
            backend.allreduce(values)
            leave("between")
            backend.allreduce_gradients({"a": values, "b": [np.ones(3)]})
            leave("message")
            backend.sendrecv(values, (rank + 1) % size, np.empty_like(values), (rank - 1) % size)
            leave("interrupt")
            leave("node")
            backend.node.allreduce(values)
            backend.cross.allreduce(values)
            backend.barrier()
            leave("after")
    except ss.StepError as error:
        assert (error.rank, error.kind) == (who, "KeyboardInterrupt" if kind == "interrupt" else "ValueError")
    except KeyboardInterrupt:
        assert rank == who and kind == "interrupt"
    else:
        raise AssertionError("nothing was raised")
    assert backend.allreduce(1) == size and backend.node.allreduce(1) == backend.node.size
    assert (backend.allreduce(np.ones(300_000)) == size).all()
print("all steps", flush=True)
try:
    with backend.together():
        if rank == size - 1:
            sys.exit(0)
        backend.barrier()
except ss.StepError as error:
    print("left:", error.rank, error.kind, flush=True)
    try:
        backend.barrier()
    except ss.PeerLostError:
        print("has gone", flush=True)
"""


@pytest.mark.parametrize(
    ("words", "n_ranks", "settings"),
    [
        ((), 4, {}),
        ((), 3, {"SAMESTEP_NATIVE_TRANSPORT": "tcp"}),
        ((), 4, {"PRETENDED_HOSTS": "aabb"}),
        ((), 3, {"PRETENDED_HOSTS": "aba"}),
        (("--mpi",), 2, {}),
        (("--mpi",), 4, {"SAMESTEP_MPI_TRANSPORT": "mpi"}),
    ],
)
def test_steps_that_end_in_all_ways(tmp_path, words, n_ranks, settings):
    script = tmp_path / "steps.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "samestep", "run", *words, "-n", str(n_ranks), str(script)]
    ended = subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, timeout=100, check=False
    )
    text = ended.stdout + ended.stderr
    assert text.count("all steps") == n_ranks, text
    assert text.count(f"left: {n_ranks - 1} SystemExit") == n_ranks - 1, text
    assert text.count("has gone") == n_ranks - 1, text
