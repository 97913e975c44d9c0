"""Which files may hold a store, and what becomes of them."""

import gc
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest
import samestep as ss
from samestep.rendezvous import FileStore, PrefixStore, file_store


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "store")


def _leave_behind(path):
    store = FileStore(path)
    store.set("key", "value")
    os._exit(0)  # killed, as far as the file is concerned


def left_over(path):
    process = multiprocessing.get_context("spawn").Process(target=_leave_behind, args=(path,))
    process.start()
    process.join()
    assert os.path.getsize(path) > 0


def test_an_empty_file_is_used_and_removed(path):
    Path(path).touch()
    one, other = FileStore(path), FileStore(path)
    one.set("a", "1")
    one.close()
    assert other.get("a") == b"1"
    other.close()
    assert not os.path.exists(path)


def test_a_file_that_was_left_over(path):
    left_over(path)
    before = Path(path).read_bytes()
    for _ in range(2):
        with pytest.raises(ss.InvalidArgumentError, match=rf"{path} was left by another job: remove it"):
            FileStore(path)
    assert Path(path).read_bytes() == before
    os.unlink(path)
    FileStore(path).close()


@pytest.mark.parametrize("content", [b"x", b"samestep", b"samestep store 0 1\n", b"important\n" * 1000])
def test_a_file_that_is_not_ours_keeps_its_bytes(path, content):
    Path(path).write_bytes(content)
    with pytest.raises(ss.InvalidArgumentError, match=rf"{path} is not a store of samestep: remove it"):
        FileStore(path)
    assert Path(path).read_bytes() == content


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("relative", "absolute"),
        ("{}/", "absolute"),
        ("{}", "not a regular file"),
        ("{}/no/such", "/no"),
        ("{}/a\0b", "no file can have this name"),
        ("{}/\ud800", "no file can have this name"),
        ("/proc/self/mem", "cannot hold a store: Input/output error; give another path"),
    ],
)
def test_paths_that_cannot_hold_a_store(tmp_path, name, reported):
    with pytest.raises(ss.InvalidArgumentError, match=rf"path '.*{reported}"):
        FileStore(name.format(tmp_path))


def test_a_pipe_is_refused_without_waiting_for_its_other_end(path):
    os.mkfifo(path)
    with pytest.raises(ss.InvalidArgumentError, match="regular file"):
        FileStore(path)


def test_a_file_with_another_name_is_refused(path):
    """It may be a file of this user to which another one has made a hard link."""
    target = Path(f"{path}.target")
    target.touch(0o600)
    os.link(target, path)
    with pytest.raises(ss.InvalidArgumentError, match="hard link; give another path"):
        FileStore(path)
    assert target.read_bytes() == b""


@pytest.mark.parametrize(
    "line",
    [b"[]", b"[1]", b'"x"', b"{}", b"nonsense", b"\xff", b'["set"]', b"[" * 100_000, b'["add", ["k"], NaN]'],
)
def test_a_line_that_no_store_writes_is_reported_every_time(path, line):
    store = FileStore(path)
    with open(path, "ab") as file:
        file.write(line + b"\n")
    for _ in range(2):
        with pytest.raises(ss.UnavailableError, match=rf"the store in {path} is damaged"):
            store.set("a", "1")
    store.close()


def test_a_line_that_was_not_finished_is_dropped(path):
    """Somebody was killed in the middle of writing it."""
    one, other = FileStore(path), FileStore(path)
    one.set("a", "1")
    with open(path, "ab") as file:
        file.write(b'["set", ["a"], "' + b"torn" * 50)
    assert other.get("a") == b"1"
    other.set("b", "2")
    assert (one.get("a"), one.get("b"), one.num_keys()) == (b"1", b"2", 2)
    one.close()
    other.close()


def test_a_removed_store_goes_on_and_its_name_is_free(path):
    first, second = FileStore(path), FileStore(path)
    first.set("a", "1")
    first.remove()
    new = FileStore(path)
    assert (second.get("a"), new.num_keys()) == (b"1", 0)
    second.remove()
    second.close()
    first.close()
    assert os.path.exists(path)
    new.close()
    assert not os.path.exists(path)


def test_two_who_remove_at_once_spare_the_next_store(path, monkeypatch):
    first, second = FileStore(path), FileStore(path)
    next_stores = []

    def go_on():
        second.remove()
        next_stores.append(FileStore(path))

    other = threading.Thread(target=go_on)
    look = file_store._is_at

    def look_and_be_overtaken(fd, file_name):
        found = look(fd, file_name)
        if threading.current_thread() is threading.main_thread() and not other.ident:
            other.start()
            other.join(0.3)  # as far as it gets
        return found

    monkeypatch.setattr(file_store, "_is_at", look_and_be_overtaken)
    first.remove()
    other.join()
    assert os.path.exists(path)
    for store in (first, second, *next_stores):
        store.close()
    assert not os.path.exists(path)


def test_a_store_that_is_dropped_is_closed(path):
    store = FileStore(path)
    store.set("a", "1")
    del store
    gc.collect()
    assert not os.path.exists(path)


def test_a_closed_store_says_so(path):
    store = FileStore(path)
    store.close()
    store.close()
    with pytest.raises(ss.NotInitializedError, match="closed"):
        store.get("a")


def test_a_process_that_keeps_the_file_locked_does_not_block_others_for_ever(path):
    store, other = FileStore(path), FileStore(path, timeout=0.1)
    with store._locked(), pytest.raises(ss.TimeoutError, match=r"kept it locked for 0\.1 s"):
        other.set("a", "1")
    other.set("a", "1")
    other.close()
    store.close()


@pytest.mark.parametrize("prefix", [None, "p"])
def test_a_wait_sees_what_another_thread_sets_through_the_same_store(path, prefix, monkeypatch):
    """That thread has read the file already when the waiting one looks whether it has grown."""
    waits, sleep = threading.Event(), time.sleep

    def note_and_sleep(seconds):
        waits.set()
        sleep(seconds)

    monkeypatch.setattr(file_store.time, "sleep", note_and_sleep)
    store = FileStore(path)
    seen = store if prefix is None else PrefixStore(prefix, store)

    def set_later():
        waits.wait()
        seen.set("later", "1")

    thread = threading.Thread(target=set_later)
    thread.start()
    seen.wait(["later"], timeout=60)
    thread.join()
    store.close()
