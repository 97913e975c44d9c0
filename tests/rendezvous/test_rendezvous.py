"""Ranks meet in threads of this process over TCP, files and stores, or learn which of them did not come."""

import logging
import threading
import time

import pytest
import samestep as ss
from ranks import FreePort, held, on_ranks
from samestep.rendezvous import HashStore, TCPStore, join, open_rendezvous, rendezvous


@pytest.fixture(params=["tcp", "file"])
def place(request, tmp_path):
    """A URL; nothing may be left at it."""
    before = held()
    with FreePort() as port:
        yield f"tcp://127.0.0.1:{port}" if request.param == "tcp" else f"file://{tmp_path}/rendezvous"
    assert held() == before
    assert not list(tmp_path.iterdir())


def errors_of(found):
    return [type(error).__name__ for error in found]


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_everybody_gets_what_everybody_gave(place, n):
    def act(rank):
        met = open_rendezvous(place, rank, n, timeout=60)
        try:
            assert (met.rank, met.size) == (rank, n)
            given = [b"", bytes([rank]) * 1000, bytes(range(256)) * rank]
            return [met.allgather_bytes(data) for data in given]
        finally:
            met.close()
            met.close()

    expected = [[b""] * n, [bytes([r]) * 1000 for r in range(n)], [bytes(range(256)) * r for r in range(n)]]
    assert on_ranks(n, act) == [expected] * n


def test_exchanges_leave_nothing_in_the_store():
    store = HashStore()

    def act(rank):
        met = join(store, rank, 2, timeout=60)
        met.allgather_bytes(b"")
        early = len(store._table._values)
        for _ in range(20):
            met.allgather_bytes(b"x" * 100)
        return early

    assert min(on_ranks(2, act)) + 6 >= len(store._table._values)
    assert store.num_keys() == 0


def test_a_place_serves_again_at_once(place):
    """The first rank to leave may join again before the others have left."""

    def act(rank):
        for i in range(5):
            met = open_rendezvous(place, rank, 2, timeout=60)
            assert met.allgather_bytes(b"%d" % i) == [b"%d" % i] * 2
            met.allgather_bytes(b"the end")
            met.close()

    if place.startswith("tcp"):
        pytest.skip("the next store opens when the one before has closed: rank 1 might come too early")
    assert on_ranks(2, act) == [None, None]


def test_who_does_not_come_is_named_everywhere(place):
    for patience in (0.5, 5.0, 20.0):  # the first that is long enough for rank 2 to come

        def act(rank, patience=patience):
            return None if rank == 1 else open_rendezvous(place, rank, 3, timeout=patience + rank)

        found = on_ranks(3, act)
        if not str(found[0]).startswith("ranks 1-2 of 3 did not join at "):
            break
    assert found[1] is None
    assert errors_of(found[::2]) == ["TimeoutError"] * 2
    where = place.partition("://")[2]
    assert str(found[0]) == str(found[2])
    assert str(found[0]).startswith("rank 1 of 3 did not join at ")
    assert where in str(found[0])


def test_rank_0_does_not_come():
    with (
        FreePort() as port,
        pytest.raises(ss.TimeoutError, match=rf"rank 0 at 127\.0\.0\.1:{port}.* within 0\.2 s"),
    ):
        open_rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, timeout=0.2)


def test_a_rank_that_has_joined_already(place):
    """The newcomer is refused; the ranks that were there meet."""
    refused = threading.Event()

    def act(rank):
        if rank == 1:
            assert refused.wait(60)
        met = open_rendezvous(place, rank, 2, timeout=60)
        if rank == 0:
            assert met.allgather_bytes(b"0") == [b"0", b"1"]
        else:
            met.allgather_bytes(b"1")
        met.close()

    def newcomer():
        with pytest.raises(ss.UnavailableError) as refusal:
            open_rendezvous(place, 0, 2, timeout=60)
        refused.set()
        return str(refusal.value)

    def both(i):
        if i < 2:
            return act(i)
        wait_until_joined(place, 0)
        return newcomer()

    none, nothing, text = on_ranks(3, both)
    assert (none, nothing) == (None, None)
    assert "rank 0" in text
    assert place.partition("://")[2] in text


def wait_until_joined(place, rank):
    """Reads the store from outside."""
    from samestep.rendezvous import FileStore, PrefixStore
    from samestep.rendezvous.store import RESERVED

    if place.startswith("tcp"):
        store = TCPStore("127.0.0.1", int(place.rpartition(":")[2]), timeout=60)
    else:
        store = FileStore(place[7:])
    PrefixStore(RESERVED, store).wait([f"rank {rank}"], 60)
    store.close()


def test_another_world_size(place):
    def act(rank):
        return open_rendezvous(place, rank, [2, 3][rank], timeout=60)

    found = on_ranks(2, act)
    assert errors_of(found) == ["MismatchError"] * 2
    assert str(found[0]) == str(found[1])
    assert "world_size is " in str(found[0])
    assert "2 on rank 0" in str(found[0]) and "3 on rank 1" in str(found[0])


def test_the_port_is_taken_by_another_program():
    with (
        FreePort() as port,
        TCPServer(port),
        pytest.raises(ss.UnavailableError, match=rf"127\.0\.0\.1:{port}.*choose"),
    ):
        open_rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=60)


def TCPServer(port):
    import socket

    return socket.create_server(("127.0.0.1", port))


def test_who_gives_nothing_is_named():
    store = HashStore()
    mets = on_ranks(3, lambda rank: join(store, rank, 3, timeout=60))
    assert mets[0].size == 3
    for met in mets:
        met.seconds = 0.1
    for rank, missing in ((0, "ranks 1-2"), (2, "rank 1")):  # one after another, so that nobody else is late
        with pytest.raises(ss.TimeoutError, match=f"nothing came from {missing} of 3 within 0.1 s"):
            mets[rank].allgather_bytes(b"")


def test_rank_0_leaves_during_an_exchange():
    def act(rank):
        met = open_rendezvous(url, rank, 2, timeout=60)
        try:
            return met.allgather_bytes(b"") if rank else None
        finally:
            met.close()

    with FreePort() as port:
        url = f"tcp://127.0.0.1:{port}"
        found = on_ranks(2, act)
    assert errors_of(found) == ["NoneType", "PeerLostError"]
    assert "rank 0" in str(found[1])


def meet_once(condition, place, n, first):
    """`first` waits for the other ranks, which come once the condition holds, or after 30 s."""
    all_met = threading.Barrier(n)

    def act(rank):
        deadline = time.monotonic() + 30
        while rank != first and not condition() and time.monotonic() < deadline:
            time.sleep(0.01)
        met = open_rendezvous(place, rank, n, timeout=60)
        all_met.wait(60)
        met.close()

    assert on_ranks(n, act) == [None] * n


def test_waiting_is_reported(caplog, monkeypatch, place):
    def said():
        return [record for record in caplog.records if record.name == "samestep"]

    monkeypatch.setattr(rendezvous, "_LOG_INTERVAL_S", 0.05)
    with caplog.at_level(logging.INFO, "samestep"):
        meet_once(lambda: len(said()) >= 2, place, 4, first=0)
    assert len(said()) >= 2
    assert {record.levelname for record in said()} == {"INFO"}
    assert said()[0].message.startswith("rank 0 waits: ranks 1-3 of 4 did not join at ")
    assert "rank 0 did" in said()[0].message
    monkeypatch.setattr(rendezvous, "_WARN_AFTER_S", 0.1)
    caplog.clear()

    def is_warned():
        return "WARNING" in {record.levelname for record in said()}

    meet_once(is_warned, place, 4, first=0)
    assert is_warned()


def test_waiting_for_rank_0_is_reported(caplog, monkeypatch):
    monkeypatch.setattr(rendezvous, "_LOG_INTERVAL_S", 0.05)
    with FreePort() as port, caplog.at_level(logging.INFO, "samestep"):
        meet_once(lambda: caplog.records, f"tcp://127.0.0.1:{port}", 2, first=1)
    assert f"rank 1 of 2 waits for rank 0 at 127.0.0.1:{port}: " in caplog.records[0].message
