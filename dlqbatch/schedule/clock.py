"""When each job is due: what the settings say, as triggers of APScheduler."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from dlqbatch.settings.cron import cron_trigger
from dlqbatch.settings.schedule_options import OFF
from dlqbatch.settings.values import duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlqbatch.settings import Settings

JOBS: Final = ("drain", "ingest", "lifecycle", "monitor", "retain", "check")
_LOOKED_AT: Final = 4


@dataclass(frozen=True, slots=True)
class Due:
    """A job that is not off."""

    job: str
    when: str
    """As the settings say it."""
    trigger: Any
    first: datetime
    period: timedelta
    """The longest time between two of the next starts."""
    jitter: timedelta

    @property
    def is_interval(self) -> bool:
        return isinstance(duration(self.when), timedelta)

    def times(self, number: int) -> list[datetime]:
        return list(_times(self.trigger, self.first, number))


def due_jobs(settings: Settings, now: datetime) -> tuple[Due, ...]:
    written = {job: getattr(settings, f"schedule_{job}") for job in JOBS}
    return tuple(_due(job, when, settings, now) for job, when in written.items() if when != OFF)


def _due(job: str, when: str, settings: Settings, now: datetime) -> Due:
    from apscheduler.triggers.interval import IntervalTrigger  # noqa: PLC0415  (only `schedule` needs it)

    interval = duration(when)
    if isinstance(interval, timedelta):
        # Counted from now, and the first one is due at once: a scheduler that starts again and again still works.
        trigger, first = IntervalTrigger(seconds=interval.total_seconds(), start_date=now, timezone=UTC), now
    else:
        trigger = cron_trigger(when, settings.time_zone)
        first = trigger.get_next_fire_time(None, now)
    gaps = [later - earlier for earlier, later in pairwise(_times(trigger, first, _LOOKED_AT))]
    # A start that is put off past the next one would be a start left out.
    return Due(job, when, trigger, first, max(gaps), min(settings.schedule_jitter, min(gaps) / 2))


def _times(trigger: Any, first: datetime, number: int) -> Iterator[datetime]:
    time = first
    for _ in range(number):
        yield time
        time = trigger.get_next_fire_time(time, time)
