"""A process outside the job affects nothing but its own connection."""

import logging
import os
import select
import socket
import stat
import threading
import time
from pathlib import Path

import pytest
import samestep as ss
from ranks import FreePort, held, on_ranks
from samestep._util import strangers
from samestep.rendezvous import FileStore, TCPStore, open_rendezvous, same_user, tcp_server
from strangers import NESTED, NOBODY, as_nobody, frame, is_closed, needs_root, raw_client


@pytest.fixture(params=["open", "loopback", "secret"])
def master(request, monkeypatch):
    """A store that is open to everybody, to this user, or to who knows the secret."""
    if request.param == "secret":
        monkeypatch.setenv("SAMESTEP_SECRET", "known")
    before = held()
    store = TCPStore("" if request.param == "open" else "127.0.0.1", 0, is_master=True, timeout=30)
    store.kind = request.param
    yield store
    assert store.add("alive", 1) >= 1
    store.close()
    assert held() == before


@pytest.fixture
def open_master():
    store = TCPStore("", 0, is_master=True, timeout=30)
    yield store
    assert store.add("alive", 1) == 1
    store.close()


@pytest.fixture
def public(tmp_path):
    """A folder like /tmp, where every user may make files."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        yield folder


def test_a_store_knows_whether_it_is_private(master):
    other = TCPStore("127.0.0.1", master.port, timeout=30)
    assert master.private == other.private == (master.kind != "open")
    other.close()


@needs_root
def test_another_user_gets_into_no_store_of_the_loopback_interface(master, monkeypatch):
    monkeypatch.delenv("SAMESTEP_SECRET", raising=False)
    port = master.port
    said = as_nobody(lambda: TCPStore("127.0.0.1", port, timeout=5).add("n", 1))
    expected = {"open": "another user's", "loopback": "another user's", "secret": "SAMESTEP_SECRET differs"}
    assert expected[master.kind] in said
    if master.kind != "open":
        said = as_nobody(lambda: raw_client(port).recv(1).hex())
        assert "does not know this job's secret" in said
    assert not master.check(["n"])


@needs_root
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_another_user_who_was_at_the_port_before_rank_0_is_not_believed(host):
    ready, go_on = os.pipe(), os.pipe()

    def act():
        store = TCPStore("127.0.0.1", 0, is_master=True)
        os.write(ready[1], str(store.port).encode())
        os.read(go_on[0], 1)
        return store.num_keys()

    def come():
        port = int(os.read(ready[0], 10))
        try:
            with pytest.raises(
                ss.UnavailableError, match=rf"another user's \(uid {NOBODY}\); choose another port"
            ):
                open_rendezvous(f"tcp://{host}:{port}", 1, 2, timeout=10)
        finally:
            os.write(go_on[1], b"x")

    thread = threading.Thread(target=come)
    thread.start()
    assert as_nobody(act) == 0
    thread.join()
    for fd in (*ready, *go_on):
        os.close(fd)


@needs_root
def test_the_name_beside_a_port_that_another_user_has_taken_is_reported():
    with FreePort() as port:
        name, ready, go_on = f"\0samestep-store-{port}", os.pipe(), os.pipe()

        def act():
            with socket.socket(socket.AF_UNIX) as squatter:
                squatter.bind(name)
                os.write(ready[1], b"x")
                os.read(go_on[0], 1)

        def come():
            os.read(ready[0], 1)
            try:
                with pytest.raises(ss.UnavailableError, match="taken the name; choose another port"):
                    TCPStore("127.0.0.1", port, is_master=True)
            finally:
                os.write(go_on[1], b"x")

        thread = threading.Thread(target=come)
        thread.start()
        assert as_nobody(act) is None
        thread.join()
    for fd in (*ready, *go_on):
        os.close(fd)


def test_a_secret_on_one_side_only_is_reported(monkeypatch):
    master = TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setenv("SAMESTEP_SECRET", "known")
    with pytest.raises(ss.UnavailableError, match="SAMESTEP_SECRET differs"):
        TCPStore("127.0.0.1", master.port, timeout=10)
    with_secret = TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.delenv("SAMESTEP_SECRET")
    with pytest.raises(ss.UnavailableError, match="SAMESTEP_SECRET differs"):
        TCPStore("127.0.0.1", with_secret.port, timeout=10)
    monkeypatch.setenv("SAMESTEP_SECRET", "known")
    with_secret.close()
    master.close()


MALFORMED = [
    b'["add", ["k"], Infinity]',
    b'["add", ["k"], 1e999]',
    b'["add", ["k"], 1.5]',
    b'["add", ["k"], true]',
    b'["add", ["k"], ' + b"9" * 401 + b"]",
    b'["add", [], 1]',
    b'["await", [["k"]], Infinity]',
    b'["await", [["k"]], NaN]',
    b'["await", [["k"]], 1' + b"0" * 400 + b"]",
    b'["await", [["k"]], 1' + b"0" * 5000 + b"]",
    b'["await", [["k"]]]',
    b'["await", [[["k"]]], 1]',
    b'["await", "k", 1]',
    b'["set", ["k"], 1]',
    b'["set", ["k"], ["v"]]',
    b'["set", ["k"], "\\u20ac"]',
    b'["set", [["k"]], "v"]',
    b'["set", {"k": 1}, "v"]',
    b'["set", ["k"]]',
    b'["values", [null]]',
    b'["delete", null]',
    b'["compare_set", ["k"], null, "v"]',
    b'["count", "k"]',
    b'["\\ud800", ["k"]]',
    b'["apply"]',
    b'["__init__"]',
    b"[[]]",
    b"[]",
    b"{}",
    b"null",
    b"1",
    b"",
    b"\xff\xfe",
    b'["set", ["k"], "\xff"]',
    b"\x80\x04N.",
    NESTED,
    b'["set", ' * 50_000,
]


@pytest.mark.parametrize("packet", MALFORMED, ids=lambda packet: repr(packet[:40]))
def test_a_malformed_packet_ends_the_connection_of_its_sender_alone(open_master, packet):
    other = raw_client(open_master.port)
    bad = raw_client(open_master.port)
    bad.sendall(frame(packet))
    assert is_closed(bad)
    other.sendall(frame(b'["count", []]'))
    assert other.recv(100) == frame(b"[0]", b"R")
    other.close()
    bad.close()


@pytest.mark.parametrize("operation", ["add", "set"])
def test_numbers_stay_within_64_bits(open_master, operation):
    largest = (1 << 63) - 1
    if operation == "set":
        open_master.set("k", str(largest))
    else:
        assert open_master.add("k", largest) == largest
    with pytest.raises(ss.InvalidArgumentError, match="would not fit into 64 bits"):
        open_master.add("k", 1)
    assert open_master.get("k") == str(largest).encode()


def test_an_announcement_takes_no_memory_and_a_long_frame_is_refused(open_master):
    announced = [raw_client(open_master.port) for _ in range(4)]
    for link in announced:
        link.sendall(b"Q" + (1 << 28).to_bytes(4, "big"))
    assert all(map(is_closed, announced))
    for link in announced:
        link.close()


def test_all_that_clients_without_a_secret_have_under_way_is_bounded(monkeypatch):
    monkeypatch.setattr(tcp_server, "_MAX_UNPROVED_NBYTES", 1 << 20)
    store = TCPStore("", 0, is_master=True, timeout=30)
    small, large = raw_client(store.port), raw_client(store.port)
    large.sendall(b"Q" + (1 << 20).to_bytes(4, "big") + bytes(900_000))
    small.sendall(b"Q" + (1 << 20).to_bytes(4, "big") + bytes(200_000))
    assert is_closed(large)
    small.settimeout(0.1)
    assert not is_closed(small)
    paths = b"[" + b",".join(b'["%d"]' % i for i in range(5000)) + b"]"
    small.sendall(bytes((1 << 20) - 200_000))  # ends the frame, and the connection
    waits = raw_client(store.port)
    waits.sendall(frame(b'["await", ' + paths + b", 1e9]"))
    assert is_closed(waits)
    for link in (small, large, waits):
        link.close()
    store.close()


def n_closed(links):
    """How many of them the other side has closed."""
    poll = select.poll()
    for link in links:
        poll.register(link, select.POLLIN)
    return len(poll.poll(0))


def test_silent_clients_of_an_open_store_keep_nobody_out_and_delay_no_end(monkeypatch):
    monkeypatch.setattr(strangers, "_MAX_CONNECTIONS", 3)
    monkeypatch.setattr(same_user, "is_loopback", lambda host: False)  # as at an address of a network
    before = held()
    options = {"wait_for_workers": False, "timeout": 30}
    master = TCPStore("127.0.0.1", 0, 2, is_master=True, **options)
    assert not master.private
    greeted = [raw_client(master.port) for _ in range(20)]
    other = TCPStore("127.0.0.1", master.port, 2, **options)
    assert other.add("n", 1) == 1
    greeted += [raw_client(master.port) for _ in range(20)]  # the honest clients are the silent ones now
    assert [store.add("n", 1) for store in (master, other)] == [2, 3]
    assert n_closed(greeted) >= len(greeted) - (3 + 2)
    waiting = [raw_client(master.port) for _ in range(20)]  # who says something is counted, too
    for link in waiting:
        link.sendall(frame(b'["await", [["never"]], 1e6]'))
    assert [store.add("n", 1) for store in (other, master)] == [4, 5]
    assert n_closed(waiting) >= len(waiting) - (3 + 2)
    begin = time.monotonic()
    other.close()
    master.close(linger=60)
    assert time.monotonic() - begin < 30
    for link in (*greeted, *waiting):
        link.close()
    assert held() == before


def test_a_store_that_is_open_to_everybody_keeps_little(monkeypatch):
    monkeypatch.setattr(tcp_server, "_MAX_UNPROVED_NBYTES", 10_000)
    store = TCPStore("", 0, is_master=True, timeout=30)
    store.set("k", b"v" * 5000)
    store.set("k", b"w" * 5000)
    with pytest.raises(ss.InvalidArgumentError, match=r"the store is full: .*SAMESTEP_SECRET"):
        store.set("l", b"v" * 5000)
    with pytest.raises(ss.InvalidArgumentError, match="the store is full"):
        store._apply("values", [["k"]] * 3)
    assert store.delete_key("k")
    store.set("l", b"v" * 5000)
    store.close()


def test_strangers_are_logged_once(caplog):
    with caplog.at_level(logging.WARNING, "samestep"):
        store = TCPStore("127.0.0.1", 0, is_master=True, timeout=30)
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", store.port), timeout=30) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert is_closed(stranger)
        store.close()
    (record,) = caplog.records
    assert f"a stranger at the store's port {store.port}, from 127.0.0.1:" in record.message


# ---- files


@needs_root
@pytest.mark.parametrize("secret", ["", "known"])
@pytest.mark.parametrize("mode", [0o666, 0o600])
@pytest.mark.parametrize("content", [b"", b"samestep store 1 0123\n"])
def test_a_rendezvous_file_of_another_user_is_refused(public, monkeypatch, secret, mode, content):
    monkeypatch.setenv("SAMESTEP_SECRET", secret)
    path = f"{public}/rendezvous"

    def act():
        with open(path, "wb") as file:
            file.write(content)
        os.chmod(path, mode)

    assert as_nobody(act) is None
    with pytest.raises(ss.InvalidArgumentError, match=rf"another user \(uid {NOBODY}\); give another path"):
        open_rendezvous(f"file://{path}", 0, 2, timeout=10)
    assert Path(path).read_bytes() == content


@needs_root
def test_a_rendezvous_file_is_nothing_to_another_user(public):
    path = f"{public}/rendezvous"
    store = FileStore(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert "belongs to another user (uid 0)" in as_nobody(lambda: FileStore(path).num_keys())
    assert "PermissionError" in as_nobody(lambda: Path(path).read_bytes().hex())
    store.close()


@pytest.mark.parametrize("dangling", [False, True])
def test_a_symbolic_link_is_not_followed(tmp_path, dangling):
    target, link = tmp_path / "target", tmp_path / "link"
    if not dangling:
        target.touch(0o600)
    link.symlink_to(target)
    with pytest.raises(ss.InvalidArgumentError, match="symbolic link, which is not followed"):
        FileStore(str(link))
    assert target.exists() is not dangling
    assert dangling or target.read_bytes() == b""


def test_a_file_that_others_may_read_is_replaced_where_it_is_empty(tmp_path):
    path = tmp_path / "rendezvous"
    path.touch()
    path.chmod(0o666)
    with open(path, "rb") as looking:  # of another user, say
        found = on_ranks(
            3,
            lambda rank: [
                m := open_rendezvous(f"file://{path}", rank, 3, timeout=30),
                m.allgather_bytes(b"x"),
            ][1],
        )
        assert found == [[b"x"] * 3] * 3
        assert looking.read() == b""


def test_a_store_that_others_may_write_is_refused(tmp_path):
    path = tmp_path / "rendezvous"
    store = FileStore(str(path))
    path.chmod(0o620)
    before = path.read_bytes()
    with pytest.raises(ss.InvalidArgumentError, match="may be read or written by other users: remove it"):
        FileStore(str(path))
    assert path.read_bytes() == before
    store.close()
