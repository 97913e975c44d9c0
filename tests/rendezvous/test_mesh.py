"""Connections between all ranks, which are threads here."""

import json
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import samestep as ss
from ranks import PATIENCE_S, Room, connect
from samestep._util import handshake, strangers
from samestep.rendezvous import interfaces, mesh

LOOPBACK = {4: "127.0.0.1", 6: "::1"}


def check_and_close(made):
    for rank, row in enumerate(made):
        assert [link is None for link, *_ in row] == [r == rank for r in range(len(made))]
        for other, (link, where, keys) in enumerate(row):
            assert where.startswith(f"host{other} (")
            assert keys == made[other][rank].keys[::-1]
            if link is not None:
                link.setblocking(True)
                link.sendall(bytes([rank]))
    keys = [key for row in made for link in row if link.socket for key in link.keys]
    assert (
        len(set(keys)) == len(keys) / 2
    )  # each is of one direction of one connection, and known at both ends
    assert {len(key) for key in keys} == {32}
    for row in made:
        for other, (link, *_) in enumerate(row):
            if link is not None:
                assert link.recv(100) == bytes([other])
    for row in made:
        for link, *_ in row:
            if link is not None:
                link.close()


@pytest.mark.parametrize("version", [4, 6])
def test_each_link_leads_to_its_rank(version):
    if version == 6 and "::1" not in interfaces.addresses("lo"):
        pytest.skip("the loopback interface has no IPv6 address")
    room = Room(5)
    with ThreadPoolExecutor(5) as pool:
        made = list(pool.map(lambda rank: connect(room, rank, LOOPBACK[version]), range(5)))
    check_and_close(made)


def place_of_rank_0(said):
    return tuple(json.loads(said[0])[:2])


def impostor(place, secret):
    """One that speaks the language and knows another secret."""
    link = socket.create_connection(place, timeout=PATIENCE_S)
    greeting = handshake.Client(
        handshake.LINK, secret, handshake.place(link.getpeername(), link.getsockname())
    )
    link.sendall(greeting.hello)

    def go_on():
        with pytest.raises(PermissionError):
            while True:
                greeting.feed(link.recv(greeting.n_missing))
        link.sendall(bytes(32) + bytes([0, 0, 0, 1]))
        assert link.recv(1) == b""  # it is shown the door

    return link, go_on


def test_strangers_are_dropped_and_the_job_goes_on(caplog):
    came, acts = [], []

    def come(said):
        place = place_of_rank_0(said)
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 1000, b""):
            came.append(socket.create_connection(place, timeout=PATIENCE_S))
            came[-1].sendall(words)
        gone = socket.create_connection(place, timeout=PATIENCE_S)
        gone.close()
        link, go_on = impostor(place, b"another secret")
        came.append(link)
        acts.append(threading.Thread(target=go_on))
        acts[-1].start()

    room = Room(3, come)
    with caplog.at_level(logging.WARNING, "samestep"), ThreadPoolExecutor(3) as pool:
        first, second = (pool.submit(connect, room, rank) for rank in (0, 1))
        # Rank 2 says what it has to say, and connects when the impostor has been sent away.
        third_rank = room.rendezvous(2)
        exchange = third_rank.allgather_bytes

        def exchange_and_wait(mine):
            said = exchange(mine)
            acts[0].join(PATIENCE_S)
            return said

        third_rank.allgather_bytes = exchange_and_wait
        third = mesh.connect_all(third_rank, "127.0.0.1", ["host0", "host1", "host2"], PATIENCE_S)
        made = [first.result(PATIENCE_S), second.result(PATIENCE_S), third]
    check_and_close(made)
    assert not acts[0].is_alive()
    said = [record.message for record in caplog.records]
    assert sum("a stranger at the port of rank 0" in text for text in said) == 1
    assert "does not speak this protocol" in said[0] or "closed the connection" in said[0]
    for link in came:
        link.close()


def test_more_silent_strangers_than_are_waited_for_do_not_keep_a_rank_out(monkeypatch):
    monkeypatch.setattr(strangers, "_MAX_CONNECTIONS", 3)
    came = []

    def come(said):
        came.extend(socket.create_connection(place_of_rank_0(said), timeout=PATIENCE_S) for _ in range(8))

    room = Room(2, come)
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda rank: connect(room, rank), range(2)))
    check_and_close(made)
    for link in came:
        link.close()


def test_ranks_that_connect_at_once_do_not_push_each_other_out(monkeypatch):
    monkeypatch.setattr(strangers, "_MAX_CONNECTIONS", 1)
    room = Room(12)
    with ThreadPoolExecutor(12) as pool:
        made = list(pool.map(lambda rank: connect(room, rank, timeout=20.0), range(12)))
    check_and_close(made)


def test_a_rank_that_cannot_be_reached_is_named_on_all():
    def lie(said):
        host, _ = place_of_rank_0(said)
        with socket.create_server((host, 0)) as closed:
            port = closed.getsockname()[1]
        said[0] = said[0].replace(str(place_of_rank_0(said)[1]).encode(), str(port).encode())

    room = Room(2, lie)
    with ThreadPoolExecutor(2) as pool:
        outcomes = [pool.submit(connect, room, rank) for rank in range(2)]
        for outcome in outcomes:
            with pytest.raises(ss.UnavailableError, match=r"rank 1 cannot connect to rank 0 at host0 \(127"):
                outcome.result(PATIENCE_S)


def test_a_rank_that_does_not_connect_is_named_at_the_deadline():
    room = Room(2)

    def silent_rank_1():
        room.rendezvous(1).allgather_bytes(b'["127.0.0.1", 1, "", ""]')

    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(connect, room, 0, timeout=0.2)
        pool.submit(silent_rank_1).result(PATIENCE_S)
        with pytest.raises(ss.TimeoutError, match=r"rank 0 at host0 .* no connection with rank 1 at host1"):
            waiting.result(PATIENCE_S)


def test_the_address_follows_the_route_and_the_named_interface():
    assert interfaces.own_address("localhost", {}, several_hosts=False) in LOOPBACK.values()
    assert interfaces.own_address("", {}, several_hosts=False) == "127.0.0.1"
    named = {"SAMESTEP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "nic9"}
    assert interfaces.own_address("127.0.0.1", named, several_hosts=True) == "127.0.0.1"
    if "::1" in interfaces.addresses("lo"):
        assert interfaces.own_address("::1", {"GLOO_SOCKET_IFNAME": "lo"}, several_hosts=False) == "::1"


def test_what_hinders_one_rank_is_told_to_all():
    room = Room(3)
    with ThreadPoolExecutor(3) as pool:
        made = [pool.submit(connect, room, rank, hindrance="no key" * (rank == 1)) for rank in range(3)]
        for each in made:
            with pytest.raises(ss.UnavailableError, match=r"^no key$"):
                each.result()
