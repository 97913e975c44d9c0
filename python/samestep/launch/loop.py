"""An event loop of one thread: descriptors, signals and timers."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable

Act = Callable[[], object]


class Loop:
    """Callbacks for ready descriptors, signals, and points in time.

    `reading` and `writing` may be called at any time with any descriptor, again and again; None as act stops
    watching, which has to be done before the descriptor is closed.
    """

    def __init__(self) -> None:
        self._selector = selectors.PollSelector()  # unlike epoll it takes regular files
        self._acts: dict[int, dict[int, Act]] = {}
        self._due: list[tuple[float, Act]] = []

    def reading(self, fd: int, act: Act | None) -> None:
        """Calls `act` whenever `fd` has something to read or is at its end."""
        self._watch(fd, selectors.EVENT_READ, act)

    def writing(self, fd: int, act: Act | None) -> None:
        """Calls `act` whenever `fd` can be written to or is broken."""
        self._watch(fd, selectors.EVENT_WRITE, act)

    def after(self, seconds: float, act: Act) -> None:
        """Calls `act` once, `seconds` from now."""
        self._due.append((time.monotonic() + seconds, act))

    def on_signals(self, signums: Iterable[int], act: Callable[[bytes], object]) -> None:
        """Calls `act` with the numbers of the signals that came since the last time. Once per process."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for signum in signums:
            signal.signal(signum, lambda *_: None)
        self.reading(reading, lambda: act(os.read(reading, 4096)))

    def turn(self) -> None:
        """Wait for the next event, and call the callbacks of all pending events."""
        wait = max(0.0, min(at for at, _ in self._due) - time.monotonic()) if self._due else None
        for key, events in self._selector.select(wait):
            for event in (selectors.EVENT_WRITE, selectors.EVENT_READ):
                # An act before this one may have closed the descriptor, whose number may be another's by now.
                acts = self._acts.get(key.fd, {})
                if events & event and acts is key.data and event in acts:
                    acts[event]()
        now = time.monotonic()
        for item in [item for item in self._due if item[0] <= now]:
            self._due.remove(item)
            item[1]()

    def _watch(self, fd: int, event: int, act: Act | None) -> None:
        acts = self._acts.get(fd)
        if act is None:
            if acts is None or acts.pop(event, None) is None:
                return
            if acts:
                self._selector.modify(fd, sum(acts), acts)
            else:
                del self._acts[fd]
                self._selector.unregister(fd)
        elif acts is None:
            self._acts[fd] = {event: act}
            self._selector.register(fd, event, self._acts[fd])
        else:
            known = event in acts
            acts[event] = act
            if not known:
                self._selector.modify(fd, sum(acts), acts)
