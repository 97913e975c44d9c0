"""This process among the ranks of a job that goes on after a loss; see `samestep.rendezvous.membership`."""

from __future__ import annotations

import functools
import json
import os
import time

from samestep import _settings
from samestep._util.text import chain
from samestep.errors import Error, MismatchError, PeerLostError, TimeoutError, UnavailableError
from samestep.rendezvous.membership import PLACE, Post, Record
from samestep.rendezvous.rendezvous import Rendezvous
from samestep.rendezvous.store import PrefixStore
from samestep.rendezvous.tcp_store import TCPStore

__all__ = ["Member", "is_loss", "member"]

_LOOK_S = 0.25  # between questions whether newcomers wait
_FIRST_ATTEMPT_S = 10.0  # to connect: if a rank dies meanwhile, the others only see that it does not come
_GRACE_S = 30.0  # for the launcher to write a record after the members that are late have been killed
_ANSWER_S = 60.0


class Member:
    """What this process knows of the group, and how it says what it does.

    Args:
      address: of the store, as host:port.

    Raises:
      MismatchError: the others run another version of samestep than this process, which was started later.
      UnavailableError: the launcher has ended, or cannot be reached.
    """

    def __init__(self, address: str, uid: str) -> None:
        host, _, port = address.rpartition(":")
        self.uid = uid
        self.record = Record(0, [], 0, 0, True)
        """Of the epoch that this process is in; number 0 has no group yet, -1 is a newcomer."""
        env = os.environ
        self.launched_as = int(env.get("LOCAL_RANK", "0")), int(env.get("LOCAL_WORLD_SIZE", "1"))
        """Among the ranks of this host that the launcher has started at first, and how many those are."""
        self.is_restarted = int(uid.rpartition(".")[2]) > 0
        if self.is_restarted:
            self.record = self.record._replace(epoch=-1)
        self._store = TCPStore(host, int(port), timeout=_ANSWER_S)
        self._keys = PrefixStore(PLACE, self._store)
        if self.is_restarted:
            self._require_same_version()
        self.has_state = False
        """Whether this program has a `TrainState`."""
        self.n_attempts = 0
        """To connect to these members, since that has succeeded last."""
        self.has_met = False
        """Whether that has succeeded once."""
        self._met: Rendezvous | None = None
        """The last attempt."""
        self._looked_at = 0.0

    @property
    def is_newcomer(self) -> bool:
        """Whether the group runs without this process, which is alone so far."""
        return self.record.epoch < 0

    def let_others_in(self) -> None:
        """Tell the launcher that this program gives its state to newcomers."""
        self._keys.set("trains", _settings.VERSION)

    def _require_same_version(self) -> None:
        """Before this process posts anything, which the launcher and the others might misread."""
        try:
            theirs = self._keys.get("trains").decode(errors="replace")
        except (PeerLostError, TimeoutError) as error:
            raise _without_launcher(error) from error
        if theirs != _settings.VERSION:
            raise MismatchError(
                f"initialize: this rank was started later and runs samestep {_settings.VERSION}, but the others "
                f"run {theirs}: install that version where it is started"
            )

    def are_called(self) -> bool:
        """Whether newcomers wait, as far as this process has looked: it asks the launcher four times a second.

        Raises:
          UnavailableError: the launcher has ended, or cannot be reached.
        """
        if time.monotonic() - self._looked_at < _LOOK_S:
            return False
        self._looked_at = time.monotonic()
        try:
            return self._keys.check([f"call {self.record.epoch}"])
        except (PeerLostError, TimeoutError) as error:
            raise _without_launcher(error) from error

    def meet(self, timeout: float, *, step: int = 0, clean: bool = True, admits: bool = False) -> Rendezvous:
        """Leave the epoch, and wait for the next one with this process in it. Collective.

        Args:
          timeout: seconds for the others to come; those that have not are ended by their launcher.
          step, clean, admits: as in `Post`.

        Returns:
          The members, at a place of their own. `record` says more of them.

        Raises:
          PeerLostError: this process has been given up.
          UnavailableError: the launcher has ended, or cannot be reached; or this is a newcomer, which the others have
            not taken in within `timeout`.
        """
        now, before = self.record.epoch, self.record.members
        cut = [before[rank] for rank in self._met.unanswered] if self._met is not None else []
        post = Post(now if now < 0 else now + 1, step, clean, admits, float(timeout), cut)
        try:
            self._keys.set(f"post {self.uid}", json.dumps(post))
            key = f"record {now + 1}"
            if now < 0:
                self._await(
                    f"admitted {self.uid}",
                    timeout,
                    "TrainState: this rank was started later, and waits for the others to end a step and to take it "
                    f"in; they have not within {timeout:g} s, the timeout of initialize",
                )
                key = f"record {self._keys.get(f'admitted {self.uid}').decode()}"
            seconds = timeout + _GRACE_S
            self._await(key, seconds, f"the launcher has not said who goes on: no {key} in {seconds:g} s")
            self.record = Record.read(self._keys.get(key))
        except (PeerLostError, TimeoutError) as error:
            raise _without_launcher(error) from error
        if self.uid not in self.record.members:
            raise _GivenUp(
                f"the others go on without this rank (epoch {self.record.epoch}): it had ended, did not come in "
                "time, or does not reach all of them"
            )
        self.n_attempts = self.n_attempts + 1 if self.record.members == before else 1
        place = PrefixStore(f"{PLACE}/epoch {self.record.epoch}", self._store)
        members = self.record.members
        seconds = min(timeout, _FIRST_ATTEMPT_S * self.n_attempts)
        self._met = Rendezvous(place, members.index(self.uid), len(members), seconds, owned=False)
        return self._met

    def _await(self, key: str, seconds: float, otherwise: str) -> None:
        until = time.monotonic() + seconds
        while self._keys._await(self._keys._paths([key]), min(_ANSWER_S, until - time.monotonic())):
            if time.monotonic() > until:
                raise UnavailableError(otherwise)


def _without_launcher(error: Exception) -> UnavailableError:
    return UnavailableError(
        "this rank ends, because the launcher, which says who goes on, has ended or cannot be reached: "
        f"{error.__cause__ or error}"
    )


class _GivenUp(PeerLostError):
    """The end of a rank that is not a member any more."""

    __module__ = "samestep"


@functools.cache
def member() -> Member | None:
    """Of this process; None where the job ends after a loss."""
    address, uid = _settings.get(_settings.MEMBERSHIP), _settings.get(_settings.UID)
    return Member(address, uid) if address and uid else None


def is_loss(error: BaseException | None) -> bool:
    """Whether it was raised because the group has lost a rank, or waits for one in vain: the others may go on."""
    ours = next((one for one in chain(error) if isinstance(one, Error)), None)
    return isinstance(ours, (PeerLostError, TimeoutError)) and not isinstance(ours, _GivenUp)
