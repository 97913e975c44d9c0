"""The launcher's part in a job that goes on after a loss: it starts ranks again, and writes who the members are.

See `samestep.rendezvous.membership` for what stands in the store.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

from samestep._util.text import ranks_text
from samestep.launch.loop import Loop
from samestep.launch.ranks import Rank, Ranks
from samestep.rendezvous.membership import JOIN, PLACE, Post, Record, absent, newcomers, next_record
from samestep.rendezvous.store import PrefixStore
from samestep.rendezvous.tcp_store import TCPStore

_ENDS = (0, 128 + signal.SIGTERM)  # exit codes: the program is done, or was asked to stop and did
_LOOK_S, _LOOK_SOON_S = 0.1, 0.005  # between looks into the store; while members leave an epoch


class Elastic:
    """The members of a running job.

    Args:
      ranks: of the run; more may join.
      min_ranks, max_restarts, chaos_s: as the flags of `samestep run` say.
      where: address at which the store listens; "" for all interfaces.
      start: starts a rank (again), whose process gets this uid.
    """

    def __init__(
        self,
        loop: Loop,
        ranks: Ranks,
        *,
        min_ranks: int,
        max_restarts: int,
        chaos_s: float | None,
        where: str,
        secret: str,
        start: Callable[[Rank, str], None],
        kill: Callable[[Rank], None],
        say: Callable[[str], None],
    ) -> None:
        self._loop, self._ranks, self._start, self._kill, self._say = loop, ranks, start, kill, say
        self._min_ranks, self._restarts_left, self._chaos_s = min_ranks, max_restarts, chaos_s
        self._store = TCPStore(where, 0, is_master=True, secret=secret.encode())
        self.port = self._store.port
        self._keys = PrefixStore(PLACE, self._store)
        self._lives: dict[int, int] = {}
        # Ranks whose process has ended, or that have joined, and that have not been started since.
        self._lost: set[int] = set()
        self._cut_off: set[str] = set()  # uids of members that were given up though they live
        self._now = Record(0, [], 0, 0, True)
        self._left_at: float | None = None  # when the first member left this epoch
        self._struck: set[str] = set()  # uids of those that chaos has killed
        self._well: set[str] = set()  # uids of those that have ended as they should
        self._called = 0  # the last epoch whose members know of newcomers
        self.exit_code: int | None = None
        """Of the members that have ended as they should: then nobody is started again."""
        self.starts = True
        """Whether more ranks are started."""
        self.failed = False
        """There are too few members to go on, or what rank 0 was to write is missing."""

    @property
    def over(self) -> bool:
        """Whether a member has ended as it should."""
        return self.exit_code is not None

    def begin(self) -> None:
        """Start all ranks."""
        first = [rank for rank in self._ranks if not rank.joined]
        for rank in first:
            self._start_life(rank)
        self._now = self._now._replace(members=[self._uid(rank) for rank in first])
        self._loop.after(_LOOK_S, self._look)
        if self._chaos_s is not None:
            self._plan_chaos()

    def close(self) -> None:
        """End the store."""
        self._store.close(0.0)

    def advance(self) -> None:
        """Note which ranks have ended since the last call."""
        for rank in self._ranks:
            if rank.joined and rank.number not in self._lives:
                self._lives[rank.number] = 0  # so that its first process is a newcomer, too
                self._lost.add(rank.number)
                self._say(f"{rank.name}{f' on {rank.host}' * bool(rank.host)} joins the job")
            if rank.ending is None or rank.number in self._lost:
                continue
            uid, status = self._uid(rank), rank.ending.status
            if status in _ENDS and uid in self._now.members:
                self.exit_code = max(self.exit_code or 0, status)
                self._well.add(uid)
            elif self.over and uid in self._now.members:
                self.failed |= (status or 0) > 0  # what raises may have its result to write
            self._lost.add(rank.number)
            if not self.over:
                n_left = len(self._members_alive())
                self.failed = n_left < self._min_ranks
                then = f"fewer than --min-ranks {self._min_ranks}" if self.failed else "the others go on"
                n_before = len({*self._now.members, uid})  # the record without it may be written already
                self._say(f"{rank.ending}: {n_left} of {n_before} ranks are left, {then}")
            self._look_now()
        if self.over and not self._members_alive():
            # Had rank 0 been lost in the last step, another would be rank 0. Behind the loop its result is missing, but
            # if the job was asked to stop, its file is there.
            first = self._now.members[0]
            if first not in self._well and not self.failed and self.exit_code == 0:
                self.failed = True
                self._say(
                    f"rank {_number_of(first)}, the first of those that were left, was lost behind the loop"
                )
            for rank in self._ranks:  # newcomers, for which it is too late
                if rank.runs:
                    self._kill(rank)

    # --- the epochs

    def _uid(self, rank: Rank) -> str:
        return f"{rank.in_job}.{self._lives.get(rank.number, 0)}"

    def _alive(self) -> list[str]:
        return [self._uid(rank) for rank in self._ranks if rank.runs]

    def _members_alive(self) -> list[str]:
        alive = self._alive()
        return [uid for uid in self._now.members if uid in alive]

    def _look(self) -> None:
        self._look_now()
        soon = self._left_at is not None
        self._loop.after(_LOOK_SOON_S if soon else _LOOK_S, self._look)

    def _look_now(self) -> None:
        if self.failed:
            return
        alive = self._alive()
        paths = self._keys._paths([f"post {uid}" for uid in alive])
        values = self._keys._apply("values", paths) if paths else []
        posts = {uid: Post.read(value.encode()) for uid, value in zip(alive, values, strict=True) if value}
        made = next_record(self._now, alive, posts)
        if made is not None:
            for uid in self._now.members:
                if uid in alive and uid not in made.members:
                    self._give_up(uid, posts)
            self._write(made)
        else:
            self._wait_for_members(alive, posts)
        if newcomers(self._now, alive, posts) and self._called < self._now.epoch:
            self._called = self._now.epoch
            self._keys.set(f"call {self._now.epoch}", JOIN)
        self._start_again()

    def _write(self, made: Record) -> None:
        self._keys.set(f"record {made.epoch}", made.text())
        for uid in made.members:
            if uid not in self._now.members:
                self._keys.set(f"admitted {uid}", str(made.epoch))
        self._now, self._left_at = made, None

    def _give_up(self, uid: str, posts: dict[str, Post]) -> None:
        """A member that lives, and does not reach all others."""
        self._cut_off.add(uid)
        members = [one for one in self._now.members if one in posts]
        away = [_number_of(one) for one in members if one in posts[uid].cut or uid in posts[one].cut]
        self._say(
            f"rank {_number_of(uid)} does not reach {ranks_text(sorted(away))}: the others go on without it"
        )

    def _wait_for_members(self, alive: list[str], posts: dict[str, Post]) -> None:
        """Ends those members that do not leave the epoch in time, because they are stopped, say."""
        late = absent(self._now, alive, posts)
        came = [posts[uid] for uid in self._members_alive() if uid not in late]
        if not came:
            return
        self._left_at = self._left_at or time.monotonic()
        if self._now.epoch and time.monotonic() - self._left_at > max(post.seconds for post in came):
            for rank in self._ranks:
                if rank.runs and self._uid(rank) in late:
                    self._kill(rank)

    # --- lost ranks

    def _start_again(self) -> None:
        waiting = [rank for rank in self._ranks if self._waits(rank)]
        new = [rank for rank in waiting if rank.joined and self._lives[rank.number] == 0]
        again = [rank for rank in waiting if rank not in new][: self._restarts_left]
        if not (new or again) or self.over or not self.starts or not self._keys.check(["trains"]):
            return
        self._restarts_left -= len(again)
        for rank in new + again:
            self._start_life(rank)

    def _waits(self, rank: Rank) -> bool:
        """For a process; behind a cut line there is no use in one."""
        can_start = rank.all_gone and rank.link is not None and not (rank.joined and rank.cut_off)
        return rank.number in self._lost and can_start and self._uid(rank) not in self._cut_off

    def _start_life(self, rank: Rank) -> None:
        self._lives[rank.number] = self._lives.get(rank.number, -1) + 1
        self._lost.discard(rank.number)
        self._start(rank, self._uid(rank))

    def _plan_chaos(self) -> None:
        assert self._chaos_s is not None
        self._loop.after(random.expovariate(1 / self._chaos_s), self._strike)

    def _strike(self) -> None:
        members = [uid for uid in self._members_alive() if uid not in self._struck]
        if len(members) > self._min_ranks and self._keys.check(["trains"]) and not self.over:
            uid = random.choice(members)
            self._struck.add(uid)
            self._kill(next(rank for rank in self._ranks if self._uid(rank) == uid))
        self._plan_chaos()


def _number_of(uid: str) -> int:
    return int(uid.partition(".")[0])
