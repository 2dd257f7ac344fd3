"""What happened to one message, in order: its deaths, its attempts, its states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

from dlqbatch.amqp import headers as names
from dlqbatch.amqp.delivery import open_envelope
from dlqbatch.amqp.table import to_bytes
from dlqbatch.amqp.x_death import LATEST_TIME, Death, past_deaths
from dlqbatch.messages.queries import Attempt, Detail, Transition

Kind = Literal["death", "state", "note", "attempt"]

_LONG_AGO: Final = datetime.min.replace(tzinfo=UTC)
_REASONS: Final = {
    "rejected": "a consumer of {} rejected it",
    "expired": "it waited in {} until its time was over",
    "maxlen": "{} was full",
    "delivery_limit": "it was delivered too often from {}",
}
_ENDS: Final = {
    "failed": "attempt {} failed",
    "succeeded": "attempt {} succeeded: it did not come back",
    "abandoned": "attempt {} was given up: it was never confirmed",
}


@dataclass(frozen=True, slots=True)
class Step:
    at: datetime | None
    """None if the time is not known; such a step stands before all others."""
    kind: Kind
    what: str
    actor: str | None = None
    reason: str | None = None


def timeline(detail: Detail) -> tuple[Step, ...]:
    """The oldest step first; the broker's times have whole seconds, and are by its own clock."""
    steps = [
        *_deaths(detail.content.properties),
        *(_state(transition) for transition in detail.transitions),
        *(step for attempt in detail.attempts for step in _attempt(attempt)),
    ]
    return tuple(sorted(steps, key=lambda step: step.at or _LONG_AGO))


def _deaths(properties: bytes) -> Iterator[Step]:
    headers = open_envelope("", "", False, 0, properties).headers
    if headers is None:
        return
    for death in reversed(past_deaths(headers)):
        yield Step(_time(death.time), "death", _died(death))
    dead_at = headers.ours.get(names.DEAD_AT)
    reason = headers.ours.get(names.REASON)
    if dead_at is not None or reason is not None:
        why = _shown(reason.as_text() or "") if reason is not None else ""
        at = dead_at.as_timestamp() if dead_at is not None else None
        who = "consumer" if why in names.WORKERS_REASONS else "drain"
        yield Step(_time(at), "death", "dlqbatch put it among the dead letters", who, why or None)


def _died(death: Death) -> str:
    queue, reason = f"'{_shown(death.queue)}'", _shown(death.reason)
    what = _REASONS.get(reason, "it left {}" + (f" ({reason})" if reason else "")).replace("{}", queue)
    return f"{what}, {death.times} times" if death.times > 1 else what


def _shown(text: str) -> str:
    return to_bytes(text).decode("utf-8", "backslashreplace")


def _time(seconds: int | None) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds is not None and seconds <= LATEST_TIME else None


def _state(transition: Transition) -> Step:
    if transition.from_status is None:
        what = f"arrived, {transition.to_status}"
    elif transition.from_status == transition.to_status:
        return Step(transition.at, "note", f"still {transition.to_status}", transition.actor, transition.reason)
    else:
        what = f"{transition.from_status} → {transition.to_status}"
    return Step(transition.at, "state", what, transition.actor, transition.reason)


def _attempt(attempt: Attempt) -> Iterator[Step]:
    how = f" ({attempt.strategy})" if attempt.strategy else ""
    yield Step(attempt.created_at, "attempt", f"attempt {attempt.number} began{how}", attempt.worker)
    if attempt.sent_at is not None:
        yield Step(attempt.sent_at, "attempt", f"attempt {attempt.number} sent, the broker confirmed it")
    if attempt.acknowledged_at is not None:
        what = f"attempt {attempt.number} acknowledged"
        yield Step(attempt.acknowledged_at, "attempt", what, None, attempt.proof)
    if attempt.closed_at is not None:
        what = _ENDS.get(str(attempt.outcome), "attempt {} ended").format(attempt.number)
        yield Step(attempt.closed_at, "attempt", what)
