"""The scheduler: starts each job when it is due and more drains for deep queues, and tells how it is doing.

Three kinds of threads. APScheduler's own say when a job is due, and start a process that they do not wait for. One
thread looks at the depth, because a broker that does not answer must not hold up the rest. Each run has one that reads
what it says. The main thread is left to signals.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, Final

from dlqbatch import logs
from dlqbatch.errors import SettingsError
from dlqbatch.schedule.clock import due_jobs
from dlqbatch.schedule.current import Current
from dlqbatch.schedule.figures import Figures
from dlqbatch.schedule.health import Health
from dlqbatch.schedule.processes import Processes
from dlqbatch.schedule.trigger import Trigger
from dlqbatch.settings.schedule_options import OFF
from dlqbatch.wiring.depth import Depth, queues_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dlqbatch.schedule.clock import Due
    from dlqbatch.schedule.processes import LastRun
    from dlqbatch.settings import Settings

log = logs.get(__name__)

DRAIN: Final = "drain"
_KEEPING: Final = ("ingest", "lifecycle", "retain")
"""Jobs that refuse the default SQLite file: a disposable one must not swallow messages."""
_FAILURES: Final = 3
_PERIODS: Final = 3
_LEFT_OUT_TOLD: Final = 10
"""Of so many starts left out, one is logged; the counter tells of each."""
_DEPTH_ENDS_WITHIN: Final = 1.0
_LAST_ANSWERS: Final = 5.0
"""Seconds that a broker which has fallen silent keeps a run longer than its bounds."""
_CLOCK_MAY_DIFFER: Final = timedelta(seconds=1)


@dataclass(slots=True)
class Tally:
    """What has become of one job's runs since the scheduler began."""

    started: int = 0
    left_out: int = 0
    failed: int = 0
    failures_in_a_row: int = 0
    last_success: datetime | None = None


class Scheduler:
    def __init__(
        self,
        settings: Settings,
        environment: Mapping[str, str],
        arguments: Sequence[str] = (),
        tell: Callable[[LastRun], None] = lambda _last: None,
        read_again: Callable[[], Settings] | None = None,
    ) -> None:
        """`environment` and `arguments` carry these settings to the runs; `tell` hears of each that has ended.

        `read_again` reads them as they were read before: a secret may hold others by then.
        """
        self._settings = settings
        self._current = Current(settings, read_again)
        self._began = datetime.now(UTC)
        self.due = due_jobs(settings, self._began)
        problems = list(_problems(settings, self.due))
        if problems:
            raise SettingsError(*problems)
        self._tell = tell
        jobs = {due.job for due in self.due} | ({DRAIN} if settings.trigger_depth else set())
        self._tallies = {job: Tally() for job in sorted(jobs)}
        self._lock = Lock()
        self._ending = Event()
        self._processes = Processes(
            environment, arguments, self._run_ended, longest=_longest(settings), settling=settings.settle_seconds
        )
        self._clock = self._make_clock()
        self._clock_thread = Thread(target=self._clock.start, name="clock", daemon=True)
        self._moved: SimpleQueue[int] = SimpleQueue()
        self._depth_thread = Thread(target=self._watch_depth, name="depth", daemon=True)
        self._health: Health | None = None

    def start(self) -> str | None:
        """Where its health is told; None if nowhere."""
        address = None
        if self._settings.health_address != OFF:
            figures = Figures(self._current, self._processes.running)
            # First of all: an address in use must be known before anything runs.
            self._health = Health(
                self._settings.health_address,
                self.state,
                self.is_well,
                lambda: figures.text(self._tallies, is_well=self.is_well()),
            )
            address = self._health.start()
        self._clock_thread.start()
        if self._settings.trigger_depth:
            self._depth_thread.start()
        return address

    def end(self, at_once: Callable[[], bool]) -> int:
        """Start nothing more and let what runs settle what it holds; how many runs had to be killed."""
        self._ending.set()
        self._moved.put(0)
        longest = self._settings.max_seconds + self._settings.settle_seconds + _LAST_ANSWERS
        killed = self._processes.end(longest, at_once)
        self._stop_clock()
        if self._depth_thread.ident is not None:
            self._depth_thread.join(_DEPTH_ENDS_WITHIN)
        if self._health is not None:
            self._health.close()
        return killed

    def is_alive(self) -> bool:
        """Whether time still passes: without its clock a scheduler starts nothing for ever."""
        watches = not self._settings.trigger_depth or self._depth_thread.is_alive()
        return self._clock_thread.is_alive() and watches

    def keep_time(self) -> None:
        """Now and then: a job on an interval would wait for hours if the machine's clock were set back by as much."""
        now = datetime.now(UTC)
        for due in self.due:
            at = self._next(due.job)
            if due.is_interval and at is not None and at - now > due.period + _CLOCK_MAY_DIFFER:
                log.warning("the machine's clock was set back: due at once", job=due.job)
                self._clock.modify_job(due.job, next_run_time=now)

    def is_well(self) -> bool:
        """False if a clock stands still, a run cannot be ended, or a job fails and has for three of its intervals."""
        return self.is_alive() and not self._processes.is_stuck() and not self.failing()

    def failing(self) -> list[str]:
        now = datetime.now(UTC)
        periods = {due.job: due.period for due in self.due}
        with self._lock:
            return [
                job
                for job, tally in self._tallies.items()
                if tally.failures_in_a_row >= _FAILURES
                and now - (tally.last_success or self._began) > _PERIODS * periods.get(job, timedelta(minutes=1))
            ]

    def state(self) -> dict[str, object]:
        last = self._processes.last()
        written = {due.job: due for due in self.due}
        failing = self.failing()
        return {
            "began": _time(self._began),
            "failing": failing,
            "jobs": {
                job: {
                    "when": written[job].when if job in written else "at depth",
                    "next": _time(self._next(job)),
                    "running": self._processes.running(job),
                    "last_outcome": last[job].outcome if job in last else None,
                    "last_exit_code": last[job].code if job in last else None,
                    "last_ended": _time(last[job].ended) if job in last else None,
                    "last_success": _time(tally.last_success),
                    "failures_in_a_row": tally.failures_in_a_row,
                    "started": tally.started,
                    "left_out": tally.left_out,
                    "failed": tally.failed,
                }
                for job, tally in self._tallies.items()
            },
        }

    def _make_clock(self) -> Any:
        from apscheduler.executors.pool import ThreadPoolExecutor  # noqa: PLC0415  (only `schedule` needs it)
        from apscheduler.schedulers.blocking import BlockingScheduler  # noqa: PLC0415

        # Each job waits for its jitter in a thread of its own.
        clock = BlockingScheduler(timezone=UTC, executors={"default": ThreadPoolExecutor(max(len(self.due), 1))})
        for due in self.due:
            clock.add_job(
                self._start_due,
                trigger=due.trigger,
                args=(due,),
                id=due.job,
                next_run_time=due.first,
                # After a pause of the machine a job is due once, however long ago that was.
                coalesce=True,
                misfire_grace_time=None,
                max_instances=1,
            )
        return clock

    def _stop_clock(self) -> None:
        from apscheduler.schedulers import SchedulerNotRunningError  # noqa: PLC0415  (only `schedule` needs it)

        # A signal may come before the clock is up. What it then still finds due is not started.
        with suppress(SchedulerNotRunningError):
            self._clock.shutdown(wait=False)

    def _next(self, job: str) -> datetime | None:
        found = self._clock.get_job(job)
        # None as well while the clock has not begun.
        return getattr(found, "next_run_time", None)

    def _start_due(self, due: Due) -> None:
        if self._ending.wait(random.uniform(0, due.jitter.total_seconds())):
            return
        if not self._start(due.job, 1) and not self._ending.is_set():
            with self._lock:
                tally = self._tallies[due.job]
                tally.left_out += 1
                left_out = tally.left_out
            if left_out % _LEFT_OUT_TOLD == 1:
                at_work = self._processes.running(due.job)
                log.info("a start was left out", job=due.job, at_work=at_work, left_out=left_out)

    def _start(self, job: str, most: int) -> bool:
        if not self._processes.start(job, most):
            return False
        with self._lock:
            self._tallies[job].started += 1
        return True

    def _run_ended(self, job: str, last: LastRun) -> None:
        with self._lock:
            tally = self._tallies[job]
            if last.is_done:
                tally.last_success, tally.failures_in_a_row = last.ended, 0
            elif not (self._ending.is_set() and last.code < 0):
                tally.failed += 1
                tally.failures_in_a_row += 1
        if job == DRAIN:
            # Another thread looks: whoever waits for this one must not wait for the broker.
            self._moved.put(last.moved if last.is_done else 0)
        self._tell(last)

    def _watch_depth(self) -> None:
        settings = self._settings
        depth = _Depth(self._current)
        trigger = Trigger(
            depth.read,
            partial(self._processes.running, DRAIN),
            partial(self._start, DRAIN, settings.max_workers),
            settings.trigger_depth,
            settings.max_workers,
        )
        while not self._ending.is_set():
            try:
                moved = self._moved.get(timeout=settings.trigger_interval.total_seconds())
            except Empty:
                moved = None
            if self._ending.is_set():
                break
            try:
                if moved is None:
                    trigger.look()
                else:
                    trigger.ended(moved=moved)
            except Exception as error:  # noqa: BLE001  (the next look may succeed; without this thread none would)
                log.error("the depth could not be looked at", failure=error)  # noqa: TRY400  (ours: with the trace)
        depth.close()


class _Depth:
    """The depth, for as long as the scheduler lives."""

    def __init__(self, current: Current) -> None:
        self._current = current
        self._used = current.settings
        self._depth = Depth(self._used)

    def read(self) -> int | None:
        depth = self._depth.read()
        if depth is not None or not self._current.renew(self._used):
            return depth
        self._depth.close()
        self._used = self._current.settings
        self._depth = Depth(self._used)
        return self._depth.read()

    def close(self) -> None:
        self._depth.close()


def _longest(settings: Settings) -> float:
    """Seconds after which a run is ended: twice what every job is bounded by.

    The other half is for what no job breaks off, such as a statement, and for a run repeated with a new password.
    """
    return 2 * (settings.connect_timeout_seconds + settings.max_seconds + settings.settle_seconds)


def _problems(settings: Settings, due: Sequence[Due]) -> list[str]:
    """What a run would end with 2 for, every time."""
    problems = []
    jobs = {one.job for one in due}
    if not jobs and not settings.trigger_depth:
        problems.append(
            "there is nothing to schedule: every dlqbatch.schedule-… is off and dlqbatch.trigger-depth is 0. Set one, "
            "such as dlqbatch.schedule-drain=60s"
        )
    if (settings.trigger_depth or DRAIN in jobs) and not queues_of(settings):
        problems.append(
            "there is nothing to drain: dlqbatch.ladder is false, and no dlqbatch.topology.NAME.kind is per-queue or "
            "ladder. Describe one, or set dlqbatch.schedule-drain=off and dlqbatch.trigger-depth=0"
        )
    keeping = [job for job in _KEEPING if job in jobs]
    if keeping and settings.database_url_is_default:
        off = " and ".join(f"dlqbatch.schedule-{job}=off" for job in keeping)
        problems.append(
            f"{', '.join(keeping)}: the dead store has to be in a database that is named. Set DLQBATCH_DATABASE_URL "
            f"(dlqbatch.database-url), or {off}"
        )
    if "check" in jobs and not settings.check_queues:
        problems.append(
            "there is no queue to check: set dlqbatch.check-queues, such as dlq.*, or dlqbatch.schedule-check=off"
        )
    return problems


def _time(at: datetime | None) -> str | None:
    return None if at is None else at.astimezone(UTC).isoformat(timespec="milliseconds")
