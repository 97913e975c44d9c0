"""Which ranks make the group of a job that goes on after a loss: records in the store that the launcher keeps.

Each process of a job has a name of its own, its uid: "2.1" is the second life of rank 2, or the first one of a rank
that has come later (`samestep run --join`). Record number k lists the members of epoch k. The launcher alone writes
records, each number once, so all ranks read the same ones; it knows which processes have ended. A rank that leaves an
epoch says so by a post, and waits for the next record.

Keys: `post UID`, `record K`, `call K` (ranks of epoch K should end their epoch after a step), `admitted UID` (the
number of a newcomer's first record), and `trains` (newcomers will be admitted, so lost ranks may be started again; its
value is the members' version of samestep, which newcomers need to have).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from samestep._util.json_layout import Many, loads

__all__ = ["JOIN", "PLACE", "Post", "Record", "absent", "newcomers", "next_record"]

PLACE = "samestep/membership"
"""Prefix of all keys."""
JOIN = "join"
"""What `call K` holds where a newcomer waits."""


class Post(NamedTuple):
    """What a rank says as it leaves an epoch."""

    epoch: int
    """The one that it is ready for; -1: a newcomer is ready for any."""
    step: int
    """How many it has finished; -1: it does not have the state of the job yet."""
    clean: bool
    """Whether its state is that of the end of that step."""
    admits: bool
    """Whether newcomers can be given the state."""
    seconds: float
    """How long the others may take to come, > 0."""
    cut: Sequence[str] = ()
    """Uids of members whose hosts have not answered it."""

    @classmethod
    def read(cls, text: bytes) -> Post:
        """Of a key's value."""
        return cls(*loads(text, [int, int, bool, bool, float, Many(str)]))


class Record(NamedTuple):
    """The members of one epoch."""

    epoch: int
    members: list[str]
    """Uids, in the order of their ranks."""
    root: int
    """The rank whose state holds; -1: no rank has one."""
    step: int
    """How many steps that rank has finished; -1: no rank has begun, so rank 0 says from what."""
    equal: bool
    """Whether all members have that state already."""

    @classmethod
    def read(cls, text: bytes) -> Record:
        """Of a key's value."""
        return cls(*loads(text, [int, Many(str), int, int, bool]))

    def text(self) -> str:
        """For a key's value."""
        return json.dumps(self)


def next_record(now: Record, alive: Sequence[str], posts: Mapping[str, Post]) -> Record | None:
    """The record after `now`; None as long as a member that is alive has not come. Pure.

    Args:
      now: the last one. Number 0 lists those that were started.
      alive: uids of the processes that have not ended.
      posts: of each that has said something.

    Example:
      >>> came = {"0.0": Post(3, 7, True, True, 9.0), "1.0": Post(3, 8, True, True, 9.0)}
      >>> came["2.1"] = Post(-1, -1, True, True, 9.0)  # a newcomer
      >>> next_record(Record(2, ["0.0", "1.0", "2.0"], 0, 5, True), ["0.0", "1.0", "2.1"], came)
      Record(epoch=3, members=['0.0', '1.0', '2.1'], root=1, step=8, equal=False)
    """
    left = [uid for uid in now.members if uid in alive]
    if not left or absent(now, alive, posts):
        return None
    left = in_reach(left, posts)
    said = [posts[uid] for uid in left]
    new = newcomers(now, alive, posts) if all(post.admits for post in said) else []
    has_state = any(post.step >= 0 for post in said)  # else all begin, perhaps anew
    clean = [rank for rank, post in enumerate(said) if post.clean and (post.step >= 0 or not has_state)]
    root = max(clean, key=lambda rank: (said[rank].step, -rank), default=-1)
    step = said[root].step if clean else 0
    equal = not new and step >= 0 and all(post.clean and post.step == step for post in said)
    return Record(now.epoch + 1, [*left, *new], root, step, equal)


def newcomers(now: Record, alive: Sequence[str], posts: Mapping[str, Post]) -> list[str]:
    """Those that wait to be taken in; a member that was given up once is none. Pure."""
    return [uid for uid in alive if uid not in now.members and uid in posts and posts[uid].epoch < 0]


def in_reach(members: Sequence[str], posts: Mapping[str, Post]) -> list[str]:
    """Those of `members` that can all reach each other. Pure.

    Of those with a cut line, one whose state does not hold goes first; else one with most such lines, the last of
    several.

    Example:
      >>> posts = dict.fromkeys(["0.0", "1.0"], Post(3, 7, True, True, 9.0))
      >>> in_reach(["0.0", "1.0", "2.0"], {**posts, "2.0": Post(3, 7, True, True, 9.0, ["1.0"])})
      ['0.0', '1.0']
    """
    kept = list(members)
    while True:
        n_cut = {one: sum(one in posts[two].cut or two in posts[one].cut for two in kept) for one in kept}
        found = [
            (posts[uid].step < 0 or not posts[uid].clean, n, i, uid)
            for i, (uid, n) in enumerate(n_cut.items())
            if n
        ]
        if not found:
            return kept
        kept.remove(max(found)[-1])


def absent(now: Record, alive: Sequence[str], posts: Mapping[str, Post]) -> list[str]:
    """The members that are alive and have not left the epoch `now`. Pure."""
    return [
        uid for uid in now.members if uid in alive and (uid not in posts or posts[uid].epoch <= now.epoch)
    ]
