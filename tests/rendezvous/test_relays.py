"""A process between two that know the secret: it may forward their bytes, and gains nothing by it."""

import json
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import samestep as ss
from ranks import PATIENCE_S, Room, connect
from relays import Relay
from samestep._util import handshake, start
from samestep._util.frames import Channel
from samestep.launch import frames
from samestep.rendezvous import TCPStore
from strangers import frame

SECRET = b"known to two"


@pytest.fixture
def master():
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=30, secret=SECRET)
    yield store
    assert store.add("alive", 1) == 1
    store.close()


def test_a_store_behind_a_translated_address_serves_its_clients_and_shows_nothing(master):
    with Relay(("127.0.0.1", master.port)) as relay:
        client = TCPStore(*relay.place[:2], timeout=30, secret=SECRET)
        client.set("where", "a private value")
        assert client.get("where") == master.get("where") == b"a private value"
        client.close()
    assert not any(words in relay.heard for words in (SECRET, b"private", b"where"))


def test_a_relay_cannot_add_a_request(master):
    request = frame(b'["set", ["k"], "stolen"]')
    for added in (request, request + bytes(16), Channel(most=100, keys=(bytes(64),) * 2).seal(b"Q", ["x"])):
        with Relay(("127.0.0.1", master.port), to_server=added) as relay:
            client = TCPStore(*relay.place[:2], timeout=30, secret=SECRET)
            with pytest.raises(ss.PeerLostError):
                client.add("n", 1)
            client.close()
    assert not master.check(["k"]) and not master.check(["n"])


def test_a_relay_cannot_add_an_answer(master):
    answer = frame(b'["stolen"]', b"R")
    for added in (answer, answer + bytes(16)):
        with Relay(("127.0.0.1", master.port), to_client=added) as relay:
            client = TCPStore(*relay.place[:2], timeout=30, secret=SECRET)
            with pytest.raises(ss.UnavailableError, match="the other end has not sent"):
                client.compare_set("k", "", "right")
            client.close()


@pytest.mark.parametrize("change", ["address", "rank"])
def test_a_relay_between_ranks_is_refused_on_both(change):
    """Because it is at another port than rank 0, or where that is not seen, because it says which rank connects."""
    relays, timeout = [], PATIENCE_S if change == "address" else 2.0

    def between(said):
        host, port, *rest = json.loads(said[0])
        if not relays:
            relays.append(Relay((host, port), to_server=bytes(4)))
        said[0] = json.dumps([host, relays[0].place[1], *rest]).encode()

    room = Room(2, between)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        if change == "rank":
            patch.setattr(handshake, "place", lambda *addresses: b"")
        outcomes = [pool.submit(connect, room, rank, timeout=timeout) for rank in range(2)]
        errors = [outcome.exception(PATIENCE_S) for outcome in outcomes]
    if change == "address":
        assert all(isinstance(error, ss.UnavailableError) for error in errors), errors
        assert all("rank 1 cannot connect to rank 0" in str(error) for error in errors)
        assert "forwards connections to another address" in str(errors[0])
    else:
        assert isinstance(errors[0], ss.TimeoutError), errors  # nobody has said who it is
        outcomes[1].result()[0][0].close()
    for relay in relays:
        relay.close()


def bootstrap(place, *others):
    return {
        "host": "the launcher's",
        "network": "of the launcher",
        "addresses": [*others, place[0]],
        "port": place[1],
        "token": SECRET.decode(),
        "ranks": [0],
        "size": 1,
    }


def test_a_relay_cannot_start_a_program_by_an_agent(tmp_path):
    """It is at an address that the launcher's host has, too, as those of bridges for containers are."""
    stolen = tmp_path / "stolen"
    order = {"argv": ["touch", str(stolen)], "env": {}, "cwd": "/", "stdin": "", "live": []}
    with socket.create_server(("127.0.0.1", 0)) as launcher:
        port = launcher.getsockname()[1]
        served = threading.Thread(target=greet_one, args=(launcher,))
        served.start()
        added = Channel(most=1 << 20).seal(frames.START, order)
        with Relay(("127.0.0.1", port), host="127.0.0.2", port=port, to_client=added) as relay:
            said = run_agent(bootstrap(relay.place))
        launcher.shutdown(socket.SHUT_RDWR)
        served.join()
    assert relay.heard  # the agent did ask it
    assert not stolen.exists()
    assert said.returncode == 1
    assert f"127.0.0.2:{port} (who answers there does not know this job's secret, or forwards" in said.stderr


def greet_one(launcher):
    """The launcher's part, up to the point at which the agent has to be one of its own."""
    try:
        link, _ = launcher.accept()
    except OSError:
        return
    with link:
        greeting = handshake.Greeting(
            handshake.AGENT, SECRET, handshake.place(link.getsockname(), link.getpeername())
        )
        while not greeting.done:
            data = link.recv(4096)
            if not data:
                return
            link.sendall(greeting.feed(data))


def run_agent(where):
    return subprocess.run(
        [sys.executable, "-I", "-S", start.__file__, "launch.agent"],
        env=os.environ | {"SAMESTEP_LAUNCH": json.dumps(where)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_an_agent_does_not_ask_its_own_host(monkeypatch):
    """Where another user may listen at the port of the launcher."""
    from samestep.launch import network

    own = network.addresses()
    with socket.create_server(("", 0)) as listener:
        said = run_agent(bootstrap((own[0], listener.getsockname()[1]), *own[1:]))
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert said.returncode == 1
    assert "(an address of this host itself)" in said.stderr
