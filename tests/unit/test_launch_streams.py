"""Lines out of bytes, frames out of bytes, and what is shown of them."""

import array
import contextlib
import fcntl
import os
import pty
import select
import socket
import termios
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samestep._util import handshake, strangers
from samestep._util.frames import Channel
from samestep._util.network_identity import network_identity
from samestep.group import printing
from samestep.launch import agent, find_launcher, frames, network
from samestep.launch import output as output_module
from samestep.launch.arguments import Options
from samestep.launch.lines import LONGEST_LINE, Lines
from samestep.launch.loop import Loop
from samestep.launch.output import Logs, Output
from samestep.launch.ranks import Ranks

pieces = st.lists(st.text(alphabet="ab\n\r", max_size=5).map(str.encode), max_size=30)


@given(pieces)
def test_lines_are_what_was_written_however_it_was_cut(parts):
    lines = Lines()
    got = [lines.feed(part) for part in parts]
    assert all(whole.endswith(b"\n") for whole in got if whole)
    written = b"".join(parts)
    _, _, remainder = written.rpartition(b"\n")
    assert lines.unfinished == remainder
    assert b"".join(got) == written[: len(written) - len(remainder)]
    assert lines.remainder() == (remainder + b"\n" if remainder else b"")
    assert lines.remainder() == b""


def test_memory_is_bounded():
    bar = Lines()
    n = sum(bar.feed(b"\r%6d%%" % i).count(b"\n") for i in range(100_000))
    assert n > 5 and len(bar.unfinished) < 1 << 17
    endless = Lines()
    whole = b"".join(endless.feed(b"x" * 65536) for _ in range(300))
    assert whole == b"x" * LONGEST_LINE + b"\n"


def channels():
    """Both ends of a connection, after the handshake."""
    client, server = (
        end(handshake.AGENT, b"known", b"here 1") for end in (handshake.Client, handshake.Greeting)
    )
    server.feed(client.feed(server.feed(client.hello)))
    assert server.done
    return [end.channel(most=100, readable=frames.READABLE) for end in (client, server)]


sent_frames = st.lists(
    st.tuples(st.sampled_from([b"o", b"E", b"X"]), st.binary(max_size=40)), min_size=1, max_size=10
)


@given(sent_frames, st.integers(1, 50))
def test_frames_survive_any_cut(sent, step):
    for one, other in (channels(), [Channel(most=100), Channel(most=100)]):
        stream = b"".join(one.seal(kind, payload) for kind, payload in sent)
        parts = [stream[i : i + step] for i in range(0, len(stream), step)]
        assert [frame for part in parts for frame in other.feed(part)] == sent


@given(sent_frames, st.data())
def test_a_frame_is_taken_as_it_was_sent_in_its_place_or_not_at_all(sent, data):
    """Of a stream in which a relay changes a byte, or repeats, swaps, drops or adds a frame."""
    one, other = channels()
    sealed = [one.seal(kind, payload) for kind, payload in sent]
    i = data.draw(st.integers(0, len(sealed) - 1))
    foreign = channels()[0].seal(b"X", b"") if i % 2 else Channel(most=100).seal(b"X", b"")
    wrong = bytearray(sealed[i])
    wrong[data.draw(st.integers(0, len(wrong) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    changes = [
        [bytes(wrong)],
        [foreign],
        [foreign, sealed[i]],
        [sealed[i], sealed[i]],
        sealed[i + 1 : i + 2] or [foreign],
    ]
    change = data.draw(st.sampled_from(changes))
    taken = []
    with contextlib.suppress(ValueError):
        for part in (*sealed[:i], *change, *sealed[i + 1 :]):
            taken.extend(other.feed(part))
    assert taken == sent[: len(taken)] and len(taken) <= i + (change[0] == sealed[i])


def test_what_is_not_readable_is_encrypted():
    one, _ = channels()
    secret = b"SAMESTEP_SECRET=0123456789"
    assert secret not in one.seal(frames.START, secret) + one.seal(frames.START, secret)
    assert secret in one.seal(frames.LINES[1], secret)


def test_both_ends_have_the_same_keys_and_each_connection_others():
    seen = set()
    for place in (b"10.0.0.1 80", b"10.0.0.1 81", b""):
        client, server = (
            end(handshake.LINK, b"known", place) for end in (handshake.Client, handshake.Greeting)
        )
        server.feed(client.feed(server.feed(client.hello)))
        assert client.keys == server.keys[::-1]
        assert all(len(key) == 32 for key in client.keys)
        seen |= {*client.keys}
    assert len(seen) == 6


@pytest.mark.parametrize(
    ("asked", "real"), [("172.17.0.1", "10.0.0.1"), ("172.17.0.1",) * 2, ("127.0.0.1",) * 2]
)
def test_ends_that_mean_another_address_or_that_of_another_host_do_not_meet(asked, real, monkeypatch):
    """Relays may be at one address of both hosts, and each connect within its own."""
    client = handshake.Client(handshake.LINK, b"known", handshake.place((asked, 80), (asked, 9)))
    monkeypatch.setattr(handshake, "network_identity", lambda: "of the other host")
    server = handshake.Greeting(handshake.LINK, b"known", handshake.place((real, 80), (real, 9)))
    with pytest.raises(PermissionError, match="forwards connections"):
        client.feed(server.feed(client.hello))


def test_a_huge_length_is_refused_before_it_arrives():
    with pytest.raises(ValueError, match="at most 100"):
        list(Channel(most=100).feed(Channel(most=200).seal(b"o", b"x" * 101)[:10]))


@pytest.fixture
def screen(monkeypatch):
    """Makes an Output whose stdout and stderr are pipes, or one terminal; `shows(x)`: x is what arrives there."""
    opened = []
    write = os.write

    def make(*, on_terminal=False, **options):
        ours, theirs = pty.openpty() if on_terminal else os.pipe()
        opened.extend((ours, theirs))
        monkeypatch.setattr(output_module, "redraws", lambda fd: on_terminal and fd in (1, 2))
        monkeypatch.setattr(output_module, "columns", lambda fd: 20)
        monkeypatch.setattr(os, "write", lambda fd, data: write(theirs if fd in (1, 2) else fd, data))
        output = Output(Loop(), **({"raw": False, "logs": {}, "on_lost": pytest.fail} | options))

        def shows(expected):
            while output._waiting:
                output._write(output._waiting[0][0])
            arrived = b""
            while len(arrived) < len(expected):
                assert select.select([ours], [], [], 10)[0], arrived
                arrived += os.read(ours, 65536).replace(b"\r\n", b"\n")
            return arrived == expected

        output.shows = shows
        return output

    yield make
    for fd in opened:
        os.close(fd)


def test_every_line_has_its_rank(screen):
    output = screen()
    output.lines(0, 1, b"one\ntwo\n")
    output.lines(12, 2, b"\n")
    output.status(2, b"samestep: x\n")
    assert output.shows(b"[0] one\n[0] two\n[12] \nsamestep: x\n")


def test_a_line_that_names_its_rank_gets_no_second_prefix(screen):
    """As those that `println` writes on rank 0 for all; an empty line and others beside them keep theirs."""
    head = printing.head(1, 12).encode()
    output = screen()
    output.lines(0, 1, head + b"loss 1 / 2\n\n1 / 2\n" + head + b"\n")
    assert output.shows(head + b"loss 1 / 2\n[0] \n[0] 1 / 2\n" + head + b"\n")


def test_a_progress_bar_in_a_log_leaves_its_last_state_or_nothing(screen, tmp_path):
    logs = Logs(Options(1, "train.py", logs=str(tmp_path)))
    output = screen(logs=logs)
    output.lines(0, 2, b"\r 10%\r 20%\r100%\r\n\nwindows\r\n\r 10%\r     \r\n\r 50%\r     \rerror\n")
    shown = [b"100%", b"", b"windows", b"error"]
    assert output.shows(b"".join(b"[0] " + line + b"\n" for line in shown))
    assert (tmp_path / "rank_0.err").read_bytes() == b"".join(line + b"\n" for line in shown)
    for file in logs.values():
        os.close(file)


@pytest.mark.parametrize(
    ("env", "width", "expected"),
    [
        ({"TERM": "xterm"}, 80, True),
        ({"TERM": "xterm", "CI": "false"}, 80, True),
        ({"TERM": "dumb"}, 80, False),
        ({}, 80, False),
        ({"TERM": "xterm", "CI": "true"}, 80, False),
        ({"TERM": "xterm-color", "JPY_PARENT_PID": "7"}, 80, False),
        ({"TERM": "xterm"}, 0, False),
    ],
)
def test_which_terminals_redraw_a_line(env, width, expected):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, array.array("H", [24 if width else 0, width, 0, 0]))
    reading, writing = os.pipe()
    try:
        assert output_module.redraws(theirs, env) == expected
        assert not output_module.redraws(writing, env)
        assert output_module.columns(theirs) == 80
    finally:
        for fd in (ours, theirs, reading, writing):
            os.close(fd)


def test_raw_has_none_and_bytes_stay_as_they_are(screen):
    output = screen(raw=True)
    output.lines(0, 1, b"\xff\r1\r2\n")
    assert output.shows(b"\xff\r1\r2\n")


def test_logs_of_a_node_are_named_by_the_ranks_of_the_whole_job(tmp_path):
    """So that nodes that share a folder do not write over each other's files."""
    for node in range(2):
        logs = Logs(Options(2, "train.py", n_nodes=2, node_rank=node, logs=str(tmp_path)))
        assert sorted(logs) == [(rank, fd) for rank in (2 * node, 2 * node + 1) for fd in (1, 2)]
        for file in logs.values():
            os.close(file)
    names = [f"rank_{rank}.{end}" for rank in range(4) for end in ("out", "err")]
    assert sorted(os.listdir(tmp_path)) == sorted(names)


def test_raw_logs_hold_what_was_written(screen, tmp_path):
    logs = Logs(Options(2, "train.py", logs=str(tmp_path / "new" / "dir")))
    output = screen(logs=logs, raw=True)
    output.lines(1, 2, b"e\rE\n")
    output.lines(0, 1, b"o\n")
    found = {file.name: file.read_bytes() for file in (tmp_path / "new" / "dir").iterdir()}
    assert found == {"rank_0.out": b"o\n", "rank_0.err": b"", "rank_1.out": b"", "rank_1.err": b"e\rE\n"}
    for file in logs.values():
        os.close(file)


def test_a_progress_bar_stays_below_the_lines_of_others(screen):
    output = screen(on_terminal=True)
    clear = b"\r\x1b[K"
    output.unfinished(0, 2, b"\r 10%")
    output.lines(1, 1, b"hello\n")
    output.unfinished(0, 2, b"\r 10%\r 20% and more than the terminal has room for")
    output.lines(0, 2, b"\r 10%\r 20%\r100%\n")
    expected = (
        b"[0]  10%"
        + clear
        + b"[1] hello\n"
        + b"[0]  10%"
        + clear
        + b"[0]  20% and more t"
        + clear
        + b"[0] 100%\n"
    )
    assert output.shows(expected)


def test_one_turn_writes_all_that_a_pipe_has_room_for_and_does_not_block():
    reading, writing = os.pipe()
    try:
        room = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 32_768)
        output = Output(Loop(), raw=True, logs={}, on_lost=pytest.fail, shown=())
        data = os.urandom(room + 70_001)
        output.status(writing, data)
        written = 0
        while output.n_waiting:
            output._write(writing)
            assert output.n_waiting == max(0, len(data) - written - room)
            got = os.read(reading, 1 << 20)
            assert got == data[written : written + room]
            written += len(got)
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("room", [1 << 16, 1 << 20])
@pytest.mark.parametrize("rate", [10**n for n in range(3, 11)])
def test_who_writes_much_is_read_seldom_and_never_waits_for_it(rate, room):
    """Between two reads comes less than the pipe takes: bytes per second, at any rate that a rank may have."""
    moment, found = agent._GATHER_S, 0
    for _ in range(40):
        found = min(int(rate * moment), room, agent._AT_ONCE)
        moment = agent.next_moment(moment, found, room)
    if rate <= 100_000:
        assert moment == agent._GATHER_S  # a person reads that
    else:
        assert moment * rate <= room / 4
        assert moment * rate >= min(room / 16, 0.03 * rate)


def agent_of(loop, server, token, **hello):
    """A connection of an agent, whose other end is served by `loop` meanwhile."""
    link = socket.create_connection(server.getsockname(), timeout=30)

    def greet():
        with contextlib.suppress(PermissionError):
            channel = find_launcher._greet(link, token)
            link.sendall(channel.seal(frames.HELLO, {"host": "elsewhere", **hello}))

    thread = threading.Thread(target=greet)
    thread.start()
    while thread.is_alive():
        loop.after(0.01, lambda: None)
        loop.turn()
    return link


def test_strangers_are_dropped_and_delay_nobody(screen, monkeypatch):
    monkeypatch.setattr("samestep._util.strangers._PROOF_S", 1000.0)  # for silent ones, and no reason here
    loop = Loop()
    server = socket.create_server(("127.0.0.1", 0))
    output = screen()
    ranks = Ranks(loop, server, "secret", 1, output)
    silent = socket.create_connection(server.getsockname(), timeout=5)
    strangers, unproved = [agent_of(loop, server, "guess", rank=0, size=1)], Channel(most=100)
    for words in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"H\xff\xff\xff\xff",
        unproved.seal(b"o", b"x"),
        unproved.seal(b"H", []),
        unproved.seal(b"H", {"token": "secret", "host": "elsewhere", "rank": 0, "size": 1}),
        handshake.AGENT + b"n" * 16 + b"p" * 32,
    ):
        strangers.append(socket.create_connection(server.getsockname(), timeout=5))
        strangers[-1].sendall(words)
    for hello in ({"rank": "0"}, {"rank": 1 << 70}, {"host": ["a"]}, {"more": 1}):
        strangers.append(agent_of(loop, server, "secret", **{"rank": 0, "size": 1, **hello}))
    friend = agent_of(loop, server, "secret", rank=0, size=1)
    while not ranks.complete:
        loop.turn()
    assert next(iter(ranks)).host == "elsewhere"
    loop.after(0.0, lambda: None)
    for stranger in strangers:
        if (
            stranger.fileno() < 0
        ):  # it has left by itself, for the launcher did not prove that it knows its token
            continue
        loop.after(60.0, lambda: pytest.fail("a stranger is still connected"))
        stranger.settimeout(0.05)
        while True:
            try:
                while stranger.recv(100):
                    continue
                break
            except TimeoutError:
                loop.turn()
            except ConnectionResetError:
                break
    ranks.close()
    assert silent.recv(1) == b""
    for link in (silent, friend, *strangers):
        link.close()
    for rank in ranks:
        ranks.mark_lost(rank)


@pytest.mark.parametrize("hello", [{"rank": 0, "size": 2}, {"rank": 0, "size": 1}])
def test_another_world_than_asked_for_is_a_problem(hello, screen):
    loop = Loop()
    server = socket.create_server(("127.0.0.1", 0))
    ranks = Ranks(loop, server, "secret", 1, screen())
    links = [agent_of(loop, server, "secret", rank=0, size=1), agent_of(loop, server, "secret", **hello)]
    while not ranks.problem:
        loop.turn()
    assert ranks.problem == f"mpirun started rank 0 of {hello['size']} on elsewhere; 1 were asked for"
    ranks.close()
    for link in links:
        link.close()
    for rank in ranks:
        ranks.mark_lost(rank)


def test_an_agent_waits_for_a_launcher_that_was_stopped(monkeypatch):
    """Its kernel takes the connection; the answer comes when it goes on."""
    monkeypatch.setattr(find_launcher, "_CONNECT_TIMEOUT_S", 0.05)
    server, _ = network.listen(everywhere=False)
    port = server.getsockname()[1]
    where = {"host": socket.gethostname(), "network": network_identity(), "addresses": [], "port": port}
    where["token"] = "known"
    with contextlib.closing(server):
        agents: list[object] = []
        thread = threading.Thread(target=lambda: agents.append(find_launcher.connect(where)))
        thread.start()
        thread.join(0.5)  # ten times as long as a connection may take
        link, _ = server.accept()
        with link:
            greeting = handshake.Greeting(
                handshake.AGENT, b"known", handshake.place(link.getsockname(), link.getpeername())
            )
            while not greeting.done:
                link.sendall(greeting.feed(link.recv(4096)))
            thread.join(30)
        assert agents
        agents[0][0].close()


def test_the_time_of_strangers_does_not_pass_while_nobody_looks(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(strangers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    found = strangers.Strangers("the port", print)
    found.add("link")
    now[0] += 12.0
    assert found.late() == []
    for _ in range(9):
        now[0] += 1.0
        assert found.late() == []
    now[0] += 1.0
    assert found.late() == ["link"]


TRACEBACK = b'Traceback (most recent call last):\n  File "x", line 1\nKeyError: %s\n'


def test_equal_tracebacks_are_shown_once_with_all_their_ranks(screen):
    output = screen()
    for rank, key in enumerate([b"a", b"a", b"b", b"a"]):
        whole = b"warning\n" + TRACEBACK % key
        first, second, rest = whole.split(b"\n", 2)
        output.lines(rank, 2, first + b"\n" + second + b"\n")
        output.lines(rank, 2, rest)
    output.lines(0, 1, b"to stdout\n")
    expected = b"".join(b"[%d] warning\n" % rank for rank in range(4)) + b"[0] to stdout\n"
    assert output.shows(expected)
    output.status(2, b"samestep: the end\n")
    expected = _indented(b"[0-1, 3] ", TRACEBACK % b"a") + _indented(b"[2] ", TRACEBACK % b"b")
    assert output.shows(expected + b"samestep: the end\n")


def test_a_traceback_is_shown_soon_though_its_rank_goes_on(screen, monkeypatch):
    monkeypatch.setattr(output_module, "_HOLD_S", 0.01)
    output = screen()
    output.lines(1, 2, TRACEBACK % b"a")
    output.lines(1, 2, b"goes on\n")
    output._loop.turn()
    output.lines(1, 2, b"further\n")
    assert output.shows(_indented(b"[1] ", TRACEBACK % b"a" + b"goes on\nfurther\n"))


@pytest.mark.parametrize(
    "first", [b'  File "x", line 1\n', b"  + Exception Group Traceback (most recent call last):\n"]
)
def test_other_errors_of_python_are_shown_once_too(screen, first):
    output = screen()
    for rank in range(2):
        output.lines(rank, 2, first)
    output.release()
    assert output.shows(b"[0-1] " + first)


def test_what_is_held_is_bounded_and_raw_output_is_not_held(screen):
    output = screen()
    output.lines(0, 2, TRACEBACK % (b"x" * (1 << 20)))
    output.lines(0, 2, b"y\n")
    assert not output._held
    raw = screen(raw=True)
    raw.lines(0, 2, TRACEBACK % b"a")
    assert raw.shows(TRACEBACK % b"a")


def _indented(prefix, lines):
    return b"".join(prefix + line for line in lines.splitlines(keepends=True))
