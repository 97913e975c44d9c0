"""The server of a store over TCP: where it listens, what answers in its place, and its death."""

import multiprocessing
import os
import socket
import time

import pytest
import samestep as ss
from ranks import on_ranks
from samestep.rendezvous import TCPStore


def test_another_program_answers():
    def act(rank):
        if rank:
            with pytest.raises(ss.UnavailableError, match="another program answers"):
                TCPStore("127.0.0.1", server.getsockname()[1], timeout=30)
        else:
            link, _ = server.accept()
            link.sendall(b"220 mail ready\r\n")
            link.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        assert on_ranks(2, act) == [None, None]


def test_nobody_answers():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(ss.TimeoutError, match=rf"127\.0\.0\.1:{port} within 0\.1 s: .*refused"):
            TCPStore("127.0.0.1", port, timeout=0.1)


def test_a_server_that_never_speaks_is_given_up():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(ss.TimeoutError, match=r"within 0\.2 s"),
    ):
        TCPStore("127.0.0.1", server.getsockname()[1], timeout=0.2)


@pytest.mark.parametrize("host", ["224.0.0.1", "ff02::1"])
def test_multicast_is_refused(host):
    with pytest.raises(ss.InvalidArgumentError, match="multicast"):
        TCPStore(host, 0, is_master=True)


def test_not_an_address_of_this_host():
    with pytest.raises(ss.UnavailableError, match=r"192\.0\.2\.1:0: that is not an address of this host"):
        TCPStore("192.0.2.1", 0, is_master=True)


@pytest.mark.parametrize(
    ("host", "reached_at"), [("::1", "::1"), ("", "127.0.0.1"), ("", "::1"), ("localhost", "127.0.0.1")]
)
def test_addresses(host, reached_at):
    if ":" in host + reached_at and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    master = TCPStore(host, 0, is_master=True)
    other = TCPStore(reached_at, master.port, timeout=30)
    assert other.add("n", 1) == 1
    assert (master.host, other.host, other.port) == (host, reached_at, master.port)
    other.close()
    master.close()


def _serve(pipe):
    master = TCPStore("127.0.0.1", 0, is_master=True)
    pipe.send(master.port)
    master.get("start signal")
    pipe.close()
    os._exit(9)  # without a leave notice


def test_the_server_died():
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs,))
    process.start()
    port = ours.recv()
    stores = [TCPStore("127.0.0.1", port, timeout=60) for _ in range(2)]
    begin = time.monotonic()

    def act(rank):
        if rank == 0:
            return stores[0].get("never")
        return stores[1].set("start signal", "")

    waits, _ = on_ranks(2, act)
    assert isinstance(waits, ss.PeerLostError)
    assert "127.0.0.1:" in str(waits)
    process.join()
    ours.close()
    theirs.close()
    with pytest.raises(ss.PeerLostError):
        stores[1].get("never")
    assert time.monotonic() - begin < 20
    for store in stores:
        store.close()
