"""When a message that failed is tried again: back-off delays of 1, 5, 15, 30 and 60 minutes, or the next off-peak hour.

Time zones come from the system, or from the package `tzdata` where the system has none (Windows, slim images). It is
required, since without it nothing would say that a zone is missing before a night is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final, assert_never
from zoneinfo import ZoneInfo

from dlqbatch.errors import SettingsError
from dlqbatch.store.states import Strategy

_LAST_HOUR: Final = 23
_DAYS_AHEAD: Final = 4
"""A clock change can take one night's hours away, and a change of the date line a whole day."""


@dataclass(frozen=True, slots=True)
class Options:
    backoff: tuple[timedelta, ...] = tuple(timedelta(minutes=minutes) for minutes in (1, 5, 15, 30, 60))
    off_peak_hours: tuple[int, ...] = (2, 3, 4)
    zone: tzinfo = UTC
    recheck: timedelta = timedelta(minutes=5)
    """How long a conditional retry waits before its conditions are checked again."""
    spread: float = 0.1
    """The largest part of a delay that jitter adds to it."""
    off_peak_spread: timedelta = timedelta(minutes=15)
    """How far into the hour jitter may go, so that a night's backlog is not sent in its first second."""
    most_asked: timedelta = timedelta(hours=1)
    """The longest wait that a failure may ask for with `Retry-After`; zero: none is followed."""

    def __post_init__(self) -> None:
        problems: list[str] = []
        if not self.backoff or min(self.backoff) <= timedelta(0):
            problems.append("the back-off needs at least one delay, and each must be longer than zero")
        if not self.off_peak_hours or not all(0 <= hour <= _LAST_HOUR for hour in self.off_peak_hours):
            problems.append(f"the off-peak hours must be from 0 to {_LAST_HOUR}, at least one")
        if self.recheck <= timedelta(0):
            problems.append("the re-check interval must be longer than zero")
        if self.spread < 0 or not timedelta(0) <= self.off_peak_spread <= timedelta(hours=1):
            problems.append("the spread must not be below zero, and the off-peak spread at most an hour")
        if problems:
            raise SettingsError(*problems)


def zone(name: str) -> ZoneInfo:
    """The time zone with this IANA name."""
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError) as error:
        raise SettingsError(
            f"there is no time zone '{name}' on this machine. Use a name like Europe/Berlin; "
            "where the system has no zones (a slim image), install the package tzdata."
        ) from error


def is_off_peak(now: datetime, options: Options) -> bool:
    return now.astimezone(options.zone).hour in options.off_peak_hours


def next_retry(
    strategy: Strategy, retries_so_far: int, now: datetime, options: Options, *, jitter: float = 0.0, asked: int = 0
) -> datetime | None:
    """When the next attempt is due, in UTC; None if a person decides.

    `retries_so_far` is how many attempts from the store have failed; `jitter` is a fraction from 0 to 1; `asked` is how
    many seconds the failure asked to wait.
    """
    wait = min(timedelta(seconds=asked), options.most_asked)
    match strategy:
        case Strategy.IMMEDIATE | Strategy.CONDITIONAL:
            delay = max(options.backoff[min(retries_so_far, len(options.backoff) - 1)], wait)
            return now.astimezone(UTC) + delay * (1 + options.spread * jitter)
        case Strategy.SCHEDULED:
            return next_off_peak(now + wait, options.off_peak_hours, options.zone) + options.off_peak_spread * jitter
        case Strategy.MANUAL:
            return None
    assert_never(strategy)


def next_off_peak(now: datetime, hours: tuple[int, ...], zone: tzinfo) -> datetime:
    """The first of these full hours after `now`, in UTC.

    An hour that the clocks leave out is passed over for the next one that exists; of an hour that comes twice only the
    first counts.
    """
    now = now.astimezone(UTC)
    today = now.astimezone(zone).replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=None, fold=0)
    found: list[datetime] = []
    for days in range(-1, _DAYS_AHEAD):
        for hour in hours:
            wall = today + timedelta(days=days, hours=hour)
            instant = wall.replace(tzinfo=zone).astimezone(UTC)
            # A time that the clocks jumped over does not come back from UTC as what it was.
            if instant > now and instant.astimezone(zone).replace(tzinfo=None) == wall:
                found.append(instant)
    return min(found)
