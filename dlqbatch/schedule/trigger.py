"""More drains at once when the queues are deep: the depth is looked at often, and again whenever a drain ends."""

from __future__ import annotations

import time
from threading import Event, Lock
from typing import TYPE_CHECKING

from dlqbatch import logs
from dlqbatch.policy.scaling import drains_to_start, pause_after

if TYPE_CHECKING:
    from collections.abc import Callable

log = logs.get(__name__)


class Trigger:
    """May be used from several threads.

    `depth` is None while nobody knows it. `running` counts every drain at work, whoever started it; `start` begins one
    more and says False if it did not.
    """

    def __init__(
        self,
        depth: Callable[[], int | None],
        running: Callable[[], int],
        start: Callable[[], object],
        threshold: int,
        most: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._depth, self._running, self._start = depth, running, start
        self._threshold, self._most, self._clock = threshold, most, clock
        self._asked = Event()
        self._looking = Lock()
        self._judging = Lock()
        self._is_deep = False
        self._failures = 0
        self._not_before = 0.0

    def look(self) -> None:
        """Start what the depth deserves.

        Whoever comes while another one looks does not wait for a slow broker: the other one looks once more.
        """
        self._asked.set()
        while self._asked.is_set() and self._looking.acquire(blocking=False):
            try:
                self._asked.clear()
                self._look()
            finally:
                self._looking.release()

    def ended(self, *, moved: int) -> None:
        """A drain is over: `moved` is what it got less what it left, 0 if it failed. Looks again at once."""
        with self._judging:
            if moved > 0:
                self._failures, self._not_before = 0, 0.0
            # Those that fail together fail once.
            elif self._is_deep and self._clock() >= self._not_before:
                self._failures += 1
                self._not_before = self._clock() + pause_after(self._failures)
        self.look()

    def _look(self) -> None:
        if self._threshold <= 0:
            return
        depth = self._depth()
        if not self._may_start(depth):
            return
        running = self._running()
        wanted = drains_to_start(depth, self._threshold, running, self._most)
        started = 0
        while started < wanted and self._start() is not False:
            started += 1
        if started:
            log.info("the queues are deep: more drains", started=started, running=running + started, depth=depth)

    def _may_start(self, depth: int | None) -> bool:
        with self._judging:
            if depth is not None:
                self._is_deep = depth >= self._threshold
                if not self._is_deep:
                    self._failures, self._not_before = 0, 0.0
            return self._is_deep and depth is not None and self._clock() >= self._not_before
