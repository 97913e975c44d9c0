"""What programs for MPI expect of messages: nobody, a probe, buffers with room to spare; and objects beside arrays."""

import numpy as np
import pytest
import samestep as ss
from reference import assert_same

pytestmark = pytest.mark.ranks(1, 2, 3)

COUNTS = [0, 1, 7, 3000, 200_000]  # in one line, in one frame, and longer than any


def ring_peers(group):
    return (group.rank + 1) % group.size, (group.rank - 1) % group.size


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", ["blocking", "posted", "strided"])
def test_a_longer_buffer_keeps_what_the_message_does_not_fill(group, count, kind):
    right, left = ring_peers(group)
    sent = np.arange(count, dtype="f4") + group.rank
    work = group.isend(sent, right, 3)
    out = np.full((count + 5, 2), -1.0, "f4")[:, 0] if kind == "strided" else np.full(count + 5, -1.0, "f4")
    status = group.recv(out, left, 3) if kind == "blocking" else group.irecv(out, left, 3).wait()
    assert status == (left, 3, count)
    assert_same(out[:count], np.arange(count, dtype="f4") + left)
    assert_same(out[count:], np.full(5, -1.0, "f4"))
    work.wait()


@pytest.mark.parametrize("count", COUNTS)
def test_a_probe_tells_what_comes_and_leaves_it(group, count):
    right, left = ring_peers(group)
    works = [group.isend(np.full(count, 1.0), right, 8), group.isend(np.full(count + 1, 2.0), right, 9)]
    for tag, more, value in ((9, 1, 2.0), (8, 0, 1.0)):  # in another order than they were sent
        assert group.probe(left, tag) == (left, tag, count + more)
        assert group.iprobe(ss.ANY, tag) == (left, tag, count + more)
        out = np.empty(count + more)
        assert group.recv(out, left, tag).count == count + more
        assert_same(out, np.full(count + more, value))
    for work in works:
        work.wait()
    group.barrier()
    assert group.iprobe() is None
    group.barrier()
    works = [group.isend(np.zeros(2), right), group.irecv(np.empty(2), left)]  # as before any probe
    for work in works:
        work.wait()


def test_a_probe_waits_for_a_message_and_finds_that_of_an_object(group):
    right, left = ring_peers(group)
    if group.size == 1:
        group.isend_object("late", 0, 4)
        status = group.probe(tag=4)
    elif group.rank == 0:
        status = group.probe(tag=4)  # before anything is sent
        group.send_object("late", right, 4)
    else:
        group.send_object("late", right, 4)
        status = group.probe(tag=4)
    assert (status.source, status.tag) == (left, 4)
    assert status.count > 0
    assert group.recv_object(status.source, status.tag) == "late"


def test_a_receive_that_was_posted_before_gets_the_message_and_not_the_probe(group):
    right, left = ring_peers(group)
    out = np.empty(3)
    receive = group.irecv(out, left, 1)
    group.isend(np.arange(3.0), right, 1)
    group.isend(np.arange(4.0), right, 1)
    assert group.probe(left, 1).count == 4
    assert receive.wait().count == 3
    assert group.recv(np.empty(4), left, 1).count == 4


def test_a_probe_in_vain_times_out_and_harms_nothing(group):
    with pytest.raises(ss.TimeoutError, match=r"probe for a message.* tag 5"):
        group.probe(tag=5, timeout=0.05)
    assert group.iprobe(group.rank, 5) is None
    group.barrier()  # a neighbour's message must not come before the probe has ended
    right, left = ring_peers(group)
    group.isend(np.ones(1), right, 5)
    assert group.recv(np.empty(1), left, 5).count == 1


def test_nobody_sends_and_receives_nothing(group):
    out = np.full(3, 7.0)
    nobody = (-1, -1, 0)
    group.send(np.ones(3), None)
    group.isend(np.ones(3), None, 5).wait()
    assert group.recv(out, None) == group.irecv(out, None).wait() == nobody
    assert (
        group.sendrecv(np.ones(3), None, out, None)
        == group.isendrecv(np.ones(3), None, out, None).wait()
        == nobody
    )
    group.send_object("x", None)
    group.isend_object("x", None).wait()
    assert group.recv_object(None) is None
    assert group.irecv_object(None).wait() is None
    assert group.probe(None) == group.iprobe(None) == nobody
    assert_same(out, np.full(3, 7.0))


def test_a_chain_with_two_ends_exchanges_its_halo(group):
    right = group.rank + 1 if group.rank + 1 < group.size else None
    left = group.rank - 1 if group.rank > 0 else None
    cells = np.full(4, float(group.rank))
    ghosts = np.full(2, -1.0)
    group.sendrecv(cells[-1:], right, ghosts[:1], left)
    group.sendrecv(cells[:1], left, ghosts[1:], right)
    assert_same(ghosts, np.array([group.rank - 1.0, -1.0 if right is None else group.rank + 1.0]))


@pytest.mark.parametrize("size", [0, 1000, 300_000])
def test_an_object_met_by_a_receive_of_an_array_is_told_and_nothing_is_left_of_it(group, size):
    right, left = ring_peers(group)
    works = [group.isend_object(b"x" * size, right, 2), group.isend(np.arange(6.0), right, 2)]
    with pytest.raises(ss.MismatchError, match=f"rank {left} sent an object.*recv_object"):
        group.recv(np.empty(1, "u1"), left, 2)
    out = np.empty(6)
    group.recv(out, left, 2)
    assert_same(out, np.arange(6.0))
    for work in works:
        work.wait()


@pytest.mark.parametrize("count", [0, 100, 70_000])
def test_an_array_met_by_a_receive_of_an_object_is_told_and_nothing_is_left_of_it(group, count):
    right, left = ring_peers(group)
    works = [group.isend(np.zeros(count), right, 2), group.isend_object("next", right, 2)]
    with pytest.raises(ss.MismatchError, match=f"recv_object.*rank {left} sent {count} float64.*by recv"):
        group.recv_object(left, 2)
    assert group.recv_object(left, 2) == "next"
    for work in works:
        work.wait()


def test_several_receives_of_objects_may_be_posted(group):
    right, left = ring_peers(group)
    receives = [group.irecv_object(left, 6) for _ in range(3)]
    for obj in ("a", b"b" * 400_000, 3):
        group.isend_object(obj, right, 6).wait() if group.size > 1 else group.send_object(obj, right, 6)
    assert [receive.wait() for receive in receives] == ["a", b"b" * 400_000, 3]


@pytest.mark.parametrize("tag", [2**31, 2**70, -2])
def test_tags_that_are_no_tags(group, tag):
    calls = [
        lambda: group.send(np.ones(1), 0, tag),
        lambda: group.isend(np.ones(1), 0, tag),
        lambda: group.recv(np.ones(1), 0, tag),
        lambda: group.send_object(1, 0, tag),
        lambda: group.recv_object(0, tag),
        lambda: group.probe(0, tag),
    ]
    for call in calls:
        with pytest.raises(ss.InvalidArgumentError, match=f"tag {tag} is .*; tags are 0..2147483647"):
            call()


@pytest.mark.parametrize("rank", [2**31, -(2**70)])
def test_ranks_that_no_group_has(group, rank):
    x = np.ones(1)
    for call in (
        lambda: group.send(x, rank),
        lambda: group.recv(x, rank),
        lambda: group.bcast(x, rank),
        lambda: group.reduce(x, root=rank),
        lambda: group.bcast_object(x, root=rank),
        lambda: group.split(rank),
    ):
        with pytest.raises(ss.InvalidArgumentError, match=str(rank)):
            call()


def test_a_root_may_be_given_by_position(group):
    root = group.size - 1
    assert group.bcast(np.array([group.rank]), root) == [root]
    assert group.ibcast(np.array([group.rank]), root).wait() == [root]
    assert (group.gather(group.rank, root) is None) == (group.rank != root)
    assert group.scatter(np.arange(group.size) if group.rank == root else None, root) == group.rank
    assert group.reduce(1, "sum", root) == (group.size if group.rank == root else 1)
    assert group.bcast_object(group.rank, root) == root


def test_buffers_by_position_as_in_mpi(group):
    y = np.empty((group.size, 1))
    assert group.allgather(np.array([float(group.rank)]), y) is y
    assert_same(y[:, 0], np.arange(float(group.size)))
    for verb in ("gather", "bcast", "scatter"):
        with pytest.raises(TypeError, match=f"{verb}: root must be an int, but it is an array; .*out="):
            getattr(group, verb)(np.ones(group.size), y)
    with pytest.raises(TypeError, match=r"^alltoall: too many arguments"):
        group.alltoall(y, y, 0)
