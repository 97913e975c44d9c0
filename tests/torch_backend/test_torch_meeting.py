"""What the ranks of a group of torch ask its store, before they are connected. Threads stand for the ranks."""

import collections
import threading

import pytest
import samestep as ss

dist = pytest.importorskip("torch.distributed")

from samestep.rendezvous import torch_store  # noqa: E402
from samestep.rendezvous.table import RESERVED  # noqa: E402
from samestep.torch import meeting  # noqa: E402

PATIENCE_S = 60.0
LAYOUT = [int, str]


def come(store, ranks, size, *, timeout=PATIENCE_S, knows_ranks=True):
    """What each of `ranks` hears, or the error that it raises."""
    found = {}

    def run(rank):
        try:
            _, found[rank] = meeting.gather(
                *(store, rank, size, timeout if isinstance(timeout, float) else timeout[rank]),
                name="g",
                fact=[rank, "é"],
                layout=LAYOUT,
                knows_ranks=knows_ranks,
            )
        except ss.Error as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=[rank]) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return [found[rank] for rank in ranks]


@pytest.mark.parametrize("knows_ranks", [True, False])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_hear_what_all_say_each_time(size, knows_ranks):
    store = dist.HashStore()
    for _ in range(3):
        everyone = come(store, range(size), size, knows_ranks=knows_ranks)
        assert everyone == [[[rank, "é"] for rank in range(size)]] * size


def test_a_group_of_known_ranks_asks_three_times(monkeypatch):
    """Each question waits for the answer of a store that may be on another host; a `set` does not."""
    asked = collections.Counter()
    for name in ("_apply", "_await"):
        before = getattr(torch_store.TorchStore, name)

        def counting(self, *arguments, before=before):
            asked[threading.get_ident()] += arguments[0] != "set"
            return before(self, *arguments)

        monkeypatch.setattr(torch_store.TorchStore, name, counting)
    come(dist.HashStore(), range(4), 4)
    assert sorted(asked.values()) == [3] * 4


def test_ranks_that_have_given_up_meet_the_next_time():
    store = dist.HashStore()
    for error in come(store, [0, 2], 3, timeout=0.2):
        assert isinstance(error, ss.TimeoutError)
        assert "rank 1 of 3 did not join" in str(error)
        assert "for group 'g' within 0.2 s" in str(error)
    assert come(store, [1, 0, 2], 3) == [[[rank, "é"] for rank in range(3)]] * 3


def test_who_comes_last_learns_that_another_has_given_up():
    store = dist.HashStore()
    (error,) = come(store, [0], 2, timeout=0.1)
    store.set("meeting", b"0")  # as read by rank 1 before rank 0 gave up
    (heard,) = come(store, [1], 2)
    assert isinstance(heard, ss.TimeoutError)
    assert str(heard) == str(error)


def test_what_is_no_fact_is_refused():
    store = dist.HashStore()
    dist.PrefixStore("meeting 0", store).set(f"{RESERVED}/rank 1", b"[1]")
    (error,) = come(store, [0], 2)
    assert isinstance(error, ss.MismatchError)
    assert "the message of rank 1" in str(error)
