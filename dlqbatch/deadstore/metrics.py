"""The metrics of the dead store, asked of the database alone: every worker that asks at one time gets the same.

Each query walks an index, or so many of the newest entries of one as its constant here says.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Float, and_, func, or_, select, text

from dlqbatch.deadstore.messages import WAITING
from dlqbatch.deadstore.states import JOBS
from dlqbatch.deadstore.tables import (
    ATTEMPTS,
    BREAKERS,
    IS_DUE,
    MESSAGES,
    PLAN_ITEMS,
    PLANS,
    RUNS,
    TRANSITIONS,
    WAITS_FOR_ITS_TIME,
)
from dlqbatch.policy.breaker import Phase
from dlqbatch.policy.lifecycle import Status
from dlqbatch.policy.metrics import EventFigures, LastRun, Metrics, Tops

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from sqlalchemy import ColumnElement, Connection

FOR_A_PERSON: Final = (Status.MANUAL, Status.FAILED)
"""Nothing happens to them before a person says so."""
NAMED: Final = 20
"""So many error types and events are told apart; the rest is one number."""
DEATHS_LOOKED_AT: Final = 50_000
ENDINGS_LOOKED_AT: Final = 10_000
RUNS_LOOKED_AT: Final = 2_000
PLANS_LOOKED_AT: Final = 10
ITEMS_LOOKED_AT: Final = 10_000
_MOST_JOBS: Final = 50
_MOST_ORIGINS: Final = 5
_MINUTE: Final = timedelta(minutes=1)
_HOUR: Final = timedelta(hours=1)
_DAY: Final = timedelta(days=1)
_UNKNOWN: Final = "unknown"
_M: Final = MESSAGES.c
_T: Final = TRANSITIONS.c
_HAS_OUTCOME: Final = or_(
    _T.to_status == Status.RESOLVED,
    # Only what came back has failed; what a replay gives back unsent is as it was before.
    and_(_T.to_status == Status.FAILED, _T.actor == "ingest"),
)
_CLOSED: Final = ("succeeded", "failed")
# Literal, as the partial index has it.
_HAS_ENDED: Final = text("closed_at IS NOT NULL")


def measure(connection: Connection, now: datetime) -> Metrics:
    states = _states(connection)
    minute, hour = _arrivals(connection, [(now - _MINUTE, now), (now - _HOUR, now)])
    breakers, origins = _breakers(connection)
    errors, events = _deaths(connection, now)
    due, next_due = _due(connection, now)
    return Metrics(
        at=now,
        states={status.value: states.get(status, 0) for status in Status},
        backlog=sum(states.get(status, 0) for status in WAITING),
        ingested_last_minute=minute,
        ingested_last_hour=hour,
        outcomes=_outcomes(connection, now),
        seconds_in_store=_seconds_in_store(connection, now),
        errors=errors,
        events=events,
        attempts=_attempts(connection, now),
        replays=_replays(connection),
        oldest_waiting=_oldest_waiting(connection),
        due=due,
        next_due=next_due,
        breakers=breakers,
        origins_held=origins,
        groups_for_a_person=_groups_for_a_person(connection),
        runs=_runs(connection, now),
        last_runs=_last_runs(connection),
    )


def arrivals_by_hour(connection: Connection, now: datetime, hours: int = 24) -> list[int]:
    """The oldest first; each hour ends so many hours before now."""
    return _arrivals(connection, [(now - (n + 1) * _HOUR, now - n * _HOUR) for n in reversed(range(hours))])


def _states(connection: Connection) -> dict[Status, int]:
    return _numbers(connection.execute(select(_M.status, func.count()).group_by(_M.status)))


def _arrivals(connection: Connection, spans: list[tuple[datetime, datetime]]) -> list[int]:
    """What an ingest brought; an edited message or one out of cold storage is no new failure."""
    counted = [
        select(func.count())
        .where(_T.at > begin, _T.at <= end, _T.from_status.is_(None), _T.actor == "ingest")
        .scalar_subquery()
        for begin, end in spans
    ]
    return list(connection.execute(select(*counted)).one())


def _outcomes(connection: Connection, now: datetime) -> dict[str, int]:
    """What a program decided, also of what a person sent; not what a person discards or a replay gives back."""
    decided = or_(_HAS_OUTCOME, and_(_T.to_status == Status.MANUAL, _T.actor.in_(sorted(JOBS))))
    ends = (Status.RESOLVED, Status.FAILED, Status.MANUAL)
    found = connection.execute(
        select(_T.to_status, func.count())
        .where(_within(_T.at, now, _HOUR), _T.to_status.in_(ends), _T.from_status == Status.PROCESSING, decided)
        .group_by(_T.to_status)
    )
    numbers = _numbers(found)
    return {status.value: numbers.get(status, 0) for status in ends}


def _seconds_in_store(connection: Connection, now: datetime) -> float | None:
    """Of what was resolved, failed for good, or discarded by a person."""
    ended = (
        select(_T.message_id, _T.at)
        .where(
            _within(_T.at, now, _HOUR),
            or_(
                and_(_T.from_status == Status.PROCESSING, _HAS_OUTCOME),
                and_(_T.from_status == Status.MANUAL, _T.to_status == Status.ARCHIVED),
            ),
        )
        .order_by(_T.at.desc())
        .limit(ENDINGS_LOOKED_AT)
        .subquery()
    )
    if connection.dialect.name == "sqlite":
        seconds: Any = (func.julianday(ended.c.at) - func.julianday(_M.created_at)) * 86_400
    else:
        seconds = func.date_part("epoch", ended.c.at - _M.created_at, type_=Float)
    mean = connection.scalar(select(func.avg(seconds)).select_from(ended.join(MESSAGES, _M.id == ended.c.message_id)))
    return None if mean is None else max(float(mean), 0.0)


def _deaths(connection: Connection, now: datetime) -> tuple[Tops, tuple[EventFigures, ...]]:
    newest = (
        select(_M.error_type, _M.event, _M.retry_count)
        .where(_within(_M.created_at, now, _DAY))
        .order_by(_M.created_at.desc(), _M.id.desc())
        .limit(DEATHS_LOOKED_AT)
        .subquery()
    )
    counted = connection.execute(
        select(newest.c.error_type, newest.c.event, func.count(), func.sum(newest.c.retry_count)).group_by(
            newest.c.error_type, newest.c.event
        )
    )
    errors: Counter[str] = Counter()
    events: Counter[str] = Counter()
    retries: Counter[str] = Counter()
    for error_type, event, number, retried in counted:
        errors[error_type or _UNKNOWN] += number
        events[event or _UNKNOWN] += number
        retries[event or _UNKNOWN] += int(retried)
    return _tops(errors), tuple(EventFigures(name, n, retries[name]) for name, n in _tops(events).named)


def _tops(numbers: Counter[str]) -> Tops:
    # By name where the numbers are equal: two workers must not choose differently.
    ordered = sorted(numbers.items(), key=lambda item: (-item[1], item[0]))
    return Tops(tuple(ordered[:NAMED]), sum(number for _, number in ordered[NAMED:]))


def _attempts(connection: Connection, now: datetime) -> dict[str, int]:
    found = connection.execute(
        select(ATTEMPTS.c.outcome, func.count())
        .where(_HAS_ENDED, _within(ATTEMPTS.c.closed_at, now, _HOUR), ATTEMPTS.c.outcome.in_(_CLOSED))
        .group_by(ATTEMPTS.c.outcome)
    )
    return _both(found)


def _replays(connection: Connection) -> dict[str, int]:
    """Plan by plan, the newest first: nothing tells beforehand which of them sent how much."""
    total: Counter[str] = Counter()
    left = ITEMS_LOOKED_AT
    newest = select(PLANS.c.id).where(PLANS.c.state != "planned").order_by(PLANS.c.created_at.desc())
    for plan_id in connection.scalars(newest.limit(PLANS_LOOKED_AT)).all():
        if left <= 0:
            break
        sent = (
            select(PLAN_ITEMS.c.message_id, PLAN_ITEMS.c.attempt, PLAN_ITEMS.c.reason)
            .where(PLAN_ITEMS.c.plan_id == plan_id, PLAN_ITEMS.c.state == "sent")
            .order_by(PLAN_ITEMS.c.place)
            .limit(left)
            .subquery()
        )
        of_this = and_(ATTEMPTS.c.message_id == sent.c.message_id, ATTEMPTS.c.number == sent.c.attempt)
        # Of a message that is deleted by now the item says what became of it.
        outcome = func.coalesce(ATTEMPTS.c.outcome, sent.c.reason)
        found = connection.execute(
            select(outcome, func.count()).select_from(sent.outerjoin(ATTEMPTS, of_this)).group_by(outcome)
        ).all()
        left -= sum(number for _, number in found)
        total.update({outcome: number for outcome, number in found if outcome in _CLOSED})
    return {outcome: total[outcome] for outcome in _CLOSED}


def _numbers(found: Iterable[Any]) -> dict[Any, int]:
    return {row[0]: row[1] for row in found}


def _both(found: Iterable[Any]) -> dict[str, int]:
    numbers = _numbers(found)
    return {outcome: numbers.get(outcome, 0) for outcome in _CLOSED}


def _oldest_waiting(connection: Connection) -> datetime | None:
    # The first entry of each state in an index, not the least of all that wait.
    firsts = [select(func.min(_M.created_at)).where(_M.status == status).scalar_subquery() for status in WAITING]
    found = [at for at in connection.execute(select(*firsts)).one() if at is not None]
    return min(found, default=None)


def _due(connection: Connection, now: datetime) -> tuple[int, datetime | None]:
    """How many are due, and when the next one is."""
    waits = text(WAITS_FOR_ITS_TIME)
    marked = connection.scalar(select(func.count()).select_from(MESSAGES).where(text(IS_DUE))) or 0
    unmarked = select(func.count()).select_from(MESSAGES).where(waits, _M.next_retry_at <= now, _M.plan_id.is_(None))
    following = select(func.min(_M.next_retry_at)).where(waits, _M.next_retry_at > now)
    return marked + (connection.scalar(unmarked) or 0), connection.scalar(following)


def _breakers(connection: Connection) -> tuple[dict[str, int], tuple[str, ...]]:
    held = select(BREAKERS.c.phase, BREAKERS.c.origin).where(BREAKERS.c.phase != Phase.CLOSED)
    found = connection.execute(held.order_by(BREAKERS.c.since.desc(), BREAKERS.c.origin)).all()
    numbers = Counter(phase for phase, _ in found)
    return (
        {phase.value: numbers[phase] for phase in (Phase.OPEN, Phase.HALF_OPEN)},
        tuple(origin for _, origin in found[:_MOST_ORIGINS]),
    )


def _groups_for_a_person(connection: Connection) -> int:
    groups = select(_M.fingerprint).where(_M.status.in_(FOR_A_PERSON)).group_by(_M.fingerprint).subquery()
    return connection.scalar(select(func.count()).select_from(groups)) or 0


def _runs(connection: Connection, now: datetime) -> dict[str, dict[str, int]]:
    found = connection.execute(
        select(RUNS.c.job, RUNS.c.report)
        .where(_within(RUNS.c.started_at, now, _HOUR))
        .order_by(RUNS.c.started_at.desc())
        .limit(RUNS_LOOKED_AT)
    )
    added: dict[str, Counter[str]] = {}
    for job, report in found:
        counts = added.setdefault(job, Counter())
        counts["runs"] += 1
        counts.update({name: number for name, number in _counts(report).items() if number})
    return {job: dict(counts) for job, counts in sorted(added.items())}


def _last_runs(connection: Connection) -> tuple[LastRun, ...]:
    """Job by job along the index, for there are far more runs than jobs."""
    found: list[LastRun] = []
    job = ""
    while len(found) < _MOST_JOBS:
        following = connection.scalar(select(func.min(RUNS.c.job)).where(RUNS.c.job > job))
        if following is None:
            break
        job = following
        columns = (RUNS.c.started_at, RUNS.c.ended_at, RUNS.c.outcome, RUNS.c.stopped_by, RUNS.c.report)
        last = select(*columns).where(RUNS.c.job == job).order_by(RUNS.c.started_at.desc()).limit(1)
        row = connection.execute(last).one()
        found.append(LastRun(job, row.started_at, row.ended_at, row.outcome, row.stopped_by, _counts(row.report)))
    return tuple(found)


def _counts(report: object) -> Mapping[str, int]:
    """Another version may have written it."""
    counts = report.get("counts") if isinstance(report, dict) else None
    if not isinstance(counts, dict):
        return {}
    return {str(name): number for name, number in counts.items() if isinstance(number, int)}


def _within(column: ColumnElement[Any], now: datetime, span: timedelta) -> ColumnElement[bool]:
    return and_(column > now - span, column <= now)
