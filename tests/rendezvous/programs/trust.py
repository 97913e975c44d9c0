"""The program of test_trust_run.py: `trust.py url rank`. Each of two ranks makes calls that need trust, and others."""

import enum
import json
import sys

import numpy as np
import samestep as ss

CALLS = {
    "bcast_object": (1,),
    "allgather_object": (1,),
    "gather_object": (1,),
    "scatter_object": ([1, 2],),
    "send_object": (),  # to the other rank
    "recv_object": (),
}


class Kind(enum.IntEnum):
    one = 1


def wait_for(start, *arguments):
    start(*arguments).wait()


def error_of(kind, act, *arguments):
    """The text of the error, if there is one."""
    try:
        act(*arguments)
    except kind as error:
        return [str(error)]
    return []


def refusals(backend):
    """What the calls that pickle objects say, in the world and in groups of it."""
    found = []
    for group in (backend, backend.split(0), backend.group([0, 1])):
        for verb, arguments in CALLS.items():
            if verb in ("send_object", "recv_object") and group._trusted:
                continue
            if verb == "send_object":
                arguments = (1, 1 - backend.rank)  # noqa: PLW2901
            found += error_of(ss.UnavailableError, getattr(group, verb), *arguments)
            found += error_of(ss.UnavailableError, wait_for, getattr(group, "i" + verb), *arguments)
    return found


def main(url, rank):
    backend = ss.initialize("native", init_method=url, rank=rank, world_size=2, timeout=30)
    refused = refusals(backend)
    tree = {"lr": 0.1 + rank, "n": np.float16(rank + 1), "flag": rank == 0, "c": 1j}
    same = ss.synchronize(backend, tree)
    refused += error_of(ss.UnavailableError, ss.synchronize, backend, {"kind": Kind.one})
    other = {"a": 1, "b": 2} if rank else {"a": 1}
    (differs,) = error_of(ss.MismatchError, ss.synchronize, backend, other)
    grads = ss.allreduce_gradients(backend, {"w": None if rank else np.ones(2), "b": np.ones(1)}, "sum")
    backend.println("printed")
    rows, _ = backend.alltoallv(np.arange(3.0), [1, 2])
    joined = backend.allgatherv(np.ones(rank + 1))
    part = backend.scatter(np.arange(4.0).reshape(2, 2) if rank == 0 else None)
    arrays = {"w": grads["w"], "rows": rows, "joined": joined, "part": part}
    found = {name: array.tolist() for name, array in arrays.items()}
    found |= {"transport": backend.transport, "refused": refused, "differs": differs}
    print(json.dumps(found | {"same": [repr(same[k]) for k in tree]}))
    ss.finalize()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
