"""A rank that is killed: the others get an error in time, and do not hang."""

import os
import signal
import time

import numpy as np
import pytest
import samestep as ss

TIMEOUT = 3.0  # MPI says nothing about dead ranks: the deadline must


@pytest.mark.ranks(2, 3, dies={1})
def test_killed_before_an_allreduce(group):
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises((ss.PeerLostError, ss.TimeoutError), match=r"\b1\b"):
        group.allreduce(np.ones(1 << 20, "f4"), timeout=TIMEOUT)
    assert time.monotonic() - start < TIMEOUT + 5
    with pytest.raises((ss.PeerLostError, ss.TimeoutError, ss.NotInitializedError)):
        group.barrier(timeout=TIMEOUT)


@pytest.mark.ranks(2, dies={1})
def test_stopped_in_the_middle(group):
    x = np.ones(1 << 20, "f4")
    group.allreduce(x)
    if group.rank == 1:
        group.iallreduce(x)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises((ss.PeerLostError, ss.TimeoutError)):
        for _ in range(3):
            group.allreduce(x, timeout=TIMEOUT)
