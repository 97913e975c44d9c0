"""send, recv, sendrecv: who, which tag, in which order."""

import os
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import samestep as ss
from reference import MOVABLE, SIZES, assert_same, values

pytestmark = pytest.mark.ranks(1, 2, 3)


def ring_peers(group):
    return (group.rank + 1) % group.size, (group.rank - 1) % group.size


@pytest.mark.parametrize("name", MOVABLE)
def test_around_the_ring(group, name):
    right, left = ring_peers(group)
    for count in [0, 1, 2, 5, 3000]:
        work = group.isend(values(group.rank, count, name), right, tag=count)
        out = np.empty(count, values(0, 1, name).dtype)
        status = group.recv(out, left, tag=count)
        work.wait()
        assert_same(out, values(left, count, name))
        assert (status.source, status.tag, status.count) == (left, count, count)


@pytest.mark.parametrize("count", SIZES)
def test_all_send_before_any_receives(group, count):
    right, left = ring_peers(group)
    works = [group.isend(values(group.rank, count, "float64", seed=i), right, tag=i) for i in range(3)]
    for i in (2, 0, 1):  # tags may be taken in any order
        out = np.empty(count)
        group.recv(out, left, tag=i)
        assert_same(out, values(left, count, "float64", seed=i))
    for work in works:
        work.wait()


@pytest.mark.parametrize("count", [1, 3000, 20_000])
def test_a_rank_that_only_calls_collectives_carries_its_messages(group, count):
    alone, most = 20, 1000  # collectives before the message is sent, and after
    x, arrived = values(0, 300_000, "float64"), np.zeros(count)
    for _ in range(5):
        out = np.empty(300_000)
        receive = group.irecv(out, 0, tag=1) if group.rank == 1 % group.size else None
        send = None
        for i in range(alone + most):
            if group.rank == 0 and i == alone:
                send = group.isend(x, 1 % group.size, tag=1)
            arrived[:] = send is not None and send.done()  # only the sender ever asks
            if group.allreduce(arrived)[0] > 0:
                break
        else:
            pytest.fail(f"the message has not moved in {most} collectives")
        send is None or send.wait()
        receive is None or receive.wait()
        assert receive is None or np.array_equal(out, x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("count", [16_000, 130_000, 300_000])
def test_a_message_arrives_though_its_sender_has_stopped_waiting(group, count):
    mine = values(group.rank, count, "float64")
    place = f"samestep-arrived-{group.bcast(np.array([os.getpid()]))[0]}-{count}"
    for turn in range(4):  # each path that a message may take
        flag = Path(tempfile.gettempdir()) / f"{place}-{turn}"
        if group.rank == 0:
            with pytest.raises(ss.MismatchError):
                group.sendrecv(mine, 1, np.empty(count), 1)
            # Elsewhere than in shared memory a long message needs its sender.
            until = time.monotonic() + 30
            while group.transport == "shm" and not flag.exists():
                assert time.monotonic() < until, "the message has not arrived"
        else:
            group.send(np.ones(3, "f4"), 0)
            out = np.empty(count)
            group.recv(out, 0)
            assert_same(out, values(0, count, "float64"))
            flag.touch()
        group.barrier()
        flag.unlink(missing_ok=True)


def test_equal_tags_stay_in_order(group):
    right, left = ring_peers(group)
    counts = [1, 20_000, 0, 7, 100_000, 3]  # small and large ones must not overtake each other
    works = [group.isend(np.full(n, float(i)), right, tag=5) for i, n in enumerate(counts)]
    for i, n in enumerate(counts):
        out = np.empty(n)
        assert group.recv(out, left, 5).count == n
        assert_same(out, np.full(n, float(i)))
    for work in works:
        work.wait()


def test_receives_posted_first_meet_messages_in_order(group):
    right, left = ring_peers(group)
    outs = [np.empty(1000) for _ in range(4)]
    receives = [group.irecv(out, left, tag=1) for out in outs]
    for i in range(4):
        group.send(np.full(1000, float(i)), right, tag=1)
    for i, receive in enumerate(receives):
        status = receive.wait()
        assert status.source == left
        assert_same(outs[i], np.full(1000, float(i)))


def test_from_anyone_with_any_tag(group):
    works = [group.isend(np.full(3, 10 * group.rank + tag), 0, tag) for tag in (3, 4)]
    if group.rank == 0:
        seen = []
        for _ in range(2 * group.size):
            out = np.empty(3, "int64")
            status = group.recv(out, ss.ANY, ss.ANY)
            assert_same(out, np.full(3, 10 * status.source + status.tag))
            seen.append((status.source, status.tag))
        assert sorted(seen) == [(rank, tag) for rank in range(group.size) for tag in (3, 4)]
        assert all(seen.index((r, 3)) < seen.index((r, 4)) for r in range(group.size))  # in order per pair
    for work in works:
        work.wait()


def test_one_tag_from_anyone(group):
    works = [group.isend(np.full(1, float(group.rank)), 0, tag=tag) for tag in (9, 8)]
    if group.rank == 0:
        for tag in (8, 9):
            sources = {group.recv(np.empty(1), tag=tag).source for _ in range(group.size)}
            assert sources == set(range(group.size))
    for work in works:
        work.wait()


def test_any_tag_from_one_rank(group):
    right, left = ring_peers(group)
    works = [group.isend(np.full(1, float(tag)), right, tag) for tag in (2**31 - 1, 0, 77)]
    assert [group.recv(np.empty(1), left).tag for _ in works] == [2**31 - 1, 0, 77]
    for work in works:
        work.wait()


def test_sendrecv(group):
    right, left = ring_peers(group)
    for count in SIZES:
        out = np.empty(count, "float32")
        x = values(group.rank, count, "float32")
        status = group.sendrecv(x, right, out, left)
        assert status.source == left
        assert_same(out, values(left, count, "float32"))
        assert_same(x, values(group.rank, count, "float32"))


def test_a_message_to_oneself(group):
    work = group.isend(np.arange(5), group.rank, tag=2)
    out = np.empty(5, int)
    assert group.recv(out, group.rank, 2).source == group.rank
    work.wait()
    assert_same(out, np.arange(5))


def test_collectives_and_messages_do_not_meet(group):
    right, left = ring_peers(group)
    work = group.isend(np.arange(4.0), right)
    x = np.ones(4)
    group.allreduce(x)
    assert_same(x, np.full(4, float(group.size)))
    out = np.empty(4)
    group.recv(out, left)
    work.wait()
    assert_same(out, np.arange(4.0))


def test_more_elements_or_another_dtype_than_is_received_is_told_and_the_message_is_consumed(group):
    right, left = ring_peers(group)
    works = [group.isend(x, right, 1) for x in (np.ones(5, "f4"), np.ones(5, "f4"), np.arange(5.0))]
    for out in (np.empty(4, "f4"), np.empty(5, "i4")):
        before = out.tobytes()
        with pytest.raises(ss.MismatchError, match=f"rank {left}"):
            group.recv(out, left, 1)
        assert out.tobytes() == before
    out = np.empty(5)
    group.recv(out, left, 1)
    assert_same(out, np.arange(5.0))
    for work in works:
        work.wait()


def test_the_sent_array_may_be_changed_after_send_has_returned(group):
    right, left = ring_peers(group)
    x = np.full(10, float(group.rank))
    works = []
    for i in range(3):
        x[:] = i
        works.append(group.isend(x.copy(), right))
    if group.size == 2 and group.rank == 0:
        x[:] = 5
        group.send(x, right, tag=9)
        x[:] = 6
    for i in range(3):
        out = np.empty(10)
        group.recv(out, left, tag=0)
        assert_same(out, np.full(10, float(i)))
    if group.size == 2 and group.rank == 1:
        group.recv(out, left, tag=9)
        assert_same(out, np.full(10, 5.0))
    for work in works:
        work.wait()
