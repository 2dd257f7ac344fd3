"""The attempts that were sent and are still open, what the broker showed of their queues, and their ends, as rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Row,
    case,
    delete,
    exists,
    func,
    insert,
    literal,
    select,
    text,
    tuple_,
    update,
)

from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.broker.facts import ChannelReading, QueueCounters, QueueReading
from dlqbatch.lifecycle import breaker_rows as breakers
from dlqbatch.lifecycle.attempts import close_attempts
from dlqbatch.lifecycle.leases import ACTOR
from dlqbatch.lifecycle.proof import Sighting, counted_from, worth_keeping
from dlqbatch.lifecycle.return_checks import LoggedRun, UnprovenRetries
from dlqbatch.store import journal, tables
from dlqbatch.store.bulk import in_list, insert_into, values_table
from dlqbatch.store.column_types import BIGINT, Time
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.scopes import own, own_runs, scope_of
from dlqbatch.store.states import Outcome, Status
from dlqbatch.store.waiting import overdue

_A: Final = tables.ATTEMPTS.c
_M: Final = tables.MESSAGES.c
_P: Final = tables.PLANS.c
_R: Final = tables.QUEUE_READINGS.c
_MOST_RUNS: Final = 10_000
"""How many runs of a job are looked through for one that saw a queue empty, the newest first."""
_READINGS_KEPT: Final = timedelta(days=30)
"""Readings of a queue that no retry waits in are kept as long: the next retry to it has them as its beginning."""
_MOST_SHOWN: Final = 1_000
_ORIGIN: Final = (_M.origin_queue, _M.origin_exchange, _M.origin_key)

_IS_PROCESSING: Final = func.lower(_M.status) == Status.PROCESSING.value
"""Written so that no index knows it: each message is found by its attempt, and PostgreSQL, where it has no statistics
yet, must not begin with all messages of that state."""

Way = tuple[int, str, str, str, str]
"""What an outcome depends on: a plan that named a queue or 0, the origin, the source queue."""


@dataclass(frozen=True, slots=True)
class SentAttempt:
    """A sent attempt that is still open."""

    row_id: int
    attempt: int
    begun_at: datetime
    sent_at: datetime
    acknowledged_at: datetime | None
    proof: str | None
    attempt_id: int
    sent_to: Origin | None
    """Its origin, or the queue that a replay has named instead."""
    is_elsewhere: bool
    """A replay has named it, or only an exchange is known: it may come back through another queue than before."""
    has_framework_id: bool
    """Its framework (Dramatiq, remoulade) retries by publishing a new message."""
    way: Way

    @property
    def source_queue(self) -> str:
        return self.way[-1]


class SentByWay(NamedTuple):
    """The open attempts of one way."""

    way: Way
    place: str
    retries: int
    sent_at: datetime
    """When the first of them was."""


class SentAttempts:
    """The attempts under observation; each call is a transaction of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def newest_ingests(self, queues: Collection[str], since: datetime) -> dict[str, LoggedRun | None]:
        """For each queue the newest ingest that saw it empty, if it began after that time."""
        with reading(self._engine) as connection:
            return {queue: _newest_run(connection, "ingest", (queue,), since) for queue in queues}

    def newest_drain(self, queues: Collection[str], since: datetime, before: datetime) -> LoggedRun | None:
        """The newest drain that saw all of these queues empty, began after `since` and was over before `before`."""
        with reading(self._engine) as connection:
            return _newest_run(connection, "drain", queues, since, before)

    def sent_before(
        self,
        time: datetime,
        limit: int,
        after: tuple[datetime, int] | None = None,
        without: AbstractSet[Way] = frozenset(),
    ) -> list[SentAttempt]:
        """Attempts that were sent before that time, the oldest first, without those of these ways.

        `after` is `sent_at` and `attempt_id` of the last one on the page before.
        """
        conditions: list[Any] = [text(tables.OBSERVED), _A.sent_at < time, _IS_PROCESSING]
        if after is not None:
            conditions.append(tuple_(_A.sent_at, _A.id) > tuple_(literal(after[0], Time), literal(after[1], BIGINT)))
        with reading(self._engine) as connection:
            conditions.append(own(connection, _A.scope_id))
            to_queues = _to_queues(connection)
            way = _way(connection, to_queues)
            if without:
                named = (_P.id, *_ORIGIN, _M.source_queue)
                ways = values_table(connection, dict(zip(named, map(list, zip(*without, strict=True)), strict=True)))
                conditions.append(tuple_(*way).not_in(select(*ways.c)))
            columns = (_A.message_id, _A.number, _A.created_at, _A.sent_at, _A.acknowledged_at, _A.proof, _A.id)
            query = select(*columns, _M.moved_to, _M.framework_id.is_not(None), *way).join(
                tables.MESSAGES, _M.id == _A.message_id
            )
            found = connection.execute(query.where(*conditions).order_by(_A.sent_at, _A.id).limit(limit)).all()
        return [_sent_attempt(row, to_queues) for row in found]

    def due(self, now: datetime, limit: int) -> list[Origin]:
        """The origins of so many messages that are due, each once."""
        marked = select(*_ORIGIN).where(text(tables.IS_DUE)).limit(limit)
        with reading(self._engine) as connection:
            found = {tuple(row) for row in connection.execute(marked.where(own(connection)))}
            found |= {tuple(row) for row in overdue(connection, select(*_ORIGIN), now, limit)}
        known = (row for row in found if any(row))
        return [Origin(queue or None, exchange, key or "") for queue, exchange, key in sorted(known, key=repr)]

    def by_way(self, limit: int) -> list[SentByWay]:
        """The oldest `limit` open attempts by way, the oldest way first."""
        with reading(self._engine) as connection:
            to_queues = _to_queues(connection)
            labelled = [column.label(f"way_{n}") for n, column in enumerate(_way(connection, to_queues))]
            oldest = select(_A.sent_at, *labelled).join(tables.MESSAGES, _M.id == _A.message_id)
            oldest = oldest.where(text(tables.OBSERVED), own(connection, _A.scope_id), _IS_PROCESSING)
            each = oldest.order_by(_A.sent_at).limit(limit).subquery()
            way = [each.c[column.name] for column in labelled]
            query = select(*way, func.count(), func.min(each.c.sent_at, type_=Time)).group_by(*way)
            found = connection.execute(query.order_by(func.min(each.c.sent_at))).all()
        return [SentByWay(tuple(way), _place(tuple(way), to_queues), n, at) for *way, n, at in found]

    def resolve(self, attempts: Mapping[int, tuple[int, str]], now: datetime) -> set[int]:
        """Close these attempts (number and why, by row) as succeeded; the rows that nobody changed meanwhile."""
        return self._end(attempts, now, Status.RESOLVED, "succeeded")

    def leave_to_person(self, attempts: Mapping[int, tuple[int, str]], now: datetime) -> set[int]:
        """Abandon these attempts: their rows are manual; as `resolve` otherwise."""
        return self._end(attempts, now, Status.MANUAL, "abandoned")

    def _end(
        self, attempts: Mapping[int, tuple[int, str]], now: datetime, status: Status, outcome: Outcome
    ) -> set[int]:
        if not attempts:
            return set()
        with writing(self._engine) as connection:
            # Rows before attempts: an ingest that finds one of them back at this moment comes before or after.
            mine = in_list(connection, _M.id, attempts)
            locking = select(_M.id, _M.status, _M.lock_token).where(mine).order_by(_M.id).with_for_update()
            rows = connection.execute(locking).all()
            observed = (text(tables.OBSERVED), in_list(connection, _A.message_id, attempts))
            asked = select(_A.message_id, _A.number, _A.strategy).where(*observed)
            sent = {row.message_id: row for row in connection.execute(asked)}
            moves = [
                journal.RowMove(row.id, Status.PROCESSING, status, row.lock_token, attempts[row.id][1], columns)
                for row in rows
                if row.status == Status.PROCESSING and row.id in sent and sent[row.id].number == attempts[row.id][0]
                for columns in [{"strategy": sent[row.id].strategy} if sent[row.id].strategy else {}]
            ]
            close_attempts(connection, {move.row_id: attempts[move.row_id][0] for move in moves}, outcome, now)
            moved = journal.move_many(connection, moves, now, ACTOR)
            if status is Status.RESOLVED:
                breakers.count_succeeded(connection, moved, now)
            else:
                breakers.release_probes(connection, moved, now)
        return moved

    def sightings(self, queues: Collection[str]) -> dict[str, list[Sighting]]:
        """The sightings of each queue, in their order."""
        with reading(self._engine) as connection:
            return _sightings(connection, queues)

    def save_readings(self, readings: Collection[QueueReading], oldest: Mapping[str, datetime], now: datetime) -> None:
        """Save readings, and delete those that no proof needs any more.

        `oldest` says for each queue with open retries when the first of them was begun.
        """
        with writing(self._engine) as connection:
            earlier = _sightings(connection, [each.queue for each in readings])
            rows: list[dict[str, Any]] = []
            over: list[int] = []
            for each in readings:
                before = [sighting for sighting in earlier[each.queue] if sighting.at < each.at]
                shown = {name: value for name, value in each._asdict().items() if name not in {"queue", "at"}}
                began = counted_from(before, each)
                rows.append({"queue": each.queue, "at": each.at, "counted_from": began, "reading": shown})
                times = [sighting.at for sighting in earlier[each.queue]] + [each.at]
                kept = worth_keeping(sorted(times), oldest.get(each.queue), now)
                unneeded = [at for at in times[:-1] if at not in kept]
                this = (own(connection, _R.scope_id), _R.queue == each.queue)
                ids = select(_R.id).where(*this, in_list(connection, _R.at, unneeded))
                over += connection.scalars(ids).all() if unneeded else []
            if rows:
                scope = {"scope_id": scope_of(connection)}
                connection.execute(insert(tables.QUEUE_READINGS), [row | scope for row in rows])
            removing = delete(tables.QUEUE_READINGS).where(own(connection, _R.scope_id))
            if over:
                connection.execute(removing.where(in_list(connection, _R.id, over)))
            connection.execute(removing.where(_R.at < now - _READINGS_KEPT, ~in_list(connection, _R.queue, oldest)))

    def mark_acknowledged(self, attempts: Mapping[int, int], at: datetime, proof: str) -> None:
        """A consumer had acknowledged these attempts (number by row) at that time."""
        with writing(self._engine) as connection:
            listed = values_table(connection, {_A.message_id: list(attempts), _A.number: list(attempts.values())})
            this = (_A.message_id == listed.c.message_id, _A.number == listed.c.number)
            marking = update(tables.ATTEMPTS).where(*this, text("closed_at IS NULL"), _A.acknowledged_at.is_(None))
            connection.execute(marking.values(acknowledged_at=at, proof=proof))

    def save_unproven(self, unproven: Iterable[UnprovenRetries]) -> None:
        """What is missing of the retries to each origin replaces what was missing before."""
        table = tables.UNPROVEN_RETRIES
        # In one order, as everywhere: that avoids deadlocks.
        rows = [each._asdict() for each in sorted(unproven, key=lambda each: each.place)]
        with writing(self._engine) as connection:
            scope = {"scope_id": scope_of(connection)}
            over = ~in_list(connection, table.c.place, [row["place"] for row in rows])
            connection.execute(delete(table).where(own(connection, table.c.scope_id), over))
            adding = insert_into(connection, table)
            changed = {name: adding.excluded[name] for name in UnprovenRetries._fields if name != "place"}
            if rows:
                key = [table.c.scope_id, table.c.place]
                replacing = adding.on_conflict_do_update(index_elements=key, set_=changed)
                connection.execute(replacing, [row | scope for row in rows])


def _newest_run(
    connection: Connection, job: str, queues: Collection[str], since: datetime, before: datetime | None = None
) -> LoggedRun | None:
    # The newest first, until one of them has seen the queues: most often that is the first.
    runs = tables.RUNS.c
    wanted = select(runs.started_at, runs.ended_at, runs.emptied).where(runs.job == job, runs.started_at > since)
    wanted = wanted.where(own_runs(connection))
    if before is not None:
        wanted = wanted.where(runs.started_at < before, runs.ended_at < before)
    newest = wanted.order_by(runs.started_at.desc()).limit(_MOST_RUNS).subquery()
    saw_all = (_holds(connection, newest.c.emptied, queue) for queue in queues)
    found = connection.execute(select(newest.c.started_at, newest.c.ended_at).where(*saw_all).limit(1)).first()
    return LoggedRun(found.started_at, found.ended_at, frozenset(queues)) if found is not None else None


def _holds(connection: Connection, names: ColumnElement[Any], name: str) -> ColumnElement[bool]:
    """The JSON list holds this name."""
    if connection.dialect.name == "postgresql":
        return names.contains([name])
    each = func.json_each(names).table_valued("value")
    return exists().select_from(each).where(each.c.value == name).correlate_except(each)


def unproven(connection: Connection) -> tuple[UnprovenRetries, ...]:
    """What keeps sent retries from being resolved, the oldest first."""
    table = tables.UNPROVEN_RETRIES.c
    query = select(*(table[name] for name in UnprovenRetries._fields)).order_by(table.sent_at, table.place)
    query = query.where(own(connection, table.scope_id)).limit(_MOST_SHOWN)
    return tuple(UnprovenRetries(*row) for row in connection.execute(query))


def _to_queues(connection: Connection) -> dict[int, str]:
    """The queues that plans have named, by plan."""
    named = select(_P.id, _P.to_queue).where(own(connection, _P.scope_id), _P.to_queue.is_not(None))
    return dict(connection.execute(named).all())


def _place(way: Way, to_queues: Mapping[int, str]) -> str:
    plan, queue, exchange, key, _ = way
    return to_queues.get(plan) or breakers.place(queue or None, exchange, key) or ""


def _way(connection: Connection, to_queues: Collection[int]) -> tuple[ColumnElement[Any], ...]:
    """The columns of a Way; only plans that have named a queue are looked through for the attempt."""
    # What a plan has moved before goes another way than what failed there by itself.
    plan: ColumnElement[Any] = case((_M.moved_to.is_not(None), literal(-1, BIGINT)), else_=literal(0, BIGINT))
    if to_queues:
        item = tables.PLAN_ITEMS.c
        of_this = (item.message_id == _A.message_id, item.attempt == _A.number)
        items = select(item.plan_id).where(in_list(connection, item.plan_id, to_queues), *of_this)
        plan = func.coalesce(items.limit(1).correlate(tables.ATTEMPTS).scalar_subquery(), plan)
    return plan, *(func.coalesce(column, "") for column in _ORIGIN), _M.source_queue


def _sent_attempt(row: Row[*tuple[Any, ...]], to_queues: Mapping[int, str]) -> SentAttempt:
    row_id, number, begun_at, sent_at, acknowledged_at, proof, attempt_id, moved_to, has_framework_id, *way = row
    plan, queue, exchange, key, source_queue = way
    origin = Origin(queue or None, exchange, key) if queue or exchange or key else None
    to_queue = to_queues.get(plan)
    return SentAttempt(
        *(row_id, number, begun_at, sent_at, acknowledged_at, proof, attempt_id),
        sent_to=origin if to_queue is None else Origin(to_queue, None, ""),
        is_elsewhere=not queue or moved_to is not None or to_queue not in {None, queue},
        has_framework_id=has_framework_id,
        way=(plan, queue, exchange, key, source_queue),
    )


def _sightings(connection: Connection, queues: Collection[str]) -> dict[str, list[Sighting]]:
    found: defaultdict[str, list[Sighting]] = defaultdict(list)
    if queues:
        of_these = (own(connection, _R.scope_id), in_list(connection, _R.queue, queues))
        query = select(_R.queue, _R.at, _R.counted_from, _R.reading).where(*of_these)
        for queue, at, began, shown in connection.execute(query.order_by(_R.at, _R.id)):
            found[queue].append(Sighting(_reading(queue, at, shown), began))
    return found


def _reading(queue: str, at: datetime, shown: Mapping[str, Any]) -> QueueReading:
    """Another version may have written it: what it does not know is left out."""
    known: dict[str, Any] = {name: shown[name] for name in QueueReading._fields if name in shown}
    counters: Sequence[int] | None = known.get("counters")
    known["counters"] = None if counters is None else QueueCounters(*counters)
    known["channels"] = tuple(ChannelReading(*channel) for channel in known.get("channels", ()))
    return QueueReading(queue, at, **known)
