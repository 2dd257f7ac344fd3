"""The metrics of the dead store, read from the database alone, so that all workers measure the same.

Each query walks an index, or as many of its newest entries as a constant here says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, Connection, Float, Subquery, and_, func, literal, or_, select, text, union_all

from dlqbatch.lifecycle.outcome_rows import unproven
from dlqbatch.logs import masked
from dlqbatch.messages.queries import WAITING
from dlqbatch.monitor.metrics import EventFigures, LastRun, Metrics, Reported, Tops, bounds_in_a_row, queue_depths
from dlqbatch.retain.rows import count_due
from dlqbatch.store.bulk import insert_into
from dlqbatch.store.column_types import Time
from dlqbatch.store.counts import states_and_groups
from dlqbatch.store.journal import JOBS
from dlqbatch.store.scope_name import EVERY
from dlqbatch.store.scopes import FIRST, is_every, own, own_runs, scope_of
from dlqbatch.store.states import Phase, Status
from dlqbatch.store.tables import (
    ARRIVED_BY_INGEST,
    ATTEMPTS,
    BREAKERS,
    IS_DUE,
    LOOKS,
    MESSAGES,
    OBSERVED,
    PLAN_ITEMS,
    PLANS,
    RUNS,
    TRANSITIONS,
)
from dlqbatch.store.waiting import count_overdue, next_time

# States in which a message waits for a person.
FOR_A_PERSON: Final = (Status.MANUAL, Status.FAILED)
# The most error types and events that are named; the rest is one number.
NAMED: Final = 20
DEATHS_LOOKED_AT: Final = 10_000
ENDINGS_LOOKED_AT: Final = 10_000
RUNS_LOOKED_AT: Final = 2_000
PLANS_LOOKED_AT: Final = 10
ITEMS_LOOKED_AT: Final = 3_000
# The last runs of each job that are looked at, however long ago they were.
LAST_RUNS: Final = 20
_MOST_JOBS: Final = 50
_MOST_ORIGINS: Final = 5
_REPORT_DEPTHS: Final = ("drain", "ingest", "monitor")
# Jobs that do not keep up if their runs end at their bounds again and again.
_BOUNDED: Final = ("drain", "ingest")
_MINUTE: Final = timedelta(minutes=1)
_HOUR: Final = timedelta(hours=1)
_DAY: Final = timedelta(days=1)
# An arrival may be committed so much later than its time; no statement lasts longer.
_LATE: Final = timedelta(minutes=5)
_LONGEST_GAP: Final = timedelta(hours=1)
_INGESTION: Final = "ingestion"
_UNKNOWN: Final = "unknown"
_M: Final = MESSAGES.c
_T: Final = TRANSITIONS.c
_L: Final = LOOKS.c
_DECIDES: Final = or_(
    and_(_T.from_status == Status.PROCESSING, _T.to_status == Status.RESOLVED),
    # Only a retry that came back has failed; a message that a replay returns unsent is as it was before.
    and_(_T.from_status == Status.PROCESSING, _T.to_status == Status.FAILED, _T.actor == "ingest"),
    and_(_T.from_status == Status.PROCESSING, _T.to_status == Status.MANUAL, _T.actor.in_(sorted(JOBS))),
    # A message that came back after all was not resolved, and nothing is decided about it.
    and_(_T.from_status == Status.RESOLVED, _T.to_status == Status.PENDING),
)
_DISCARDS: Final = and_(_T.from_status == Status.MANUAL, _T.to_status == Status.ARCHIVED)
_CLOSED: Final = ("succeeded", "failed")
_OPEN: Final = "open"
# The condition of a partial index, word for word.
_HAS_ENDED: Final = text("closed_at IS NOT NULL")


def measure(
    connection: Connection,
    now: datetime,
    overdue_before: Mapping[Status, datetime] | None = None,
    depths: Reported | None = None,
) -> Metrics:
    """All figures at `now`.

    `overdue_before`: by state, a message that has been in it since before that time is overdue. `depths` are depths of
    queues that are not in the log of runs yet.
    """
    states, for_a_person = states_and_groups(connection, FOR_A_PERSON)
    ingested = _ingestion(connection, now)
    breakers, origins = _breakers(connection)
    errors, events = _deaths(connection, now)
    due, next_due = _due(connection, now)
    reports, in_a_row = _reported(connection, now)
    sent = select(func.count(), func.min(ATTEMPTS.c.sent_at, type_=Time)).where(
        text(OBSERVED), own(connection, ATTEMPTS.c.scope_id)
    )
    number_sent, oldest_sent = connection.execute(sent).one()
    return Metrics(
        at=now,
        states={status.value: number for status, number in states.items()},
        backlog=sum(states[status] for status in WAITING),
        ingested_per_minute=ingested.per_minute,
        ingested_lately=ingested.lately,
        ingested_last_minute=ingested.last_minute,
        ingested_last_hour=ingested.last_hour,
        outcomes=_outcomes(connection, now),
        seconds_in_store=_seconds_in_store(connection, now),
        errors=errors,
        events=events,
        attempts=_attempts(connection, now),
        replays=_replays(connection),
        oldest_waiting=_oldest_waiting(connection),
        overdue={status.value: number for status, number in count_due(connection, overdue_before or {}).items()},
        due=due,
        next_due=next_due,
        breakers=breakers,
        origins_held=origins,
        groups_for_a_person=for_a_person,
        runs=_runs(connection, now),
        last_runs=_last_runs(connection),
        queues=queue_depths(reports if depths is None else (*reports, depths)),
        bounds_in_a_row=in_a_row,
        sent=int(number_sent),
        oldest_sent=oldest_sent,
        unproven=unproven(connection),
    )


def arrivals_by_hour(connection: Connection, now: datetime, hours: int = 24) -> list[int]:
    """Arrivals in each of the last hours, the oldest hour first; the last hour ends now."""
    return _arrivals(connection, [(now - (n + 1) * _HOUR, now - n * _HOUR) for n in reversed(range(hours))])


def note_look(connection: Connection, measured: Metrics) -> None:
    """Store the count of this measurement for the next one; an older measurement changes nothing."""
    adding = insert_into(connection, LOOKS).values(
        figure=_figure(connection), at=measured.at, counted=measured.ingested_lately
    )
    newer = adding.on_conflict_do_update(
        index_elements=[_L.figure],
        set_={"at": adding.excluded.at, "counted": adding.excluded.counted},
        where=_L.at < adding.excluded.at,
    )
    connection.execute(newer)


def _figure(connection: Connection) -> str:
    """The first scope goes on with the figure that was there before there were others. For all scopes there is none."""
    scope = EVERY if is_every(connection) else scope_of(connection)
    return _INGESTION if scope == FIRST else f"{_INGESTION} {scope}"


class _Ingested(NamedTuple):
    per_minute: float
    lately: int
    last_minute: int
    last_hour: int


def _ingestion(connection: Connection, now: datetime) -> _Ingested:
    """Count each arrival in exactly one measurement, if it was committed within `_LATE` of its time.

    A measurement counts from `_LATE` before the last one, and subtracts what the last one counted in that span. One
    statement makes both counts, so that nothing is committed between them.
    """
    last = connection.execute(select(_L.at, _L.counted).where(_L.figure == _figure(connection))).one_or_none()
    spans = [(now - _LATE, now), (now - _MINUTE, now), (now - _HOUR, now)]
    # After a longer gap, or at the first measurement, the mean would say nothing about now.
    is_known = last is not None and now - _LONGEST_GAP <= last.at < now
    if last is not None and is_known:
        spans.append((last.at - _LATE, now))
    lately, minute, hour, *since = _arrivals(connection, spans)
    per_minute = float(minute)
    if last is not None and is_known:
        per_minute = max(per_minute, (since[0] - last.counted) / max((now - last.at) / _MINUTE, 1.0))
    return _Ingested(per_minute, lately, minute, hour)


def _arrivals(connection: Connection, spans: list[tuple[datetime, datetime]]) -> list[int]:
    """The messages that ingest added in each span; an edited or restored message is no new failure."""
    counted = [
        select(func.count())
        .where(_T.at > begin, _T.at <= end, text(ARRIVED_BY_INGEST), own(connection, _T.scope_id))
        .scalar_subquery()
        for begin, end in spans
    ]
    return list(connection.execute(select(*counted)).one())


def _last_decisions(connection: Connection, now: datetime, kinds: ColumnElement[bool]) -> Subquery:
    """For each message its last entry in the journal of these kinds, if it is of the last hour."""
    place = func.row_number().over(partition_by=_T.message_id, order_by=_T.id.desc()).label("place")
    these = (_within(_T.at, now, _HOUR), kinds, own(connection, _T.scope_id))
    lines = select(_T.message_id, _T.to_status, _T.at, place).where(*these).subquery()
    return select(lines).where(lines.c.place == 1).subquery()


def _outcomes(connection: Connection, now: datetime) -> dict[str, int]:
    """The outcomes that jobs decided, also of retries by a person; discards and returned replays do not count."""
    last = _last_decisions(connection, now, _DECIDES)
    numbers = _by_name(connection.execute(select(last.c.to_status, func.count()).group_by(last.c.to_status)))
    return {status.value: numbers.get(status, 0) for status in (Status.RESOLVED, Status.FAILED, Status.MANUAL)}


def _seconds_in_store(connection: Connection, now: datetime) -> float | None:
    """The mean time in the store of what was resolved, failed for good, or was discarded by a person."""
    last = _last_decisions(connection, now, or_(_DECIDES, _DISCARDS))
    ends = (Status.RESOLVED, Status.FAILED, Status.ARCHIVED)
    ended = (
        select(last.c.message_id, last.c.at)
        .where(last.c.to_status.in_(ends))
        .order_by(last.c.at.desc())
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
        .where(_within(_M.created_at, now, _DAY), own(connection))
        .order_by(_M.created_at.desc(), _M.id.desc())
        .limit(DEATHS_LOOKED_AT)
        .subquery()
    )
    counted = connection.execute(
        select(newest.c.error_type, newest.c.event, func.count(), func.sum(newest.c.retry_count)).group_by(
            newest.c.error_type, newest.c.event
        )
    )
    types: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    events: Counter[str] = Counter()
    retries: Counter[str] = Counter()
    for error_type, event, number, retried in counted:
        types[error_type or _UNKNOWN] += number
        events[event or _UNKNOWN] += number
        retries[event or _UNKNOWN] += int(retried)
    for error_type, number in types.items():
        errors[masked(error_type)] += number
    return _tops(errors), tuple(EventFigures(name, n, retries[name]) for name, n in _tops(events).named)


def _tops(numbers: Counter[str]) -> Tops:
    # Equal numbers are ordered by name, so that two workers choose the same.
    ordered = sorted(numbers.items(), key=lambda item: (-item[1], item[0]))
    return Tops(tuple(ordered[:NAMED]), sum(number for _, number in ordered[NAMED:]))


def _attempts(connection: Connection, now: datetime) -> dict[str, int]:
    found = connection.execute(
        select(ATTEMPTS.c.outcome, func.count())
        .where(_HAS_ENDED, _within(ATTEMPTS.c.closed_at, now, _HOUR), ATTEMPTS.c.outcome.in_(_CLOSED))
        .where(own(connection, ATTEMPTS.c.scope_id))
        .group_by(ATTEMPTS.c.outcome)
    )
    numbers = _by_name(found)
    return {outcome: numbers.get(outcome, 0) for outcome in _CLOSED}


def _replays(connection: Connection) -> dict[str, int]:
    """Counted plan by plan, the newest first, because only the items of a plan show how much it has sent."""
    total: Counter[str] = Counter()
    left = ITEMS_LOOKED_AT
    ours = own(connection, PLANS.c.scope_id)
    newest = select(PLANS.c.id).where(ours, PLANS.c.state != "planned").order_by(PLANS.c.created_at.desc())
    for plan_id in connection.scalars(newest.limit(PLANS_LOOKED_AT)).all():
        if left <= 0:
            break
        of_this = (ATTEMPTS.c.message_id == PLAN_ITEMS.c.message_id, ATTEMPTS.c.number == PLAN_ITEMS.c.attempt)
        # Attempt by attempt, and no join, for which all attempts would be read. The attempts of a deleted message are
        # gone; then the item has the outcome.
        outcome = select(ATTEMPTS.c.outcome).where(*of_this).scalar_subquery()
        sent = (
            select(func.coalesce(outcome, PLAN_ITEMS.c.reason).label("outcome"))
            .where(PLAN_ITEMS.c.plan_id == plan_id, PLAN_ITEMS.c.state == "sent")
            .order_by(PLAN_ITEMS.c.place)
            .limit(left)
            .subquery()
        )
        found = connection.execute(select(sent.c.outcome, func.count()).group_by(sent.c.outcome)).all()
        left -= sum(number for _, number in found)
        total.update({outcome or _OPEN: number for outcome, number in found})
    return {outcome: total[outcome] for outcome in (*_CLOSED, _OPEN)}


def _oldest_waiting(connection: Connection) -> datetime | None:
    # The first entry of each state in an index is cheaper than the least of all that wait.
    firsts = [
        select(func.min(_M.created_at)).where(own(connection), _M.status == status).scalar_subquery()
        for status in WAITING
    ]
    found = [at for at in connection.execute(select(*firsts)).one() if at is not None]
    return min(found, default=None)


def _due(connection: Connection, now: datetime) -> tuple[int, datetime | None]:
    """How many messages are due, and when the next one is."""
    marked = connection.scalar(select(func.count()).select_from(MESSAGES).where(text(IS_DUE), own(connection))) or 0
    return marked + count_overdue(connection, now), next_time(connection, now)


def _breakers(connection: Connection) -> tuple[dict[str, int], tuple[str, ...]]:
    held = select(BREAKERS.c.phase, BREAKERS.c.origin).where(
        own(connection, BREAKERS.c.scope_id), BREAKERS.c.phase != Phase.CLOSED
    )
    found = connection.execute(held.order_by(BREAKERS.c.since.desc(), BREAKERS.c.origin)).all()
    numbers = Counter(phase for phase, _ in found)
    return (
        {phase.value: numbers[phase] for phase in (Phase.OPEN, Phase.HALF_OPEN)},
        tuple(origin for _, origin in found[:_MOST_ORIGINS]),
    )


def _runs(connection: Connection, now: datetime) -> dict[str, dict[str, int]]:
    found = connection.execute(
        select(RUNS.c.job, RUNS.c.report)
        .where(_within(RUNS.c.started_at, now, _HOUR), own_runs(connection))
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
    """The last run of each job, found job by job along the index, because there are far more runs than jobs."""
    ours = own_runs(connection)
    jobs = select(func.min(RUNS.c.job).label("job")).where(ours).cte("jobs", recursive=True)
    following = select(func.min(RUNS.c.job)).where(RUNS.c.job > jobs.c.job, ours).scalar_subquery()
    jobs = jobs.union_all(select(following).where(jobs.c.job.is_not(None)))
    newest = select(RUNS.c.id).where(RUNS.c.job == jobs.c.job, ours).order_by(RUNS.c.started_at.desc()).limit(1)
    ids = select(newest.correlate(jobs).scalar_subquery()).select_from(jobs).limit(_MOST_JOBS)
    columns = (RUNS.c.started_at, RUNS.c.ended_at, RUNS.c.outcome, RUNS.c.stopped_by, RUNS.c.report)
    found = connection.execute(select(RUNS.c.job, *columns).where(RUNS.c.id.in_(ids)).order_by(RUNS.c.job))
    return tuple(LastRun(*run[:-1], _counts(run.report)) for run in found)


def _reported(connection: Connection, now: datetime) -> tuple[tuple[Reported, ...], dict[str, int]]:
    """The runs that report depths, and by job how many of its last runs in a row ended at their bound."""
    columns = (RUNS.c.started_at, RUNS.c.ended_at, RUNS.c.report)
    of_hour = (_within(RUNS.c.started_at, now, _HOUR), RUNS.c.job.in_(_REPORT_DEPTHS))
    # The last runs of a job that runs seldom, or no longer, count as well.
    wanted = [("", RUNS_LOOKED_AT, of_hour), *((job, LAST_RUNS, (RUNS.c.job == job,)) for job in _REPORT_DEPTHS)]
    parts = []
    for job, most, these in wanted:
        newest = select(literal(job).label("of"), *columns).where(*these, own_runs(connection))
        parts.append(select(newest.order_by(RUNS.c.started_at.desc()).limit(most).subquery()))
    found: dict[str, list[Reported]] = {job: [] for job, *_ in wanted}
    for job, *run in connection.execute(union_all(*parts)):
        found[job].append(Reported(*run))
    for runs in found.values():
        runs.sort(key=lambda run: run.started_at, reverse=True)
    in_a_row = {job: bounds_in_a_row(found[job]) for job in _BOUNDED if found[job]}
    return tuple(run for runs in found.values() for run in runs), in_a_row


def _counts(report: object) -> Mapping[str, int]:
    """The counts of a report, which another version of this program may have written."""
    counts = report.get("counts") if isinstance(report, dict) else None
    if not isinstance(counts, dict):
        return {}
    return {str(name): number for name, number in counts.items() if isinstance(number, int)}


def _by_name(rows: Iterable[Any]) -> dict[Any, int]:
    return {row[0]: row[1] for row in rows}


def _within(column: ColumnElement[Any], now: datetime, span: timedelta) -> ColumnElement[bool]:
    return and_(column > now - span, column <= now)
