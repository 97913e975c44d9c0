"""A store over TCP: strangers, secrets, workers, and what is left when it ends."""

import gc
import http.client
import os
import socket
import struct
import threading
import time
import weakref

import pytest
import samestep as ss
from ranks import held, on_ranks
from samestep._util import handshake
from samestep.rendezvous import TCPStore
from samestep.rendezvous.tcp_store import Client


@pytest.fixture
def master():
    before = held()
    with_server = TCPStore("127.0.0.1", 0, is_master=True, timeout=30)
    yield with_server
    with_server.close()
    assert held() == before


def client(master, **more):
    return TCPStore("localhost", master.port, timeout=30, **more)


def refuses(*_):
    raise ss.UnavailableError("it is another job's")


HELLO = handshake.STORE + b"n" * 16


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!cI", b"Q", 0xFFFFFFFF),
        b"\0" * 100_000,
        handshake.STORE[:-1] + b"?" + b"n" * 100,
        HELLO + b"p" * 32,  # no proof
        HELLO + b"p" * 32 + b"Q\0\0\0\x02[]",
    ],
)
def test_strangers_are_disconnected_at_once(master, said, monkeypatch):
    monkeypatch.setattr("samestep._util.strangers._PROOF_S", 1000.0)  # for silent ones, and no reason here
    with socket.create_connection(("127.0.0.1", master.port), timeout=30) as stranger:
        try:
            stranger.sendall(said)
            while stranger.recv(4096):
                continue
        except ConnectionResetError:
            pass
    assert master.add("n", 1) == 1


def test_a_web_client_gets_no_answer(master):
    web = http.client.HTTPConnection("127.0.0.1", master.port, timeout=30)
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        web.request("GET", "/")
        web.getresponse()
    web.close()


def test_silent_strangers_delay_nobody(master):
    silent = [socket.create_connection(("127.0.0.1", master.port)) for _ in range(100)]
    for stranger in silent[:50]:
        stranger.send(HELLO[:20])
    other = client(master)
    begin = time.monotonic()
    for _ in range(100):
        other.add("n", 1)
    assert time.monotonic() - begin < 20
    other.close()
    for stranger in silent:
        stranger.close()


def test_a_client_that_sends_nonsense_is_disconnected_alone(master):
    other, bad = client(master), client(master)
    link = bad._client._idle[0].socket
    link.sendall(b'Q\0\0\0\x05["no"')
    assert link.recv(10) == b""
    assert other.add("n", 1) == 1
    other.close()
    bad.close()


def test_another_secret_is_refused_and_both_ends_are_told(master, monkeypatch, caplog):
    monkeypatch.setenv("SAMESTEP_SECRET", "other")
    with pytest.raises(
        ss.UnavailableError, match=rf"localhost:{master.port} is another job's: SAMESTEP_SECRET"
    ):
        client(master)
    with_secret = TCPStore("127.0.0.1", 0, is_master=True)
    client(with_secret).close()
    monkeypatch.setenv("SAMESTEP_SECRET", "others")
    with pytest.raises(ss.UnavailableError, match="SAMESTEP_SECRET"):
        client(with_secret)
    within = time.monotonic() + 10
    while "give all ranks the same SAMESTEP_SECRET" not in caplog.text and time.monotonic() < within:
        with_secret.add("n", 1)  # the thread of the server has a turn
    assert "give all ranks the same SAMESTEP_SECRET" in caplog.text
    with_secret.close()


def test_the_port_is_taken(master):
    with pytest.raises(
        ss.UnavailableError, match=rf"127\.0\.0\.1:{master.port}: the port is taken.*choose another"
    ):
        TCPStore("127.0.0.1", master.port, is_master=True)


def test_workers_are_waited_for(master):
    opened = on_ranks(3, lambda rank: client(master, world_size=3))
    assert [store.check([]) for store in opened] == [True] * 3
    assert master.num_keys() == 0  # only the users' are counted
    for store in opened:
        store.close()


def test_workers_that_do_not_come():
    with pytest.raises(ss.TimeoutError, match=r"1 of 2 workers .* within 0\.2 s"):
        TCPStore("127.0.0.1", 0, world_size=2, is_master=True, timeout=0.2)
    TCPStore("127.0.0.1", 0, world_size=2, is_master=True, timeout=0.2, wait_for_workers=False).close()


def test_a_store_that_is_dropped_leaves_nothing():
    before = held()
    store = TCPStore("127.0.0.1", 0, is_master=True)
    store.set("a", "b")
    del store
    gc.collect()
    assert held() == before


def test_a_closed_store_says_so(master):
    other = client(master)
    other.close()
    other.close()
    with pytest.raises(ss.NotInitializedError, match="closed"):
        other.get("a")


@pytest.mark.filterwarnings("ignore:os.fork")  # JAX, if another test has loaded it, is not used here
def test_a_fork_does_not_disturb_its_parent(master):
    other = client(master)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if other.add("n", 1) == 1 else 2
            other.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert other.add("n", 1) == 2
    other.close()


def test_a_store_that_opens_late_keeps_nothing_of_its_callers(master, monkeypatch):
    """As at once after the meeting before, whose store may still be closing."""
    connect_local, n_calls = Client._connect_local, 0

    def late(self, timeout):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 1:
            raise ConnectionRefusedError
        return connect_local(self, timeout)

    monkeypatch.setattr(Client, "_connect_local", late)
    monkeypatch.setattr(Client, "_connect_tcp", refuses)

    def caller():
        world = threading.Event()
        client(master).close()
        return weakref.ref(world)

    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()
    assert n_calls == 2
