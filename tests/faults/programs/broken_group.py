"""The program of test_broken_group.py: rank 0 gives an operation up, and leaves."""

import os
import sys
import time

import numpy as np
import samestep as ss


def main(left):
    """`left`: a file that says that rank 0 has left."""
    world = ss.initialize("mpi", timeout=60)
    if world.rank == 0:
        try:
            world.allreduce(np.ones(3), timeout=0.5)  # rank 1 does not come
        except ss.TimeoutError:
            begin = time.monotonic()
            ss.finalize()
            print(f"<{time.monotonic() - begin:.0f} s>", flush=True)
        open(left, "w").close()
    else:
        while not os.path.exists(left):
            time.sleep(0.01)
        try:
            world.allreduce(np.ones(3))  # the one that rank 0 has started
            world.allreduce(np.ones(3))
        except ss.PeerLostError as error:
            print(f"<{error}>", flush=True)
        ss.finalize()


if __name__ == "__main__":
    main(sys.argv[1])
