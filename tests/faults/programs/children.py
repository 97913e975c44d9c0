"""`initialize()` at the top of a script that `multiprocessing` imports again in processes that it starts."""

import concurrent.futures
import json
import multiprocessing
import os
import subprocess
import sys

import numpy as np
import samestep as ss

backend = ss.initialize(timeout=60)
place = [backend.rank, backend.size]  # a child has the numbers of the rank that has started it


def square(x):
    return [x * x, *place]


def use(_):
    try:
        return backend.allreduce(1.0)
    except ss.InvalidArgumentError as error:
        return str(error)


def ask(_):
    try:
        return ss.get_distributed_backend().rank
    except ss.NotInitializedError as error:
        return str(error)


def begin(_):
    try:
        return ss.initialize(timeout=60).size
    except ss.InvalidArgumentError as error:
        return str(error)


def join_alone(_):
    """As a rank of a job of its own, with variables of its own."""
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_PORT="1")
    for name in [name for name in os.environ if name.startswith(("OMPI_", "PMI"))]:
        del os.environ[name]
    return ss.initialize(timeout=60).size


ACTS = {"square": square, "use": use, "ask": ask, "begin": begin, "join_alone": join_alone}


def report(found):
    assert backend.allreduce(np.ones(1))[0] == backend.size
    print(json.dumps(found), flush=True)


def pool(method, act, kind="executor"):
    context = multiprocessing.get_context(method)
    if kind == "pool":
        with context.Pool(1) as workers:
            found = workers.map(ACTS[act], [3])
    else:
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as workers:
            found = list(workers.map(ACTS[act], [3]))
    report(found)


def start_again():
    """Another program, with this rank's variables."""
    code = "import samestep as ss; ss.initialize(timeout=60)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    report([done.returncode, done.stderr.splitlines()[-1]])


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))
