"""What is measured of the dead store and of the runs: plain numbers, for alerts, for Prometheus and for people."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Tops:
    """The most frequent names with their numbers; all that came after them is one number."""

    named: tuple[tuple[str, int], ...] = ()
    other: int = 0

    def as_dict(self) -> dict[str, int]:
        # A message may be called "other" too: its number and the rest are one then, as they are for Prometheus.
        found = dict(self.named)
        return found | {"other": found.get("other", 0) + self.other} if self.other else found


@dataclass(frozen=True, slots=True)
class EventFigures:
    event: str
    dead: int
    retries: int
    """Of those that died: how often they had been retried before."""


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
    """An hour, a day and a minute are those that end at `at`."""

    at: datetime
    states: Mapping[str, int]
    """How many messages are in each state; every state is there."""
    backlog: int
    """Pending, processing, manual and failed: what is not over yet."""
    ingested_last_minute: int
    ingested_last_hour: int
    outcomes: Mapping[str, int]
    """In the last hour: resolved, failed, manual."""
    seconds_in_store: float | None
    """Of what ended in the last hour, on average; None: nothing did."""
    errors: Tops
    """Of the last day."""
    events: tuple[EventFigures, ...]
    """Of the last day, the most frequent."""
    attempts: Mapping[str, int]
    """Closed in the last hour: succeeded, failed."""
    replays: Mapping[str, int]
    """Of the retries that the newest replay plans sent: succeeded, failed."""
    oldest_waiting: datetime | None
    due: int
    next_due: datetime | None
    """When the next message is due; None: none waits for its time."""
    breakers: Mapping[str, int]
    """Half-open and open ones."""
    origins_held: tuple[str, ...]
    """The origins whose breakers those are, the first ones only."""
    groups_for_a_person: int
    runs: Mapping[str, Mapping[str, int]]
    """In the last hour: by job, how many runs there were, and their counts added up."""
    last_runs: tuple[LastRun, ...]

    @property
    def resolution_rate(self) -> float | None:
        """None: nothing was decided in the last hour."""
        return share(self.outcomes.get("resolved", 0), sum(self.outcomes.values()))

    @property
    def retry_success(self) -> float | None:
        return share(self.attempts.get("succeeded", 0), sum(self.attempts.values()))

    @property
    def replay_success(self) -> float | None:
        return share(self.replays.get("succeeded", 0), sum(self.replays.values()))

    @property
    def dead_letter_rate(self) -> float | None:
        """What the drains of the last hour dead-lettered, of all that they delayed or dead-lettered."""
        counts = self.runs.get("drain", {})
        dead = counts.get("dead_lettered", 0)
        return share(dead, dead + counts.get("delayed", 0))

    def as_dict(self) -> dict[str, object]:
        return {
            "at": _time(self.at),
            "states": dict(self.states),
            "backlog": self.backlog,
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
            "due": self.due,
            "next_due": _time(self.next_due),
            "breakers": dict(self.breakers),
            "origins_held": list(self.origins_held),
            "groups_for_a_person": self.groups_for_a_person,
            "dead_letter_rate": _rounded(self.dead_letter_rate),
            "runs_last_hour": {job: dict(counts) for job, counts in self.runs.items()},
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


def share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _time(at: datetime | None) -> str | None:
    return None if at is None else at.astimezone(UTC).isoformat(timespec="seconds")
