"""What becomes of a claimed message, and when a message that failed is tried again.

immediate    1, 5, 15, 30, 60 minutes after the last failure: what passes by itself, soon
scheduled    the next off-peak hour of a time zone: what had too much at once
conditional  as immediate, and besides that it waits until its origin and this machine are well
manual       not before a person says so

Time zones come from the system, or from the package `tzdata` where the system has none (Windows, slim images); the
package belongs among the requirements, since nothing else says that it is missing before a night is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final, NamedTuple, assert_never
from zoneinfo import ZoneInfo

from dlqbatch.errors import SettingsError
from dlqbatch.lifecycle.rules import UNKNOWN, Rule, classify
from dlqbatch.store.states import Move, Status, Strategy, path

MAX_ATTEMPTS: Final = 5  # after so many failed attempts a message is failed
MAX_TRIPS: Final = 100
RESCHEDULED: Final = "rescheduled"
MANUAL: Final = "manual"
_LARGEST_COUNT: Final = 2**31 - 1  # what a column of integers holds; a row may have come in with it
_LAST_HOUR: Final = 23
_DAYS_AHEAD: Final = 4
"""A clock change can take one night's hours away, and a change of the date line a whole day."""


@dataclass(frozen=True, slots=True)
class Options:
    backoff: tuple[timedelta, ...] = tuple(timedelta(minutes=minutes) for minutes in (1, 5, 15, 30, 60))
    off_peak_hours: tuple[int, ...] = (2, 3, 4)
    zone: tzinfo = UTC
    recheck: timedelta = timedelta(minutes=5)
    """Between two looks whether the conditions of a conditional retry are met."""
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
        case Strategy.IMMEDIATE | Strategy.CONDITIONAL:
            delay = options.backoff[min(retries_so_far, len(options.backoff) - 1)]
            return now.astimezone(UTC) + delay * (1 + options.spread * jitter)
        case Strategy.SCHEDULED:
            return next_off_peak(now, options.off_peak_hours, options.zone) + options.off_peak_spread * jitter
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


@dataclass(frozen=True, slots=True)
class AfterFailure:
    """What becomes of a row whose attempt failed; each move is written and journalled, in one transaction."""

    moves: tuple[Move, ...]
    dlq_retry_count: int
    next_retry_at: datetime | None

    @property
    def status(self) -> Status:
        return self.moves[-1].end


def after_failed_attempt(
    status: Status,
    failed_before: int,
    strategy: Strategy,
    now: datetime,
    options: Options,
    *,
    jitter: float = 0.0,
    max_attempts: int = MAX_ATTEMPTS,
) -> AfterFailure:
    """Failed if that was the last attempt it gets, manual if no strategy says when to try again, else pending.

    `status` is processing, or resolved for what came back late; `failed_before` does not count this attempt.
    """
    failed = min(failed_before + 1, _LARGEST_COUNT)
    due = next_retry(strategy, failed, now, options, jitter=jitter)
    if failed >= max_attempts:
        end, due = Status.FAILED, None
    else:
        # Pending without a time would be a row that nothing ever picks up and nobody is shown.
        end = Status.MANUAL if due is None else Status.PENDING
    return AfterFailure(path(status, end, by_person=False), failed, due)


@dataclass(frozen=True, slots=True)
class Claimed:
    """A row that is a worker's until its lease ends, as far as it matters for what is to become of it."""

    row_id: int
    token: str
    identity: str
    error_type: str | None
    error_message: str | None
    event: str | None
    origin: str | None
    """What its circuit breaker is kept under; None: nobody knows where it failed."""
    failed_attempts: int
    next_retry_at: datetime | None
    body_size: int
    has_attempt: bool = False
    """It was taken over with an attempt that may have been published: that one goes on."""


class Back(NamedTuple):
    """What becomes of a claimed row that is not sent."""

    token: str
    to: Status
    reason: str
    next_retry_at: datetime | None = None
    strategy: Strategy | None = None
    """What it was classified as; None: what it was before."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of this machine's load, in per cent."""

    cpu: float = 80.0
    memory: float = 85.0

    def exceeded(self, cpu: float, memory: float) -> list[str]:
        """The reasons against sending now; empty if the machine is not too busy."""
        loads = (("CPU", cpu, self.cpu), ("memory", memory, self.memory))
        # Written so that a load which is not a number holds it back too.
        return [f"{name} at {load:.0f} %, must be below {most:.0f} %" for name, load, most in loads if not load < most]


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of claimed rows, by what is known of them alone."""

    rules: tuple[Rule, ...]
    options: Options
    limits: Limits
    load: Callable[[], tuple[float, float]]
    """CPU and memory of this machine, in per cent; called only when a row's sending depends on it."""
    jitter: Callable[[], float]
    """A random number from 0 to 1."""

    def sort_out(
        self, rows: Sequence[Claimed], admit: Callable[[Sequence[Claimed]], set[int]], now: datetime
    ) -> tuple[dict[int, Strategy | None], dict[int, tuple[Back, str, str]]]:
        """Rows to send, by id, with their strategy; and those to give back, with what they count as and why.

        `admit` gives the ids of those that the circuit breakers of their origins let through.

        A row is classified whenever it is claimed, so that a rule that somebody changed holds from the next try on.
        """
        # Holding a failure against every rule costs more than all else here, and most rows of a batch failed alike.
        failures = {(row.error_type, row.error_message) for row in rows}
        classified = {failure: classify(*failure, self.rules) for failure in failures}
        chosen = {row.row_id: classified[row.error_type, row.error_message] for row in rows}
        busy: list[str] = []
        admitted: set[int] = set()
        conditional = [row for row in rows if not row.has_attempt and chosen[row.row_id][0] is Strategy.CONDITIONAL]
        if conditional:
            busy = self.limits.exceeded(*self.load())
            # A machine that is too busy must not use up a breaker's one probe.
            admitted = set() if busy else admit(conditional)
        is_off_peak = now.astimezone(self.options.zone).hour in self.options.off_peak_hours
        send: dict[int, Strategy | None] = {}
        back: dict[int, tuple[Back, str, str]] = {}
        for row in rows:
            if row.has_attempt:
                send[row.row_id] = None
                continue
            strategy, rule = chosen[row.row_id]
            match strategy:
                case Strategy.MANUAL:
                    known = rule != UNKNOWN
                    reason = f"the rule '{rule}' leaves it to a person" if known else "no rule knows this failure"
                    to_person = Back(row.token, Status.MANUAL, reason, None, strategy)
                    back[row.row_id] = to_person, MANUAL, "rule" if known else UNKNOWN
                case Strategy.SCHEDULED if not is_off_peak:
                    due = next_retry(strategy, row.failed_attempts, now, self.options, jitter=self.jitter())
                    later = Back(row.token, Status.PENDING, "waits for an off-peak hour", due, strategy)
                    back[row.row_id] = later, RESCHEDULED, "off-peak"
                case Strategy.CONDITIONAL if row.row_id not in admitted:
                    reason = "; ".join(busy) or "the circuit breaker of its origin is open"
                    later = Back(row.token, Status.PENDING, reason, self.again(now), strategy)
                    back[row.row_id] = later, RESCHEDULED, "too-busy" if busy else "breaker-open"
                case Strategy.IMMEDIATE | Strategy.SCHEDULED | Strategy.CONDITIONAL:
                    send[row.row_id] = strategy
                case _:
                    assert_never(strategy)
        return send, back

    def again(self, now: datetime) -> datetime:
        """When what could not be sent this time is looked at again."""
        return now + self.options.recheck * (1 + self.options.spread * self.jitter())
