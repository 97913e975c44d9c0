"""Calls of `launch` from a script, whose functions are in `__main__`. Prints a line of JSON for each."""

import json
import os
import signal
import sys
import threading
import time

import numpy as np
import samestep as ss


def total(factor, *, bias=0.0):
    backend = ss.initialize()
    print("out", backend.rank)
    print("err", backend.rank, file=sys.stderr)
    print("no newline", end="")
    return backend.rank, backend.size, factor * float(backend.allreduce(np.ones(1))[0]) + bias


def fails(how):
    backend = ss.initialize()
    backend.barrier()
    if backend.rank == backend.size - 1:
        if how == "raise":
            raise KeyError("bad batch")
        if how == "exit":
            os._exit(7)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    return backend.allreduce(np.ones(1 << 16)).sum()


def no_result():
    return threading.Lock()


def busy(folder):
    rank = os.environ["RANK"]
    with open(os.path.join(folder, f"pid_{rank}"), "w") as file:
        file.write(str(os.getpid()))
    if rank == "1" and os.environ.get("INTERRUPT"):
        while len(os.listdir(folder)) < 2:
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGINT)
    elif rank == "1":
        raise ValueError("alone")
    while True:  # does not wait in a collective, and so has to be ended
        time.sleep(0.01)


def attempt(function, n, *arguments, **keywords):
    try:
        return {"results": ss.launch(function, n, *arguments, **keywords)}
    except KeyboardInterrupt:
        return {"error": "KeyboardInterrupt"}
    except Exception as error:
        index = getattr(error, "error_index", None)
        return {"error": type(error).__name__, "index": index, "text": str(error)}


def gone(folder):
    """Whether no process is left of those that wrote down their ids."""
    for name in os.listdir(folder):
        with open(os.path.join(folder, name)) as file:
            if os.path.exists(f"/proc/{file.read()}"):
                return False
    return True


case, *words = sys.argv[1:]
if case == "total":
    found = [attempt(total, 1, 1), attempt(total, 3, 2, bias=0.5), attempt(total, 3, 1)]
elif case == "fails":
    found = [attempt(fails, 3, how) for how in ("raise", "exit", "kill")] + [attempt(no_result, 2)]
elif case == "refused":
    found = [attempt(total, n, 1) for n in (0, -1, True, "2")] + [
        attempt(5, 2),
        attempt(len, 1, threading.Lock()),
    ]
elif case == "interrupt":
    os.environ["INTERRUPT"] = "1"
    found = [attempt(busy, 2, words[0]), gone(words[0])]
else:
    found = [attempt(busy, 2, words[0]), gone(words[0])]
print(json.dumps(found))
