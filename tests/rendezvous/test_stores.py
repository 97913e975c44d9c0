"""One law for every store: in one process, over TCP, in a file, and below a prefix."""

import threading
from datetime import timedelta

import pytest
import samestep as ss
from ranks import held, on_ranks
from samestep.rendezvous import FileStore, HashStore, PrefixStore, TCPStore

KINDS = ["hash", "tcp", "file", "prefix"]


@pytest.fixture(params=KINDS)
def opened(request, tmp_path):
    """Calls of this give stores with the same contents, each with its own connection or descriptor."""
    before = held()
    stores = []

    def another():
        if request.param == "file":
            stores.append(FileStore(str(tmp_path / "store")))
        elif request.param == "tcp":
            first = not stores
            stores.append(TCPStore("127.0.0.1", 0 if first else stores[0].port, is_master=first))
        else:
            stores.append(stores[0] if stores else HashStore())
        return PrefixStore("p", stores[-1]) if request.param == "prefix" else stores[-1]

    yield another
    for store in reversed(stores):
        store.close()
    assert held() == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [b"", b"1", bytes(range(256)), b"\r\n\0" * 1000, b"x" * 5_000_000])
def test_what_is_set_is_what_others_get(opened, value):
    one, other = opened(), opened()
    one.set("kéy / \0 \u2028", value)
    assert other.get("kéy / \0 \u2028") == value
    one.set("kéy / \0 \u2028", "text é")
    assert other.get("kéy / \0 \u2028") == "text é".encode()


def test_get_waits_for_a_key_that_another_thread_of_the_same_store_sets(opened):
    store = opened()
    answers = on_ranks(3, lambda rank: store.get("key") if rank else store.set("key", "1"))
    assert answers == [None, b"1", b"1"]


def test_add_is_atomic_and_counts_from_zero(opened):
    stores = [opened(), opened()]
    sums = on_ranks(4, lambda rank: [stores[rank % 2].add("n", 3) for _ in range(50)])
    assert sorted(n for part in sums for n in part) == list(range(3, 601, 3))
    assert stores[0].get("n") == b"600"
    assert stores[1].add("n", -601) == -1
    assert stores[0].get("n") == b"-1"


@pytest.mark.parametrize("value", ["", "x", "1.5", " 1", "1_0"])
def test_add_to_something_else_names_the_key(opened, value):
    store = opened()
    store.set("the key", value)
    with pytest.raises(ss.InvalidArgumentError, match="'the key'"):
        store.add("the key", 1)
    assert store.get("the key") == value.encode()


def test_compare_set(opened):
    store = opened()
    assert store.compare_set("k", "other", "new") == b"other"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "new") == b"new"
    assert store.compare_set("k", "", "newer") == b"new"
    assert store.compare_set("k", b"new", b"newer") == b"newer"
    assert store.get("k") == b"newer"


def test_compare_set_has_one_winner(opened):
    stores = [opened() for _ in range(4)]
    answers = on_ranks(4, lambda rank: stores[rank].compare_set("k", "", str(rank)))
    assert len(set(answers)) == 1
    assert answers[0] == stores[0].get("k")


def test_delete_check_and_count(opened):
    store = opened()
    assert (store.num_keys(), store.check([]), store.delete_key("a")) == (0, True, False)
    store.set("a", "")
    store.add("b", 0)
    assert store.num_keys() == 2
    assert store.check(["a", "b"])
    assert not store.check(["a", "c"])
    assert store.delete_key("a")
    assert (store.num_keys(), store.check(["a"])) == (1, False)


def test_prefixes_never_meet(opened):
    root = opened()
    parts = [PrefixStore("a", root), PrefixStore("a/b", root), PrefixStore("a", PrefixStore("b", root))]
    keys = ["b/c", "c", "c"]
    for i, (part, key) in enumerate(zip(parts, keys, strict=True)):
        part.set(key, str(i))
    assert [p.get(k) for p, k in zip(parts, keys, strict=True)] == [b"0", b"1", b"2"]
    assert [p.num_keys() for p in parts] == [1, 1, 1]
    assert not root.check(["a/b/c"])
    assert (root.num_keys(), PrefixStore("b", root).num_keys()) == (3, 1)


def test_what_does_not_come_is_named(opened):
    store = opened()
    store.set_timeout(0.05)
    assert store.timeout == timedelta(seconds=0.05)
    with pytest.raises(ss.TimeoutError, match="'never'"):
        store.get("never")
    store.set("here", "")
    with pytest.raises(ss.TimeoutError, match=r"'one', 'two' within 0\.05 s"):
        store.wait(["here", "one", "two"])
    with pytest.raises(ss.TimeoutError, match=r"'one' within 0\.01 s"):
        store.wait(["one"], timedelta(seconds=0.01))
    assert store.wait(["here"]) is None


def test_wait_is_for_all_keys(opened):
    one, other = opened(), opened()
    waited = threading.Event()

    def act(rank):
        if rank:
            other.wait(["a", "b"], 30)
            waited.set()
            return other.check(["a", "b"])
        one.set("a", "")
        early = waited.wait(0.05)
        one.set("b", "")
        return early

    assert on_ranks(2, act) == [False, True]


@pytest.mark.parametrize("timeout", ["3", None, True])
def test_a_timeout_of_a_wrong_type(opened, timeout):
    with pytest.raises(TypeError, match="timeout"):
        opened().set_timeout(timeout)


@pytest.mark.parametrize("timeout", [0, -1.0, timedelta(0), float("nan")])
def test_a_timeout_that_is_not_above_zero(opened, timeout):
    with pytest.raises(ss.InvalidArgumentError, match="timeout"):
        opened().set_timeout(timeout)


def test_wrong_types_are_named(opened):
    store = opened()
    with pytest.raises(TypeError, match="key must be a str, got bytes"):
        store.get(b"key")
    with pytest.raises(TypeError, match="value must be str or bytes, got int"):
        store.set("key", 1)
    with pytest.raises(TypeError, match="keys"):
        store.wait("key")


def test_get_ends_where_a_key_vanishes_again_and_again():
    class Vanishing(HashStore):
        def _await(self, paths, seconds):
            return []

    with pytest.raises(ss.TimeoutError, match="nobody has set key 'k'"):
        Vanishing(timeout=0.05).get("k")
