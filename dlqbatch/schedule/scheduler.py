"""The scheduler: starts each job when it is due and more runs for deep queues, and reports how they do.

It has three kinds of threads. APScheduler's own say when a job is due, and start a process that they do not wait for.
One thread looks at the depth of the queues. Each run has one that reads what it prints. The main thread is left to
signals.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from threading import Event, Lock, Thread
from typing import Final

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers import SchedulerNotRunningError
from apscheduler.schedulers.blocking import BlockingScheduler

from dlqbatch import __version__, logs
from dlqbatch.aws.secrets import CurrentSettings
from dlqbatch.errors import SettingsError
from dlqbatch.monitor.queue_depths import DRAIN, INGEST, queues_of
from dlqbatch.schedule.due import Due, due_jobs
from dlqbatch.schedule.health import Figures, Health
from dlqbatch.schedule.processes import LastRun, Processes, Tally
from dlqbatch.schedule.scaling import Trigger, Watch
from dlqbatch.settings import Settings
from dlqbatch.settings.schedule_options import OFF

log = logs.get(__name__)

# Jobs that refuse the default SQLite file, because a disposable one must not swallow messages.
_KEEPING: Final = ("ingest", "lifecycle", "replay", "retain")
# A job is failing after so many failed runs in a row and so many of its intervals.
_FAILURES: Final = 3
_PERIODS: Final = 3
# One of so many starts left out is logged; the counter has them all.
_LEFT_OUT_LOGGED: Final = 10
# Seconds; the main loop turns every second, and less often on a machine with too much to do.
_PULSE_WITHIN: Final = 30.0
# Seconds that a broker which has fallen silent keeps a run longer than its bounds.
_LAST_ANSWERS: Final = 5.0
_CLOCK_MAY_DIFFER: Final = timedelta(seconds=1)


class Scheduler:
    def __init__(
        self,
        settings: Settings,
        environment: Mapping[str, str],
        arguments: Sequence[str] = (),
        tell: Callable[[LastRun], None] = lambda _last: None,
        read_again: Callable[[], Settings] | None = None,
    ) -> None:
        """`environment` and `arguments` hand these settings to the runs; `tell` is called when one has ended.

        `read_again` reads the settings anew, because a secret may hold others by then.
        """
        self._settings = settings
        self._current = CurrentSettings(settings, read_again)
        self._began = datetime.now(UTC)
        self.due = due_jobs(settings, self._began)
        if problems := _problems(settings, self.due):
            raise SettingsError(*problems)
        self._tell = tell
        jobs = {due.job for due in self.due} | ({DRAIN} if settings.trigger_depth else set())
        self._tallies = {job: Tally() for job in sorted(jobs)}
        self._lock = Lock()
        self._ending = Event()
        self._processes = Processes(
            environment,
            arguments,
            self._run_ended,
            longest=partial(_longest, settings),
            settling=settings.settle_seconds,
        )
        # Each job waits for its jitter in a thread of its own.
        threads = ThreadPoolExecutor(max(len(self.due), 1))
        self._clock = BlockingScheduler(timezone=UTC, executors={"default": threads})
        for due in self.due:
            self._clock.add_job(
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
        self._clock_thread = Thread(target=self._clock.start, name="clock", daemon=True)
        looked_at = sorted(jobs & {DRAIN, INGEST})
        self._watch = Watch(self._current, looked_at, self._triggers(), settings.trigger_interval.total_seconds())
        self._pulse = time.monotonic()
        self._health: Health | None = None

    def start(self) -> str | None:
        """Return the address of the health endpoint; None if there is none."""
        address = None
        if self._settings.health_address != OFF:
            figures = Figures(self._current, self._processes.running, self._watch.seen)
            # First of all, because an address in use must be known before anything runs.
            self._health = Health(
                self._settings.health_address,
                self.state,
                self.is_well,
                lambda: figures.text(self._tallies, is_well=self.is_well()),
                self.has_pulse,
            )
            address = self._health.start()
        self._clock_thread.start()
        self._watch.start()
        return address

    def end(self, at_once: Callable[[], bool]) -> int:
        """Start nothing more and let the runs settle what they hold; return how many runs had to be killed."""
        self._ending.set()
        longest = self._settings.max_seconds + self._settings.settle_seconds + _LAST_ANSWERS
        killed = self._processes.end(longest, at_once)
        # A signal may come before the clock has begun. What the clock then still finds due is not started.
        with suppress(SchedulerNotRunningError):
            self._clock.shutdown(wait=False)
        self._watch.end()
        if self._health is not None:
            self._health.close()
        return killed

    def is_alive(self) -> bool:
        """Whether its threads live: without its clock a scheduler would never start anything again."""
        return self._clock_thread.is_alive() and self._watch.is_alive()

    def has_pulse(self) -> bool:
        """Whether the main loop goes on, which is all that /livez says."""
        return self._ending.is_set() or time.monotonic() - self._pulse < _PULSE_WITHIN

    def keep_time(self) -> None:
        """Called by the main loop. A job on an interval would wait for hours after the clock was set back by hours."""
        self._pulse = time.monotonic()
        now = datetime.now(UTC)
        for due in self.due:
            at = self._next(due.job)
            if due.is_interval and at is not None and at - now > due.period + _CLOCK_MAY_DIFFER:
                log.warning("the machine's clock was set back: due at once", job=due.job)
                self._clock.modify_job(due.job, next_run_time=now)

    def is_well(self) -> bool:
        """False if a thread has died, a run cannot be ended, or a job has failed for three of its intervals."""
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
        seen = self._watch.seen()
        return {
            "version": __version__,
            "began": _time(self._began),
            "failing": failing,
            "broker": {"reachable": seen.reachable, "since": _time(seen.since)},
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

    def _next(self, job: str) -> datetime | None:
        # The job of a clock that has not begun has no such attribute.
        return getattr(self._clock.get_job(job), "next_run_time", None)

    def _start_due(self, due: Due) -> None:
        if self._ending.wait(random.uniform(0, due.jitter.total_seconds())):
            return
        if not self._start(due.job, 1) and not self._ending.is_set():
            with self._lock:
                tally = self._tallies[due.job]
                tally.left_out += 1
                left_out = tally.left_out
            if left_out % _LEFT_OUT_LOGGED == 1:
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
            tally.add(last)
            if last.is_done:
                tally.last_success, tally.failures_in_a_row = last.ended, 0
            elif not (self._ending.is_set() and last.code < 0):
                tally.failed += 1
                tally.failures_in_a_row += 1
        self._watch.ended(job, moved=last.moved if last.is_done else 0)
        self._tell(last)

    def _triggers(self) -> dict[str, Trigger]:
        """Drains have one even if only the depth starts them; ingests only if they are scheduled: they may be off."""
        settings, jobs = self._settings, {due.job for due in self.due}
        wanted = {DRAIN: (settings.trigger_depth, settings.max_workers)}
        if INGEST in jobs:
            wanted[INGEST] = (settings.trigger_ingest_depth, settings.max_ingest_workers)
        return {
            job: Trigger(job, partial(self._processes.running, job), partial(self._start, job, most), threshold, most)
            for job, (threshold, most) in wanted.items()
            if threshold
        }


def _longest(settings: Settings, job: str) -> float:
    """Seconds after which a run is ended: twice the bounds of its job.

    The second half is for what no job breaks off, such as a statement, and for a run repeated with a new password.
    """
    return 2 * (settings.connect_timeout_seconds + settings.longest_run(job) + settings.settle_seconds)


def _problems(settings: Settings, due: Sequence[Due]) -> list[str]:
    """Settings with which every run of a job would end with exit code 2."""
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
