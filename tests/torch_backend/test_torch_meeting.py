"""What the ranks of a group of torch ask its store, before they are connected. Threads stand for the ranks."""

import collections
import datetime
import threading
from types import SimpleNamespace

import pytest
import samestep as ss

dist = pytest.importorskip("torch.distributed")

from samestep.rendezvous import local_links, torch_store  # noqa: E402
from samestep.rendezvous.store import RESERVED  # noqa: E402
from samestep.torch import meetings  # noqa: E402

PATIENCE_S = 60.0
KINDS = pytest.mark.parametrize("kind", ["world", "in a world of samestep", "in another world"])


class Ranks:
    """As many ranks of one group as have ever come."""

    def __init__(self, size, kind):
        self.store, self.size, self.kind = dist.HashStore(), size, kind
        self.worlds = [meetings.Meetings() for _ in range(size)]
        for world in self.worlds:
            world.store = dist.PrefixStore("world", self.store)

    def come(self, ranks, timeout=PATIENCE_S):
        """What each of `ranks` hears, or the error that it raises."""
        threads = {rank: Rank(self, rank, timeout) for rank in ranks}
        for thread in threads.values():
            thread.start()
        for thread in threads.values():
            thread.join(PATIENCE_S + 10)
        return [threads[rank].heard for rank in ranks]


class Rank(threading.Thread):
    def __init__(self, of, rank, timeout):
        super().__init__()
        self.of, self.rank, self.timeout = of, rank, timeout

    def run(self):
        of, rank = self.of, self.rank
        try:
            options = SimpleNamespace(
                store=of.store,
                group_rank=rank,
                group_size=of.size,
                timeout=datetime.timedelta(seconds=self.timeout),
                global_ranks_in_group=[] if of.kind == "world" else [3 * r for r in range(of.size)],
            )
            ours = of.worlds[rank] if of.kind == "in a world of samestep" else None
            _, self.heard = meetings.gather(options, "g", b"\x00\xff%d" % rank, ours)
        except ss.Error as error:
            self.heard = error


def options_of(store, size, members):
    """As torch gives them to rank 0."""
    who = {"group_rank": 0, "group_size": size, "global_ranks_in_group": members}
    return SimpleNamespace(store=store, timeout=datetime.timedelta(seconds=PATIENCE_S), **who)


def all_of(size):
    return [[b"\x00\xff%d" % rank for rank in range(size)]] * size


@KINDS
@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_hear_what_all_say_each_time(size, kind):
    ranks = Ranks(size, kind)
    for _ in range(3):
        assert ranks.come(range(size)) == all_of(size)


@pytest.mark.parametrize(("kind", "n"), [("in a world of samestep", 2), ("in another world", 4)])
def test_a_group_within_a_world_asks_little(monkeypatch, kind, n):
    """Each question waits for the answer of a store that may be on another host; a `set` does not."""
    asked = collections.Counter()
    for name in ("_apply", "_await"):
        before = getattr(torch_store.TorchStore, name)

        def counting(self, *arguments, before=before):
            asked[threading.get_ident()] += arguments[0] != "set"
            return before(self, *arguments)

        monkeypatch.setattr(torch_store.TorchStore, name, counting)
    ranks = Ranks(4, kind)
    assert ranks.come(range(4)) == all_of(4)
    assert sum(asked.values()) == 4 * n


@KINDS
def test_ranks_that_have_given_up_meet_the_next_time(kind):
    ranks = Ranks(3, kind)
    for _ in range(2):
        for error in ranks.come([0, 2], timeout=0.1):
            assert isinstance(error, ss.TimeoutError)
            assert "rank 1 of 3 did not join" in str(error)
            assert "for group 'g' within 0.1 s" in str(error)
    (error,) = ranks.come([2], timeout=0.1)
    assert "ranks 0-1 of 3 did not join" in str(error)
    assert ranks.come([1, 0, 2]) == all_of(3)
    assert ranks.come([1, 0, 2]) == all_of(3)


def test_who_has_read_an_old_number_comes_to_the_next_meeting():
    ranks = Ranks(2, "in another world")
    ranks.come([0], timeout=0.1)
    keys = dist.PrefixStore("group of ranks [0, 3]", ranks.store)
    keys.set("meeting", b"0")
    waiting = Rank(ranks, 1, PATIENCE_S)
    waiting.start()
    where = dist.PrefixStore("group of ranks [0, 3], meeting 1", ranks.store)
    where.wait([f"{RESERVED}/rank 1"])
    keys.set("meeting", b"0")
    assert ranks.come([0]) == all_of(2)[:1]
    waiting.join(PATIENCE_S + 10)
    assert waiting.heard == all_of(2)[1]


def test_threads_that_come_at_the_same_time_come_to_meetings_of_their_own():
    ranks = Ranks(2, "in a world of samestep")
    waiting = [Rank(ranks, 0, PATIENCE_S) for _ in range(3)]
    for thread in waiting:
        thread.start()
    for number in range(3):
        where = dist.PrefixStore(f"world/group of ranks [0, 3], meeting {number}", ranks.store)
        where.wait([f"{RESERVED}/rank 0"], datetime.timedelta(seconds=PATIENCE_S))
    for _ in waiting:
        assert ranks.come([1]) == all_of(2)[:1]
    for thread in waiting:
        thread.join(PATIENCE_S + 10)
        assert thread.heard == all_of(2)[0]


@pytest.mark.parametrize(("kind", "place"), [("in a world of samestep", "world/"), ("in another world", "")])
def test_what_is_no_fact_is_refused(kind, place):
    ranks = Ranks(2, kind)
    where = dist.PrefixStore(f"{place}group of ranks [0, 3], meeting 0", ranks.store)
    where.set(f"{RESERVED}/rank 1", b"[1]")
    with pytest.raises(ss.MismatchError, match="the message of rank 1"):
        meetings.open_group(
            options_of(ranks.store, size=2, members=[0, 3]), "g", ranks.worlds[0] if place else None
        )


def test_a_rank_alone_opens_no_socket(monkeypatch):
    def refuse():
        raise ss.UnavailableError("no sockets here")

    monkeypatch.setattr(local_links, "_new_socket", refuse)
    group = meetings.open_group(options_of(dist.HashStore(), size=1, members=[]), "alone", None)
    assert group.size == 1
    group.close()
