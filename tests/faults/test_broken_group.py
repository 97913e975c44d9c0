"""A group that an error has ended: each rank leaves it alone."""

import re

import jobs


def test_what_brought_the_ranks_together_is_left_too(tmp_path):
    ended = jobs.run(
        2,
        """
        import os, sys, time
        import numpy as np, samestep as ss
        world = ss.initialize("mpi", timeout=60)
        left = os.path.join(os.path.dirname(sys.argv[0]), "left")
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
                world.allreduce(np.ones(3))  # the one that rank 0 has begun
                world.allreduce(np.ones(3))
            except ss.PeerLostError as error:
                print(f"<{error}>", flush=True)
            ss.finalize()
        """,
        tmp_path,
    )
    assert ended.code == 0, ended.text
    waited = re.search(r"<(\d+) s>", ended.text)
    assert waited, ended.text
    assert int(waited[1]) < 30, ended.text
    assert re.search(r"<.*rank 0.*>", ended.text), ended.text
