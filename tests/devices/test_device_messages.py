"""Messages of arrays on devices, which the sender and the receiver copy in segments where NCCL has no part."""

from __future__ import annotations

import fake_arrays
import numpy as np
import pytest
import samestep as ss

STAGED = ["staged", "staged-native", "staged-direct"]  # with segments of 64 KiB, and of 2 MiB for messages
WORLDS = [*STAGED, "aware"]  # the same; MPI gets device pointers
FEW = ["staged-native", "aware"]
LONG = 2_000_000  # of four segments
# less than a segment, exactly one, and more
COUNTS = (0, 524_289, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 524_288, 2_700_001)))


@pytest.fixture(autouse=True)
def reachable(request, monkeypatch):
    """Lets MPI reach the memory of devices, and nothing else."""
    if "[aware-" in request.node.name:
        monkeypatch.setenv("FAKE_GPU_HOST_ACCESS", "1")


counts = pytest.mark.parametrize("count", COUNTS)


def row(seed, count):
    return (np.arange(count) % 1009 + 10 * seed).astype("float32")


def on_device(values):
    return fake_arrays.Array.of(values, fake_arrays.Stream())


def in_numpy(values):
    return values.copy()


def got(x):
    return x if isinstance(x, np.ndarray) else x.get()


places = pytest.mark.parametrize(
    "sender, receiver",
    [
        (on_device, on_device),
        (on_device, in_numpy),
        (in_numpy, on_device),
        pytest.param(in_numpy, in_numpy, marks=pytest.mark.slow),
    ],
    ids=["device-device", "device-host", "host-device", "host-host"],
)


@pytest.mark.ranks(1, 3, backends=WORLDS)
@counts
@places
def test_each_end_may_be_on_the_host_or_on_a_device(group, count, sender, receiver):
    """The receiver has room for more, which stays as it was."""
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    sent, out = sender(row(group.rank, count)), receiver(np.full(count + 40_000, -1, "float32"))
    work = group.isend(sent, right, tag=3)
    assert group.probe(left, 3).count == count
    status = group.recv(out, timeout=60)
    work.wait(host=True)
    assert (status.source, status.tag, status.count) == (left, 3, count)
    np.testing.assert_array_equal(got(out)[:count], row(left, count))
    assert (got(out)[count:] == -1).all()


@pytest.mark.ranks(2, backends=FEW)
@places
def test_a_message_is_matched_whatever_others_wait_for(group, sender, receiver):
    """More messages than may copy at a time, of which the last one is received first."""
    n_messages, count = 40, 600_000
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    works = [group.isend(sender(row(group.rank + k, count)), right, tag=k) for k in range(n_messages)]
    for k in reversed(range(n_messages)):
        out = receiver(np.zeros(count, "float32"))
        group.recv(out, left, tag=k, timeout=60)
        np.testing.assert_array_equal(got(out), row(left + k, count))
    for work in works:
        work.wait(host=True)


@pytest.mark.ranks(2, backends=FEW)
@places
def test_messages_with_one_tag_arrive_in_order(group, sender, receiver):
    lengths = [1_700_000, 3, 600_000, 0, 1_100_000]
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    sends = [group.isend(sender(row(group.rank + k, n)), right) for k, n in enumerate(lengths)]
    outs = [receiver(np.zeros(1_700_000, "float32")) for _ in lengths]
    receives = [group.irecv(out, left) for out in outs]
    for k, (work, out) in enumerate(zip(receives, outs, strict=True)):
        assert work.wait(host=True).count == lengths[k]
        np.testing.assert_array_equal(got(out)[: lengths[k]], row(left + k, lengths[k]))
    for work in sends:
        work.wait(host=True)


@pytest.mark.ranks(2, backends=FEW)
@places
def test_a_message_that_does_not_fit_is_thrown_away(group, sender, receiver):
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    works = [group.isend(sender(row(group.rank, n)), right) for n in (2_000_000, 900_000)]
    with pytest.raises(
        ss.MismatchError, match=rf"recv of 1000000 float32.* rank {left} sent 2000000 float32"
    ):
        group.recv(receiver(np.zeros(1_000_000, "float32")), left, timeout=60)
    out = receiver(np.zeros(900_000, "float32"))
    group.recv(out, left, timeout=60)
    np.testing.assert_array_equal(got(out), row(left, 900_000))
    for work in works:
        work.wait(host=True)


@pytest.mark.ranks(2, backends=WORLDS)
def test_a_late_peer_is_named(group):
    x = on_device(row(0, LONG))
    work = group.isend(x, 1, tag=5) if group.rank == 0 else group.irecv(x, 0, tag=6)
    text = f"send of {LONG} float32 to rank 1" if group.rank == 0 else f"recv of {LONG} float32 from rank 0"
    with pytest.raises(ss.TimeoutError, match=text):
        work.wait(0.2, host=True)
    group.barrier()  # nobody is late any more
    if group.rank == 0:
        group.send(on_device(row(1, LONG)), 1, tag=6, timeout=60)
        work.wait(60, host=True)
    else:
        work.wait(60, host=True)
        np.testing.assert_array_equal(x.get(), row(1, LONG))
        group.recv(x, 0, tag=5, timeout=60)
    np.testing.assert_array_equal(x.get(), row(0, LONG))


@pytest.mark.ranks(2, backends=STAGED)
@places
def test_no_more_than_a_segment_is_copied_at_once(group, sender, receiver):
    """So that copies to the host, the message there and copies back overlap."""
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    sent, out = sender(row(group.rank, LONG)), receiver(np.zeros(2 * LONG, "float32"))
    group.barrier()
    fake_arrays.longest_copy()
    work = group.isend(sent, right)
    group.recv(out, left, timeout=60)
    work.wait(host=True)
    on_devices = (sender is on_device) + (receiver is on_device)
    assert min(on_devices, 1) <= fake_arrays.longest_copy() <= 2 << 20
