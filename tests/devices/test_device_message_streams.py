"""What long messages wait for while the array of another operation is still being computed, or used."""

from __future__ import annotations

import signal
import threading

import fake_arrays
import numpy as np
import pytest
import samestep as ss

pytestmark = pytest.mark.ranks(2, backends=["staged-native", "staged-direct"])
LONG = 2_000_000  # four segments of a message


def row(seed, count):
    return (np.arange(count) % 1009 + 10 * seed).astype("float32")


def on_device(values, stream=None):
    return fake_arrays.Array.of(values, stream or fake_arrays.Stream())


class Arrays:
    """One in a stream that a kernel occupies on rank 0 until `release`, and one that is ready."""

    def __init__(self, group, busy_count, ready_count=LONG):
        self.stream = fake_arrays.Stream()
        self.busy = on_device(row(group.rank + 5, busy_count), self.stream)
        self.ready = on_device(row(group.rank, ready_count))
        self.stream.synchronize()
        self.ready.stream.synchronize()
        group.barrier()
        if group.rank == 0:
            self.stream.hold()

    def release(self):
        self.stream.release()


def receive(group, seed, tag, count=LONG):
    out = on_device(np.zeros(count, "float32"))
    group.recv(out, 1 - group.rank, tag=tag, timeout=60)
    np.testing.assert_array_equal(out.get(), row(seed, count))


def finish(group, *works):
    for work in works:
        work.wait(60, host=True)
    group.barrier()


def test_a_send_does_not_wait_for_the_array_of_a_receive(group):
    arrays = Arrays(group, LONG)
    if group.rank == 0:
        pending = group.irecv(arrays.busy, 1, tag=1)
        group.isend(arrays.ready, 1, tag=2).wait(30, host=True)
        arrays.release()
        finish(group, pending)
    else:
        receive(group, 0, tag=2)
        finish(group, group.isend(arrays.ready, 0, tag=1))


@pytest.mark.parametrize("count", [3, 5_000, LONG])
def test_no_message_of_the_host_overtakes_one_that_is_still_computed(group, count):
    """With the same receiver and tag. An object is one of the messages."""
    arrays = Arrays(group, count)
    if group.rank == 0:
        works = [group.isend(arrays.busy, 1, tag=1), group.isend(row(1, count), 1, tag=1)]
        works.append(group.isend_object("third", 1, tag=1))
        group.send(row(4, count), 1, tag=2, timeout=30)  # another tag: it waits for nobody
        assert not any(work.done() for work in works)
        arrays.release()
        works.append(group.isend(row(5, count), 1, tag=1))
        finish(group, *works)
    else:
        out = np.zeros(count, "float32")
        group.recv(out, 0, tag=2, timeout=60)
        np.testing.assert_array_equal(out, row(4, count))
        for seed in (5, 1, "third", 5):
            if seed == "third":
                assert group.recv_object(0, tag=1) == seed
                continue
            group.recv(out, 0, tag=1, timeout=60)
            np.testing.assert_array_equal(out, row(seed, count))
        finish(group)


def test_a_blocking_send_of_the_host_waits_behind_one_that_is_still_computed(group):
    arrays = Arrays(group, 3)
    if group.rank == 0:
        works = [group.isend(arrays.busy, 1, tag=1), group.isend(row(1, 3), 1, tag=1)]
        with pytest.raises(ss.TimeoutError, match="queued before an earlier operation"):
            works[1].wait(0.05)
        threading.Timer(0.1, arrays.release).start()
        group.send(row(2, 3), 1, 1)  # by position: without Python
        finish(group, *works)
    else:
        out = np.zeros(3, "float32")
        for seed in (5, 1, 2):
            group.recv(out, 0, tag=1, timeout=60)
            np.testing.assert_array_equal(out, row(seed, 3))
        finish(group)


def test_an_allreduce_does_not_wait_for_the_array_of_a_receive(group):
    arrays = Arrays(group, LONG, 1000)
    if group.rank == 0:
        pending = group.irecv(arrays.busy, 1, tag=1)
        group.iallreduce(arrays.ready).wait(30, host=True)
        arrays.release()
        finish(group, pending)
    else:
        group.iallreduce(arrays.ready).wait(30, host=True)
        finish(group, group.isend(on_device(row(1, LONG)), 0, tag=1))


def test_a_receive_does_not_wait_for_the_array_of_a_send(group):
    arrays = Arrays(group, LONG)
    if group.rank == 0:
        pending = group.isend(arrays.busy, 1, tag=2)
        receive(group, 1, tag=1)
        arrays.release()
        finish(group, pending)
    else:
        sent, out = group.isend(arrays.ready, 0, tag=1), on_device(np.zeros(LONG, "float32"))
        finish(group, group.irecv(out, 0, tag=2), sent)
        np.testing.assert_array_equal(out.get(), row(5, LONG))


@pytest.mark.parametrize("later", ["send", "allreduce"])
def test_a_send_does_not_wait_for_the_array_of_a_later_operation(group, later):
    arrays = Arrays(group, LONG)

    def start_later():
        if later == "allreduce":
            return group.iallreduce(arrays.busy)
        return group.isend(arrays.busy, 1, 2) if group.rank == 0 else group.irecv(arrays.busy, 0, 2)

    if group.rank == 0:
        first = group.isend(arrays.ready, 1, tag=1)
        second = start_later()
        first.wait(30, host=True)
        arrays.release()
        finish(group, second)
    else:
        second = start_later()
        receive(group, 0, tag=1)
        finish(group, second)


def test_an_allreduce_does_not_wait_for_the_array_of_a_later_one(group):
    arrays = Arrays(group, 1000, 500_000)
    first = group.iallreduce(arrays.ready)
    second = group.iallreduce(arrays.busy)
    first.wait(30, host=True)
    if group.rank == 0:
        arrays.release()
    finish(group, second)
    np.testing.assert_array_equal(arrays.busy.get(), row(5, 1000) + row(6, 1000))


def test_a_send_does_not_wait_for_the_arrays_of_many_receives(group):
    """More than may be copied back at a time."""
    arrays = Arrays(group, 100)
    if group.rank == 0:
        receives = [group.irecv(on_device(row(0, 100), arrays.stream), 1, tag=1) for _ in range(40)]
        while group.iprobe(1, 3) is None:  # the others have been sent
            pass
        group.isend(arrays.ready, 1, tag=2).wait(30, host=True)
        arrays.release()
        group.recv_object(1, tag=3)
        finish(group, *receives)
    else:
        for _ in range(40):
            group.send(on_device(row(1, 100)), 0, tag=1)
        group.send_object("all are sent", 0, tag=3)
        receive(group, 0, tag=2)
        group.barrier()


def test_a_missing_sender_is_named_though_the_array_is_busy(group):
    arrays = Arrays(group, LONG)
    if group.rank == 0:
        pending = group.irecv(arrays.busy, 1, tag=1)
        with pytest.raises(ss.TimeoutError, match="for rank 1"):
            pending.wait(0.3, host=True)
        arrays.release()
        group.barrier()
        finish(group, pending)
    else:
        group.barrier()
        finish(group, group.isend(arrays.ready, 0, tag=1))


@pytest.mark.parametrize("ends", ["timeout", "interrupt"])
def test_a_receive_that_is_given_up_leaves_a_message_that_is_still_computed(group, ends):
    arrays = Arrays(group, LONG)
    if group.rank == 0:
        pending = group.isend(arrays.busy, 1, tag=1)
        pending.done()
        group.barrier()
        group.barrier(timeout=60)
        arrays.release()
        finish(group, pending)
        return
    out = on_device(np.zeros(LONG, "float32"))
    group.barrier()
    if ends == "timeout":
        with pytest.raises(ss.TimeoutError):
            group.recv(out, 0, tag=1, timeout=0.3)
    else:

        def interrupt(*_):
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            with pytest.raises(KeyboardInterrupt):
                group.recv(out, 0, tag=1, timeout=60)
        finally:
            signal.signal(signal.SIGALRM, before)
    group.barrier(timeout=60)
    receive(group, 5, tag=1)
    group.barrier()
