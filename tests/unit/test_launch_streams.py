"""Lines out of bytes, frames out of bytes, and what is shown of them."""

import os
import pty
import select
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samestep.launch import frames
from samestep.launch.arguments import Options
from samestep.launch.lines import LONGEST_LINE, Lines
from samestep.launch.loop import Loop
from samestep.launch.output import Output, open_logs
from samestep.launch.ranks import Ranks

pieces = st.lists(st.text(alphabet="ab\n\r", max_size=5).map(str.encode), max_size=30)


@given(pieces)
def test_lines_are_what_was_written_however_it_was_cut(parts):
    lines = Lines()
    got = [lines.feed(part) for part in parts]
    assert all(whole.endswith(b"\n") for whole in got if whole)
    written = b"".join(parts)
    _, _, rest = written.rpartition(b"\n")
    assert lines.unfinished == rest
    assert b"".join(got) == written[: len(written) - len(rest)]
    assert lines.rest() == (rest + b"\n" if rest else b"")
    assert lines.rest() == b""


def test_memory_is_bounded():
    bar = Lines()
    n = sum(bar.feed(b"\r%6d%%" % i).count(b"\n") for i in range(100_000))
    assert n > 5 and len(bar.unfinished) < 1 << 17
    endless = Lines()
    whole = b"".join(endless.feed(b"x" * 65536) for _ in range(300))
    assert whole == b"x" * LONGEST_LINE + b"\n"


@given(
    st.lists(st.tuples(st.sampled_from([b"o", b"X"]), st.binary(max_size=40)), max_size=10),
    st.integers(1, 50),
)
def test_frames_survive_any_cut(sent, step):
    stream = b"".join(frames.encode(kind, payload) for kind, payload in sent)
    decoder = frames.Decoder(most=100)
    parts = [stream[i : i + step] for i in range(0, len(stream), step)]
    assert [frame for part in parts for frame in decoder.feed(part)] == sent


def test_a_huge_length_is_refused_before_it_arrives():
    with pytest.raises(ValueError, match="at most 100"):
        list(frames.Decoder(most=100).feed(frames.encode(b"o", b"x" * 101)[:10]))


@pytest.fixture
def screen(monkeypatch):
    """Makes an Output whose stdout and stderr are pipes, or one terminal; `shows(x)`: x is what arrives there."""
    opened = []
    write = os.write

    def make(*, terminal=False, **options):
        ours, theirs = pty.openpty() if terminal else os.pipe()
        opened.extend((ours, theirs))
        monkeypatch.setattr(os, "isatty", lambda fd: terminal and fd in (1, 2))
        monkeypatch.setattr(os, "write", lambda fd, data: write(theirs if fd in (1, 2) else fd, data))
        monkeypatch.setenv("COLUMNS", "20")
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
    output.plain(2, b"samestep: x\n")
    assert output.shows(b"[0] one\n[0] two\n[12] \nsamestep: x\n")


def test_raw_has_none_and_bytes_stay_as_they_are(screen):
    output = screen(raw=True)
    output.lines(0, 1, b"\xff\r1\r2\n")
    assert output.shows(b"\xff\r1\r2\n")


def test_tail_keeps_the_last_20_lines_of_stderr(screen):
    output = screen()
    output.lines(1, 2, b"".join(b"line %d\n" % i for i in range(30)))
    output.lines(1, 1, b"not this\n")
    output.lines(0, 2, b"nor this\n")
    assert output.tail(1) == [b"[1] line %d" % i for i in range(10, 30)]
    assert output.tail(2) == []


def test_logs_hold_what_was_written_without_prefix(screen, tmp_path):
    logs = open_logs(str(tmp_path / "new" / "dir"), Options(2, "train.py").log_files())
    output = screen(logs=logs)
    output.lines(1, 2, b"e\rE\n")
    output.lines(0, 1, b"o\n")
    found = {file.name: file.read_bytes() for file in (tmp_path / "new" / "dir").iterdir()}
    assert found == {"rank_0.out": b"o\n", "rank_0.err": b"", "rank_1.out": b"", "rank_1.err": b"e\rE\n"}
    for file in logs.values():
        os.close(file)


def test_a_progress_bar_stays_below_the_lines_of_others(screen):
    output = screen(terminal=True)
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


def agent_of(server, **hello):
    link = socket.create_connection(server.getsockname(), timeout=5)
    link.sendall(frames.encode(frames.HELLO, {"host": "elsewhere", **hello}))
    return link


def test_strangers_are_dropped_and_delay_nobody(screen):
    loop = Loop()
    server = socket.create_server(("127.0.0.1", 0))
    ranks = Ranks(loop, server, "secret", 1, screen())
    silent = socket.create_connection(server.getsockname(), timeout=5)
    strangers = [agent_of(server, token="guess", rank=0, size=1)]
    for words in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"H\xff\xff\xff\xff",
        frames.encode(b"o", b"x"),
        frames.encode(b"H", []),
    ):
        strangers.append(socket.create_connection(server.getsockname(), timeout=5))
        strangers[-1].sendall(words)
    friend = agent_of(server, token="secret", rank=0, size=1)
    while not ranks.complete:
        loop.turn()
    assert next(iter(ranks)).host == "elsewhere"
    loop.after(0.0, lambda: None)
    for stranger in strangers:
        loop.after(5.0, lambda: pytest.fail("a stranger is still connected"))
        stranger.settimeout(0.05)
        while True:
            try:
                assert stranger.recv(1) == b""
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
        ranks.give_up(rank)


@pytest.mark.parametrize("hello", [{"rank": 0, "size": 2}, {"rank": 0, "size": 1}])
def test_another_world_than_asked_for_is_a_problem(hello, screen):
    loop = Loop()
    server = socket.create_server(("127.0.0.1", 0))
    ranks = Ranks(loop, server, "secret", 1, screen())
    links = [agent_of(server, token="secret", rank=0, size=1), agent_of(server, token="secret", **hello)]
    while not ranks.problem:
        loop.turn()
    assert ranks.problem == f"mpirun started rank 0 of {hello['size']} on elsewhere; 1 were asked for"
    ranks.close()
    for link in links:
        link.close()
    for rank in ranks:
        ranks.give_up(rank)
