"""More runs of a job at once while its queues are deep: one for every threshold-full of messages, up to a most.

depth     below the threshold │ threshold │ twice that │ three times │ …
at work   what runs already   │ 1         │ 2          │ 3           │ … `most`

Every run at work counts, whoever started it. No run is stopped: each is bounded, so the number falls by itself once
no new one is started. A run that could move nothing, because a database is away or an origin refuses, would
be followed by another at once for as long as the queue is deep; so a pause follows it.

The depth is looked at by one thread of its own, because a broker that does not answer must not hold up the rest. What
that thread saw last is for /healthz and /metrics, because it is the first to know that the broker is away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import Final

from dlqbatch import logs
from dlqbatch.aws.secrets import CurrentSettings
from dlqbatch.monitor.queue_depths import Depth, Reading

log = logs.get(__name__)

_FIRST_PAUSE: Final = 5.0
_LONGEST_PAUSE: Final = 60.0
_ENDS_WITHIN: Final = 1.0


def runs_to_start(depth: int | None, threshold: int, running: int, most: int) -> int:
    """How many more runs to start now; none if the depth is not known, or the threshold is 0."""
    if depth is None or threshold <= 0:
        return 0
    return max(min(depth // threshold, most) - running, 0)


def pause_after(failures: int) -> float:
    """Seconds without a start, after so many runs in a row that moved nothing from a deep queue."""
    return min(_FIRST_PAUSE * 2.0 ** min(failures - 1, 10), _LONGEST_PAUSE) if failures > 0 else 0.0


class Trigger:
    """Starts runs of one job; used by one thread.

    `running` counts the runs of the job at work; `start` begins one more, and returns False if it did not.
    """

    def __init__(
        self,
        job: str,
        running: Callable[[], int],
        start: Callable[[], object],
        threshold: int,
        most: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job, self._running, self._start = job, running, start
        self._threshold, self._most, self._clock = threshold, most, clock
        self._is_deep = False
        self._failures = 0
        self._not_before = 0.0

    def look(self, depth: int | None) -> None:
        """Start as many runs as the depth deserves; None if the depth is not known."""
        if depth is not None:
            self._is_deep = depth >= self._threshold
            if not self._is_deep:
                self._failures, self._not_before = 0, 0.0
        if self._clock() < self._not_before:
            return
        running = self._running()
        wanted = runs_to_start(depth, self._threshold, running, self._most)
        started = 0
        while started < wanted and self._start() is not False:
            started += 1
        if started:
            log.info(
                "the queues are deep: more runs", job=self._job, started=started, running=running + started, depth=depth
            )

    def ended(self, *, moved: int) -> None:
        """A run is over. `moved` is how many messages are not where they were; 0 if it failed."""
        if moved > 0:
            self._failures, self._not_before = 0, 0.0
        # Runs that fail together count as one failure.
        elif self._is_deep and self._clock() >= self._not_before:
            self._failures += 1
            self._not_before = self._clock() + pause_after(self._failures)


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of the broker."""

    reachable: bool | None = None
    """None before the first look."""
    since: datetime | None = None
    """The time since which it has been reachable, or not."""
    reading: Reading | None = None
    """The last depths, also after the broker went away."""


class Watch:
    """Looks at the queues of some jobs every `interval` seconds, and again whenever a run of a trigger has ended."""

    def __init__(
        self, current: CurrentSettings, jobs: Collection[str], triggers: Mapping[str, Trigger], interval: float
    ) -> None:
        self._current, self._jobs, self._triggers, self._interval = current, jobs, triggers, interval
        self._used = current.settings
        self._depth = Depth(self._used, jobs)
        self._seen = Seen()
        self._lock = Lock()
        self._ended: SimpleQueue[tuple[str, int] | None] = SimpleQueue()
        self._ending = Event()
        self._thread = Thread(target=self._run, name="depth", daemon=True)

    def start(self) -> None:
        if self._jobs:
            self._thread.start()

    def is_alive(self) -> bool:
        return not self._jobs or self._thread.is_alive()

    def seen(self) -> Seen:
        with self._lock:
            return self._seen

    def ended(self, job: str, *, moved: int) -> None:
        """Note that a run is over. Returns at once: whoever waits for the run must not wait for the broker."""
        if job in self._triggers:
            self._ended.put((job, moved))

    def end(self) -> None:
        self._ending.set()
        self._ended.put(None)
        if self._thread.ident is not None:
            self._thread.join(_ENDS_WITHIN)

    def _run(self) -> None:
        while True:
            ended = self._runs_that_ended(self._interval)
            if self._ending.is_set():
                break
            try:
                self._look(ended)
            except Exception as error:  # noqa: BLE001  (the next look may succeed; without this thread none would)
                log.error("the depth could not be looked at", failure=error)  # noqa: TRY400  (ours: with the trace)
        self._depth.close()

    def _runs_that_ended(self, seconds: float) -> list[tuple[str, int]]:
        """The runs that ended since the last call, as soon as there is one; none once the seconds are over."""
        found: list[tuple[str, int]] = []
        try:
            one = self._ended.get(timeout=seconds)
            while one is not None:
                found.append(one)
                one = self._ended.get_nowait()
        except Empty:
            pass
        return found

    def _look(self, ended: list[tuple[str, int]]) -> None:
        reading = self._read()
        # A run that failed during the read is known before another one takes its place.
        ended = [*ended, *self._runs_that_ended(0)]
        with self._lock:
            before, reachable = self._seen, reading is not None
            since = before.since if before.reachable is reachable else datetime.now(UTC)
            self._seen = Seen(reachable, since, reading or before.reading)
        depths = {job: None if reading is None else reading.of(job) for job in self._triggers}
        for job, moved in ended:
            self._triggers[job].ended(moved=moved)
            self._triggers[job].look(depths[job])
        for job in self._triggers.keys() - {job for job, _ in ended}:
            self._triggers[job].look(depths[job])

    def _read(self) -> Reading | None:
        reading = self._depth.read()
        if reading is None and self._current.renew(self._used):
            self._depth.close()
            self._used = self._current.settings
            self._depth = Depth(self._used, self._jobs)
            reading = self._depth.read()
        return reading
