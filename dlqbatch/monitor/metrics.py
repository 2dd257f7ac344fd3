"""The figures of the dead store, the runs and the queues, as plain numbers for alerts, for Prometheus and for people.

A run reports the depth of each of its queues, before and after. The depth after it counts: it is what the run could not
take. The depth before it may be new messages only; it counts where the depth after the run is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from dlqbatch.lifecycle.return_checks import UnprovenRetries

QUEUES_NAMED: Final = 50
"""The most queues that are named one by one, the deepest first; a wildcard may match thousands."""


class Reported(NamedTuple):
    """A run in the log of runs."""

    started_at: datetime
    ended_at: datetime
    report: object
    """Another version of this program may have written it."""


@dataclass(frozen=True, slots=True)
class QueueDepth:
    queue: str
    known: tuple[tuple[datetime, int], ...]
    """The depths with the times at which they were measured; the newest first, and never empty."""

    @property
    def at(self) -> datetime:
        return self.known[0][0]

    @property
    def depth(self) -> int:
        return self.known[0][1]

    def deep_since(self, threshold: int) -> datetime | None:
        """Since when every measured depth was above the threshold; None if the last one was not."""
        since = None
        for at, depth in self.known:
            if depth <= threshold:
                break
            since = at
        return since


def queue_depths(reports: Iterable[Reported]) -> tuple[QueueDepth, ...]:
    """The queues of these reports, the deepest first."""
    known: dict[str, set[tuple[datetime, int]]] = {}
    for run in reports:
        queues: Any = run.report.get("queues") if isinstance(run.report, dict) else None
        for queue, depth in queues.items() if isinstance(queues, dict) else ():
            if not isinstance(depth, dict):
                continue
            if isinstance(left := depth.get("left"), int):
                known.setdefault(queue, set()).add((run.ended_at, left))
            elif isinstance(found := depth.get("found"), int):
                known.setdefault(queue, set()).add((run.started_at, found))
    depths = [QueueDepth(queue, tuple(sorted(seen, reverse=True))) for queue, seen in known.items()]
    return tuple(sorted(depths, key=lambda one: (-one.depth, one.queue)))


def report_of_depths(at: datetime, depths: Mapping[str, int]) -> Reported:
    """Depths measured just now, in the form in which a run reports them."""
    return Reported(at, at, {"queues": {queue: {"found": depth, "left": depth} for queue, depth in depths.items()}})


def bounds_in_a_row(reports: Iterable[Reported]) -> int:
    """How many of these runs ended at their bound, counted from the first run to the first that did not."""
    number = 0
    for run in reports:
        if not (isinstance(run.report, dict) and run.report.get("hit_bound") is True):
            break
        number += 1
    return number


@dataclass(frozen=True, slots=True)
class Tops:
    """The most frequent names with their numbers; all the rest is one number."""

    named: tuple[tuple[str, int], ...] = ()
    other: int = 0

    def as_dict(self) -> dict[str, int]:
        # An error type may be called "other" too: then its number and the rest are added, as they are for Prometheus.
        found = dict(self.named)
        return found | {"other": found.get("other", 0) + self.other} if self.other else found


@dataclass(frozen=True, slots=True)
class EventFigures:
    event: str
    dead: int
    retries: int
    """How often the messages that died had been retried before."""


@dataclass(frozen=True, slots=True)
class LastRun:
    job: str
    started_at: datetime
    ended_at: datetime
    outcome: str
    stopped_by: str
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Metrics:
    """All figures at one time; "the last hour" is the hour that ends at `at`."""

    at: datetime
    states: Mapping[str, int]
    """How many messages are in each state; every state is there."""
    backlog: int
    """Messages that are pending, processing, manual or failed."""
    ingested_per_minute: float
    """The mean since the monitor's last measurement, or the number of the last minute if that is more."""
    ingested_lately: int
    """Arrivals in the last minutes, which the next measurement counts again: a transaction may commit late."""
    ingested_last_minute: int
    ingested_last_hour: int
    outcomes: Mapping[str, int]
    """How many messages were resolved, failed or manual by the last decision about each of them in the last hour."""
    seconds_in_store: float | None
    """The mean time in the store of what ended in the last hour; None if nothing did."""
    errors: Tops
    """Deaths of the last day by error type."""
    events: tuple[EventFigures, ...]
    """The most frequent events of the deaths of the last day."""
    attempts: Mapping[str, int]
    """Attempts that succeeded or failed in the last hour."""
    replays: Mapping[str, int]
    """Retries that the newest replay plans sent: succeeded, failed, or open while that is not known."""
    oldest_waiting: datetime | None
    overdue: Mapping[str, int]
    """Messages by state that `retain` should have deleted or archived some time ago."""
    due: int
    next_due: datetime | None
    """When the next message is due; None if no message waits for its time."""
    breakers: Mapping[str, int]
    """How many circuit breakers are open and half-open."""
    origins_held: tuple[str, ...]
    """The first few origins whose breakers those are."""
    groups_for_a_person: int
    runs: Mapping[str, Mapping[str, int]]
    """For each job the number of runs in the last hour, and the sums of their counts."""
    last_runs: tuple[LastRun, ...]
    queues: tuple[QueueDepth, ...] = ()
    """The queues that drain and ingest serve, the deepest first."""
    bounds_in_a_row: Mapping[str, int] = field(default_factory=dict)
    """For each job how many of its last runs, one after the other, ended at their bound."""
    sent: int = 0
    """Retries that are sent, and neither resolved nor back."""
    oldest_sent: datetime | None = None
    unproven: tuple[UnprovenRetries, ...] = ()
    """What the newest lifecycle run found missing of those retries, by origin; the longest-sent first."""

    @property
    def resolution_rate(self) -> float | None:
        """None if nothing was decided in the last hour."""
        return _ratio(self.outcomes.get("resolved", 0), sum(self.outcomes.values()))

    @property
    def retry_success(self) -> float | None:
        return _ratio(self.attempts.get("succeeded", 0), sum(self.attempts.values()))

    @property
    def replays_known(self) -> int:
        return self.replays.get("succeeded", 0) + self.replays.get("failed", 0)

    @property
    def replay_success(self) -> float | None:
        """Share of the retries of replays whose end is known."""
        return _ratio(self.replays.get("succeeded", 0), self.replays_known)

    @property
    def dead_letter_rate(self) -> float | None:
        """Share of the messages that the drains of the last hour dead-lettered, of all delayed or dead-lettered."""
        counts = self.runs.get("drain", {})
        dead = counts.get("dead_lettered", 0)
        return _ratio(dead, dead + counts.get("delayed", 0))

    def as_dict(self) -> dict[str, object]:
        return {
            "at": _time(self.at),
            "states": dict(self.states),
            "backlog": self.backlog,
            "ingested_per_minute": _rounded(self.ingested_per_minute),
            "ingested_last_minute": self.ingested_last_minute,
            "ingested_last_hour": self.ingested_last_hour,
            "outcomes_last_hour": dict(self.outcomes),
            "resolution_rate": _rounded(self.resolution_rate),
            "seconds_in_store": _rounded(self.seconds_in_store),
            "errors_last_day": self.errors.as_dict(),
            "events_last_day": {one.event: {"dead": one.dead, "retries": one.retries} for one in self.events},
            "attempts_last_hour": dict(self.attempts),
            "retry_success": _rounded(self.retry_success),
            "replays": dict(self.replays),
            "replay_success": _rounded(self.replay_success),
            "oldest_waiting": _time(self.oldest_waiting),
            "overdue": dict(self.overdue),
            "due": self.due,
            "next_due": _time(self.next_due),
            "breakers": dict(self.breakers),
            "origins_held": list(self.origins_held),
            "groups_for_a_person": self.groups_for_a_person,
            "dead_letter_rate": _rounded(self.dead_letter_rate),
            "runs_last_hour": {job: dict(counts) for job, counts in self.runs.items()},
            "queues": {one.queue: {"depth": one.depth, "at": _time(one.at)} for one in self.queues[:QUEUES_NAMED]},
            "bounds_in_a_row": dict(self.bounds_in_a_row),
            "sent": self.sent,
            "oldest_sent": _time(self.oldest_sent),
            "unproven": [one.as_dict() for one in self.unproven],
            "last_runs": [
                {
                    "job": run.job,
                    "started_at": _time(run.started_at),
                    "ended_at": _time(run.ended_at),
                    "outcome": run.outcome,
                    "stopped_by": run.stopped_by,
                    "counts": dict(run.counts),
                }
                for run in self.last_runs
            ],
        }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _time(at: datetime | None) -> str | None:
    return None if at is None else at.astimezone(UTC).isoformat(timespec="seconds")
