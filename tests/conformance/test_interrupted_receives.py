"""Receives that a signal or a deadline ends: they take no message and keep no array."""

import gc
import time
import weakref

import numpy as np
import pytest
from signals import Stopped, raised_inside

pytestmark = pytest.mark.ranks(2, 3)


@pytest.mark.parametrize(
    "verb", ["recv", "with timeout", "with gaps", "sendrecv", "both with gaps", "object"]
)
def test_a_receive_that_a_signal_ends_takes_no_message(group, verb):
    peer, x = 1 - group.rank, np.zeros(6)
    calls = {
        "recv": lambda: group.recv(x, peer),
        "with timeout": lambda: group.recv(x, peer, timeout=30),
        "with gaps": lambda: group.recv(x[::2], peer),
        "sendrecv": lambda: group.sendrecv(np.ones(2), peer, x, peer, sendtag=1, recvtag=0),
        "both with gaps": lambda: group.sendrecv(np.ones(4)[::2], peer, x[::2], peer, sendtag=1, recvtag=0),
        "object": lambda: group.recv_object(peer),
    }
    if group.rank == 0:
        start = time.monotonic()
        with pytest.raises(Stopped), raised_inside():
            calls[verb]()
        assert time.monotonic() - start < 10
    group.barrier()
    if group.rank == 1:
        group.send(np.full(3, 7.0), peer)
        if "both" in verb or verb == "sendrecv":
            group.recv(np.empty(2), peer, 1)
    elif group.rank == 0:
        got = np.zeros(3)
        group.recv(got, peer, 0, timeout=20)
        assert np.array_equal(got, np.full(3, 7.0))
        assert not x.any()


@pytest.mark.parametrize("step", [1, 2])
def test_receives_in_vain_keep_no_arrays(group, step):
    if group.rank == 0:
        gone = []
        for _ in range(3):
            x = np.zeros(1000)
            gone.append(weakref.ref(x))
            with pytest.raises(TimeoutError):
                group.recv(x[::step], 1, timeout=0.01)
            del x
        gc.collect()
        assert [ref() for ref in gone] == [None] * 3
    group.barrier()
