"""When a dead message is tried again.

immediate    1, 5, 15, 30, 60 minutes after the last failure: what passes by itself, soon
scheduled    the next off-peak hour of a time zone: what had too much at once
conditional  looked at every few minutes, and sent while its origin and this machine are well
manual       not before a person says so

Time zones come from the system, or from the package `tzdata` where the system has none (Windows, slim images); the
package belongs among the requirements, since nothing else says that it is missing before a night is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from enum import StrEnum
from typing import Final, assert_never
from zoneinfo import ZoneInfo

from dlqbatch.errors import SettingsError

_LAST_HOUR: Final = 23
_DAYS_AHEAD: Final = 4
"""A clock change can take one night's hours away, and a change of the date line a whole day."""


class Strategy(StrEnum):
    IMMEDIATE = "immediate"
    SCHEDULED = "scheduled"
    CONDITIONAL = "conditional"
    MANUAL = "manual"


@dataclass(frozen=True, slots=True)
class Options:
    backoff: tuple[timedelta, ...] = tuple(timedelta(minutes=minutes) for minutes in (1, 5, 15, 30, 60))
    off_peak_hours: tuple[int, ...] = (2, 3, 4)
    zone: tzinfo = UTC
    recheck: timedelta = timedelta(minutes=5)
    spread: float = 0.1
    """How much of a delay jitter may add to it."""
    off_peak_spread: timedelta = timedelta(minutes=15)
    """How far into the hour jitter may go, so that a night's backlog is not sent in its first second."""

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


def next_retry(
    strategy: Strategy, retries_so_far: int, now: datetime, options: Options, *, jitter: float = 0.0
) -> datetime | None:
    """When it is due, in UTC; None if only a person can say.

    `retries_so_far` is how many attempts from the store have failed; `jitter` is a fraction from 0 to 1.
    """
    match strategy:
        case Strategy.IMMEDIATE:
            delay = options.backoff[min(retries_so_far, len(options.backoff) - 1)]
            return now.astimezone(UTC) + delay * (1 + options.spread * jitter)
        case Strategy.SCHEDULED:
            return next_off_peak(now, options.off_peak_hours, options.zone) + options.off_peak_spread * jitter
        case Strategy.CONDITIONAL:
            return now.astimezone(UTC) + options.recheck * (1 + options.spread * jitter)
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


# --- What a conditional retry waits for


@dataclass(frozen=True, slots=True)
class Limits:
    cpu: float = 80.0
    memory: float = 85.0


@dataclass(frozen=True, slots=True)
class Conditions:
    """How things stand; loads in per cent."""

    breaker_admits: bool
    """It is closed for the origin, or lets this one through as its probe."""
    cpu: float
    memory: float
    database_reachable: bool

    def why_not(self, limits: Limits) -> tuple[str, ...]:
        """Everything that speaks against sending now; empty if nothing does."""
        reasons: list[str] = []
        if not self.breaker_admits:
            reasons.append("the circuit breaker of its origin is open")
        # Written so that a load which is not a number holds it back too.
        if not self.cpu < limits.cpu:
            reasons.append(f"CPU at {self.cpu:.0f} %, must be below {limits.cpu:.0f} %")
        if not self.memory < limits.memory:
            reasons.append(f"memory at {self.memory:.0f} %, must be below {limits.memory:.0f} %")
        if not self.database_reachable:
            reasons.append("the database cannot be reached")
        return tuple(reasons)
