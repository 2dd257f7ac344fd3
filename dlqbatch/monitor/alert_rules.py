"""Which alerts stand, fire and end, decided from figures and thresholds alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from dlqbatch.monitor.metrics import Metrics
from dlqbatch.store.states import NEW_GROUP, Status

HIGH_INGESTION: Final = "HighDLQIngestionRate"
BACKLOG: Final = "DLQBacklogGrowing"
LOW_RESOLUTION: Final = "LowResolutionRate"
RETENTION: Final = "RetentionBehind"
QUEUE_DEEP: Final = "QueueStaysDeep"
RUNS_BOUNDED: Final = "RunsEndAtTheirBound"
RETRIES_UNPROVEN: Final = "RetriesUnproven"
# These fire when a threshold is crossed, and end when it no longer is. The alert of a new group fires only once.
STANDING: Final = frozenset(
    {HIGH_INGESTION, BACKLOG, LOW_RESOLUTION, RETENTION, QUEUE_DEEP, RUNS_BOUNDED, RETRIES_UNPROVEN}
)
# The subject of an alert that is about the store as a whole.
EVERYTHING: Final = ""
# The most tries of sending an alert to a receiver; the pauses between them make about a day.
MOST_TRIES: Final = 30
# The time for which one worker alone sends to a receiver; longer than any call takes.
TURN: Final = timedelta(minutes=1)
_LONGEST_PAUSE: Final = timedelta(hours=1)
_PLACES_NAMED: Final = 3


def pause_after(tries: int) -> timedelta:
    """The pause after a failed try of sending to a receiver: a minute, doubled after each try."""
    return min(timedelta(minutes=2 ** min(tries - 1, 10)), _LONGEST_PAUSE)


class Severity(StrEnum):
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class Thresholds:
    ingestion_per_minute: float = 100.0
    backlog: int = 10_000
    resolution_rate: float = 0.5
    resolution_minimum: int = 5
    """The fewest decisions over which the resolution rate may fire."""
    new_groups: bool = True
    queue_depth: int = 5_000
    """0: no alert."""
    queue_deep_for: timedelta = timedelta(minutes=15)
    bounded_runs: int = 3
    """0: no alert."""
    unproven_after: timedelta = timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class Alert:
    name: str
    subject: str
    """What the alert is about: a fingerprint, a queue, a job, or EVERYTHING."""
    severity: Severity
    summary: str
    """What is wrong, and where to look."""
    value: float | None = None
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """The newest message of a group; its texts are safe to show anywhere."""

    row_id: int
    error_type: str | None
    error_message: str | None


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A group of failures that no alert has named yet, with messages that wait for a person."""

    fingerprint: str
    size: int
    sample: Sample | None = None
    """The largest groups have one; of the others only the number is reported."""


@dataclass(frozen=True, slots=True)
class LargestGroup:
    """The group with most of the messages that are not over yet."""

    fingerprint: str
    error_type: str | None
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Notice:
    """An alert as it is sent to a receiver."""

    id: int
    name: str
    subject: str
    severity: Severity
    summary: str
    value: float | None
    threshold: float | None
    fired_at: datetime
    resolved_at: datetime | None = None
    """None while the alert stands."""

    @property
    def state(self) -> str:
        return "fired" if self.resolved_at is None else "resolved"

    def as_dict(self) -> dict[str, object]:
        return {
            "state": self.state,
            "name": self.name,
            "subject": self.subject,
            "severity": self.severity.value,
            "summary": self.summary,
            "value": self.value,
            "threshold": self.threshold,
            "fired_at": self.fired_at.isoformat(timespec="seconds"),
            "resolved_at": None if self.resolved_at is None else self.resolved_at.isoformat(timespec="seconds"),
        }


@dataclass(frozen=True, slots=True)
class Settled:
    """The alerts that this run has stored as fired and as resolved; no other run stores them again."""

    fired: tuple[Notice, ...]
    resolved: tuple[Notice, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """A claim of one worker to send these alerts to one receiver; no other worker sends them before it ends."""

    until: datetime
    notices: tuple[Notice, ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """How many alerts a receiver has not taken, and when it is tried again."""

    number: int
    next_try_at: datetime


def standing(metrics: Metrics, thresholds: Thresholds) -> tuple[Alert, ...]:
    """The alerts of these figures; a figure that equals its threshold makes none."""
    return (
        *_store_alerts(metrics, thresholds),
        *_deep_queues(metrics, thresholds),
        *_bounded_jobs(metrics, thresholds),
        *_unproven(metrics, thresholds),
    )


def _store_alerts(metrics: Metrics, thresholds: Thresholds) -> Iterator[Alert]:
    if metrics.ingested_per_minute > thresholds.ingestion_per_minute:
        yield Alert(
            HIGH_INGESTION,
            EVERYTHING,
            Severity.WARNING,
            f"{metrics.ingested_per_minute:,.5g} new dead messages a minute, more than "
            f"{thresholds.ingestion_per_minute:,g}. Look: dlqbatch messages groups",
            metrics.ingested_per_minute,
            thresholds.ingestion_per_minute,
        )
    if metrics.backlog > thresholds.backlog:
        yield Alert(
            BACKLOG,
            EVERYTHING,
            Severity.CRITICAL,
            f"{metrics.backlog:,} dead messages are not over yet, more than {thresholds.backlog:,}. "
            "Look: dlqbatch status",
            metrics.backlog,
            thresholds.backlog,
        )
    rate, decided = metrics.resolution_rate, sum(metrics.outcomes.values())
    if rate is not None and decided >= thresholds.resolution_minimum and rate < thresholds.resolution_rate:
        yield Alert(
            LOW_RESOLUTION,
            EVERYTHING,
            Severity.WARNING,
            f"{rate:.0%} of the {decided:,} dead messages decided in the last hour were resolved, fewer than "
            f"{thresholds.resolution_rate:.0%}. Look: dlqbatch messages groups --status failed --status manual",
            round(rate, 4),
            thresholds.resolution_rate,
        )
    overdue = {status: number for status, number in metrics.overdue.items() if number}
    if overdue:
        each = ", ".join(f"{number:,} {status}" for status, number in overdue.items())
        remedy = "run retain more often, or raise retain_max_seconds"
        if overdue.keys() & {Status.FAILED, Status.ARCHIVED}:
            remedy += "; failed and archived ones need a cold_storage"
        yield Alert(
            RETENTION,
            EVERYTHING,
            Severity.WARNING,
            f"{sum(overdue.values()):,} messages are kept longer than the settings say ({each}): retain does "
            f"not run, or does not keep up. Look: dlqbatch status, the last runs; {remedy}",
            sum(overdue.values()),
            0,
        )


def _deep_queues(metrics: Metrics, thresholds: Thresholds) -> Iterator[Alert]:
    """A queue that is no longer measured keeps its last depth, so that its alert stands."""
    for one in metrics.queues if thresholds.queue_depth else ():
        since = one.deep_since(thresholds.queue_depth)
        if since is not None and metrics.at - since >= thresholds.queue_deep_for:
            yield Alert(
                QUEUE_DEEP,
                one.queue,
                Severity.CRITICAL,
                f"'{one.queue}' held {one.depth:,} messages at {one.at:%Y-%m-%d %H:%M} UTC, and more than "
                f"{thresholds.queue_depth:,} whenever somebody looked since {since:%Y-%m-%d %H:%M}. What takes from it "
                "does not run, or does not keep up. Look: dlqbatch status",
                one.depth,
                thresholds.queue_depth,
            )


def _bounded_jobs(metrics: Metrics, thresholds: Thresholds) -> Iterator[Alert]:
    for job, number in metrics.bounds_in_a_row.items() if thresholds.bounded_runs else ():
        if number >= thresholds.bounded_runs:
            yield Alert(
                RUNS_BOUNDED,
                job,
                Severity.WARNING,
                f"the last {number:,} runs of {job} ended at their bound: it does not keep up. Look: stopped_by and "
                "queues in its reports; run it more often, or several at once, or raise max_messages",
                number,
                thresholds.bounded_runs,
            )


def _unproven(metrics: Metrics, thresholds: Thresholds) -> Iterator[Alert]:
    """One alert for all origins, about retries that were sent long ago and whose outcome is not known."""
    before = metrics.at - thresholds.unproven_after
    if metrics.oldest_sent is None or metrics.oldest_sent >= before:
        return
    late = [one for one in metrics.unproven if one.sent_at < before]
    named = "; ".join(f"{one.retries:,} to '{one.place}': {one.missing}" for one in late[:_PLACES_NAMED])
    more = f"; and {len(late) - _PLACES_NAMED} more places" if len(late) > _PLACES_NAMED else ""
    minutes = (metrics.at - metrics.oldest_sent).total_seconds() / 60
    yield Alert(
        RETRIES_UNPROVEN,
        EVERYTHING,
        Severity.WARNING,
        f"retries that were sent up to {minutes:,.0f} min ago are not known to have succeeded or failed "
        f"({named or 'no lifecycle has looked since'}{more}). Look: dlqbatch status",
        sum(one.retries for one in late) or metrics.sent,
        round(thresholds.unproven_after.total_seconds() / 60, 1),
    )


def command_for(name: str, subject: str) -> str:
    """The command that shows what an alert is about, to paste."""
    match name:
        case _ if name == NEW_GROUP:
            return f"dlqbatch groups show {subject}"
        case _ if name in {BACKLOG, HIGH_INGESTION}:
            return "dlqbatch groups list"
        case _ if name == LOW_RESOLUTION:
            return "dlqbatch groups list --status failed --status manual"
        case _:
            return "dlqbatch status"


def with_most(alert: Alert, group: LargestGroup | None) -> Alert:
    """Where most of it is, for the alerts about the number of messages."""
    if group is None or alert.name not in {BACKLOG, HIGH_INGESTION, LOW_RESOLUTION}:
        return alert
    split = ", ".join(f"{number:,} {status}" for status, number in group.counts.items() if number)
    what = group.error_type or "nobody knows why"
    most = f"Most of it: {what} ({split}): dlqbatch groups show {group.fingerprint}"
    return replace(alert, summary=f"{alert.summary}. {most}")


def of_group(group: NewGroup) -> Alert:
    messages = "1 message needs" if group.size == 1 else f"{group.size:,} messages need"
    sample = group.sample
    like = ""
    if sample is not None:
        what = ": ".join(text for text in (sample.error_type, sample.error_message) if text) or "nobody knows why"
        like = f", such as message {sample.row_id}: {what}"
    return Alert(
        NEW_GROUP,
        group.fingerprint,
        Severity.WARNING,
        f"new group {group.fingerprint}: {messages} a person{like}. "
        f"Look: dlqbatch messages list --group {group.fingerprint}",
        group.size,
    )


def changes(
    wrong: Iterable[Alert], active: Collection[tuple[str, str]]
) -> tuple[tuple[Alert, ...], frozenset[tuple[str, str]]]:
    """The alerts that fire, and the active ones that end, by name and subject."""
    wrong = tuple(wrong)
    still = {(alert.name, alert.subject) for alert in wrong}
    fire = tuple(alert for alert in wrong if (alert.name, alert.subject) not in active)
    return fire, frozenset(key for key in active if key[0] in STANDING and key not in still)
