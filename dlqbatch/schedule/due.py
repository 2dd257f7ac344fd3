"""When each job is due, as the settings say it, and the triggers of APScheduler for that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from typing import Any, Final

from dlqbatch.settings import Settings
from dlqbatch.settings.schedule_options import OFF, cron_trigger
from dlqbatch.settings.values import duration

JOBS: Final = ("drain", "ingest", "lifecycle", "replay", "monitor", "retain", "check")
_LOOKED_AT: Final = 4
# Between the first starts of two jobs.
_MOST_APART: Final = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class Due:
    """A job that is not off."""

    job: str
    when: str
    """The text of the setting."""
    trigger: Any
    first: datetime
    period: timedelta
    """The longest time between two of the next starts."""
    jitter: timedelta

    @property
    def is_interval(self) -> bool:
        return isinstance(duration(self.when), timedelta)

    def times(self, number: int) -> list[datetime]:
        """The next starts."""
        return list(islice(_times(self.trigger, self.first), number))


def due_jobs(settings: Settings, now: datetime) -> tuple[Due, ...]:
    when = {job: getattr(settings, f"schedule_{job}") for job in JOBS}
    if settings.database_url_is_default and "schedule_replay" not in settings.written_in:
        when["replay"] = OFF  # nothing can be released there
    when = {job: text for job, text in when.items() if text != OFF}
    # Jobs on intervals begin one after the other: each start is a cold one and costs most of a core, and several on one
    # beat would keep each other waiting.
    intervals = [interval for text in when.values() if isinstance(interval := duration(text), timedelta)]
    apart = min(_MOST_APART, min(intervals, default=timedelta()) / max(len(intervals), 1))
    found, phase = [], timedelta()
    for job, text in when.items():
        is_interval = isinstance(duration(text), timedelta)
        found.append(_due(job, text, settings, now + phase if is_interval else now))
        phase += apart * is_interval
    return tuple(found)


def _due(job: str, when: str, settings: Settings, now: datetime) -> Due:
    from apscheduler.triggers.interval import IntervalTrigger  # noqa: PLC0415  (loaded after signals are taken)

    interval = duration(when)
    if isinstance(interval, timedelta):
        # Counted from now and not from midnight, so that a scheduler that starts often still works.
        trigger, first = IntervalTrigger(seconds=interval.total_seconds(), start_date=now, timezone=UTC), now
    else:
        trigger = cron_trigger(when, settings.time_zone)
        first = trigger.get_next_fire_time(None, now)
    gaps = [later - earlier for earlier, later in pairwise(islice(_times(trigger, first), _LOOKED_AT))]
    # A start that is put off past the next one would be a start left out.
    return Due(job, when, trigger, first, max(gaps), min(settings.schedule_jitter, min(gaps) / 2))


def _times(trigger: Any, first: datetime) -> Iterator[datetime]:
    time = first
    while time is not None:
        yield time
        time = trigger.get_next_fire_time(time, time)
