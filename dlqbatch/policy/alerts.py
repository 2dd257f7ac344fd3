"""When somebody has to be told, and of what: from figures to alerts that should stand, fire or end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from datetime import datetime

    from dlqbatch.policy.metrics import Metrics

HIGH_INGESTION: Final = "HighDLQIngestionRate"
BACKLOG: Final = "DLQBacklogGrowing"
LOW_RESOLUTION: Final = "LowResolutionRate"
NEW_GROUP: Final = "NewGroupNeedsPerson"
STANDING: Final = frozenset({HIGH_INGESTION, BACKLOG, LOW_RESOLUTION})
"""They fire whenever a threshold is crossed and end when it no longer is; a new group is told once and never again."""
EVERYTHING: Final = ""
"""The subject of an alert that is about the store as a whole."""


class Severity(StrEnum):
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class Thresholds:
    ingestion_per_minute: float = 100.0
    backlog: int = 10_000
    resolution_rate: float = 0.5
    new_groups: bool = True


@dataclass(frozen=True, slots=True)
class Alert:
    name: str
    subject: str
    """What it is about: a fingerprint, or EVERYTHING."""
    severity: Severity
    summary: str
    """For a person: what is wrong, and where to look."""
    value: float | None = None
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """The newest message of a group; its texts can be shown anywhere."""

    row_id: int
    error_type: str | None
    error_message: str | None


@dataclass(frozen=True, slots=True)
class NewGroup:
    """Failures of one kind that nobody was told of yet, some of which only a person can help."""

    fingerprint: str
    size: int
    sample: Sample | None = None
    """None: one of so many that only their number is told."""


@dataclass(frozen=True, slots=True)
class Notice:
    """An alert as somebody is to be told of it."""

    id: int
    name: str
    subject: str
    severity: Severity
    summary: str
    value: float | None
    threshold: float | None
    fired_at: datetime
    resolved_at: datetime | None = None
    """None: it stands."""

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
    """What one worker has written down, and no other."""

    fired: tuple[Notice, ...]
    resolved: tuple[Notice, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One worker's to tell of, and nobody else's until then."""

    until: datetime
    notices: tuple[Notice, ...]


def standing(metrics: Metrics, thresholds: Thresholds) -> tuple[Alert, ...]:
    """What is wrong now by the thresholds; each is crossed only when it is exceeded, not when it is met."""
    found = []
    if metrics.ingested_last_minute > thresholds.ingestion_per_minute:
        found.append(
            Alert(
                HIGH_INGESTION,
                EVERYTHING,
                Severity.WARNING,
                f"{metrics.ingested_last_minute:,} new dead messages in the last minute, more than "
                f"{thresholds.ingestion_per_minute:,g}. Look: dlqbatch messages groups",
                metrics.ingested_last_minute,
                thresholds.ingestion_per_minute,
            )
        )
    if metrics.backlog > thresholds.backlog:
        found.append(
            Alert(
                BACKLOG,
                EVERYTHING,
                Severity.CRITICAL,
                f"{metrics.backlog:,} dead messages are not over yet, more than {thresholds.backlog:,}. "
                "Look: dlqbatch status",
                metrics.backlog,
                thresholds.backlog,
            )
        )
    rate = metrics.resolution_rate
    if rate is not None and rate < thresholds.resolution_rate:
        decided = sum(metrics.outcomes.values())
        found.append(
            Alert(
                LOW_RESOLUTION,
                EVERYTHING,
                Severity.WARNING,
                f"{rate:.0%} of the {decided:,} dead messages decided in the last hour were resolved, fewer than "
                f"{thresholds.resolution_rate:.0%}. Look: dlqbatch messages groups --status failed --status manual",
                round(rate, 4),
                thresholds.resolution_rate,
            )
        )
    return tuple(found)


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
    """What fires, and which of the standing alerts end; active ones are known by name and subject."""
    wrong = tuple(wrong)
    still = {(alert.name, alert.subject) for alert in wrong}
    fire = tuple(alert for alert in wrong if (alert.name, alert.subject) not in active)
    return fire, frozenset(key for key in active if key[0] in STANDING and key not in still)
