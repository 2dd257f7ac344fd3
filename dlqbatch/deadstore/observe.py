"""Retries that were sent and have not come back: which wait to be resolved, and resolving them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import func, literal, select, text, tuple_

from dlqbatch.deadstore import breakers, states
from dlqbatch.deadstore.attempts import close_attempt
from dlqbatch.deadstore.claim import ACTOR
from dlqbatch.deadstore.column_types import BIGINT, Time
from dlqbatch.deadstore.engine import reading, writing
from dlqbatch.deadstore.given import among, given
from dlqbatch.deadstore.states import RowMove
from dlqbatch.deadstore.tables import ATTEMPTS, MESSAGES, PLAN_ITEMS, PLANS, RUNS
from dlqbatch.message.envelope import Origin
from dlqbatch.policy.lifecycle import Status, Watch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from datetime import datetime

    from sqlalchemy import ColumnElement, Connection, Engine, Row

    from dlqbatch.deadstore.engine import Kept
    from dlqbatch.deadstore.record import Outcome

    Way = tuple[int, str, str, str]

_RUNS_LOOKED_AT: Final = 300
"""Of each job, the newest: who asks wants to know of the last look, not of every one."""
_WAY: Final = (PLANS.c.id, MESSAGES.c.origin_queue, MESSAGES.c.origin_exchange, MESSAGES.c.source_queue)
# Word for word the condition of its partial index.
_OBSERVED: Final = "dlq_attempts.closed_at IS NULL AND dlq_attempts.sent_at IS NOT NULL"


@dataclass(frozen=True, slots=True)
class Observed:
    """A sent attempt that is still open."""

    row_id: int
    attempt: int
    sent_at: datetime
    attempt_id: int
    source_queue: str
    sent_to: Origin | None
    """Its origin, or the queue that a replay has named instead."""
    is_elsewhere: bool
    """A replay has named it, or only an exchange is known: it may come back through another queue than before."""
    way: Way


class Observations:
    def __init__(self, engine: Engine | Kept) -> None:
        self._engine = engine

    def looks(self, job: str, before: datetime | None = None) -> Sequence[Watch]:
        """The newest runs of drain or ingest that began before that time."""
        asking = select(RUNS.c.started_at, RUNS.c.ended_at, RUNS.c.emptied).where(RUNS.c.job == job)
        if before is not None:
            asking = asking.where(RUNS.c.started_at < before)
        with reading(self._engine) as connection:
            found = connection.execute(asking.order_by(RUNS.c.started_at.desc()).limit(_RUNS_LOOKED_AT))
            return [Watch(started_at, ended_at, frozenset(emptied)) for started_at, ended_at, emptied in found]

    def sent_before(
        self,
        time: datetime,
        limit: int,
        after: tuple[datetime, int] | None = None,
        without: AbstractSet[Way] = frozenset(),
    ) -> Sequence[Observed]:
        """Those sent longest ago, but for what went these ways.

        `after` is `sent_at` and `attempt_id` of the last one on the page before.
        """
        place = tuple_(ATTEMPTS.c.sent_at, ATTEMPTS.c.id)
        conditions: list[Any] = [text(_OBSERVED), ATTEMPTS.c.sent_at < time, MESSAGES.c.status == Status.PROCESSING]
        if after is not None:
            conditions.append(place > tuple_(literal(after[0], Time), literal(after[1], BIGINT)))
        with reading(self._engine) as connection:
            named = select(PLANS.c.id, PLANS.c.to_queue).where(PLANS.c.to_queue.is_not(None))
            to_queues: dict[int, str] = dict(connection.execute(named).all())
            way = _way(connection, to_queues)
            if without:
                ways = given(connection, dict(zip(_WAY, map(list, zip(*without, strict=True)), strict=True)))
                conditions.append(tuple_(*way).not_in(select(*ways.c)))
            own = (ATTEMPTS.c.message_id, ATTEMPTS.c.number, ATTEMPTS.c.sent_at, ATTEMPTS.c.id, MESSAGES.c.origin_key)
            asking = select(*own, *way).join(MESSAGES, MESSAGES.c.id == ATTEMPTS.c.message_id).where(*conditions)
            found = connection.execute(asking.order_by(ATTEMPTS.c.sent_at, ATTEMPTS.c.id).limit(limit)).all()
        return [_observed(row, to_queues) for row in found]

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
            locking = select(MESSAGES.c.id, MESSAGES.c.status, MESSAGES.c.lock_token)
            locking = (
                locking.where(among(connection, MESSAGES.c.id, attempts)).order_by(MESSAGES.c.id).with_for_update()
            )
            rows = connection.execute(locking).all()
            sent = select(ATTEMPTS.c.message_id, ATTEMPTS.c.number).where(
                text(_OBSERVED), among(connection, ATTEMPTS.c.message_id, attempts)
            )
            numbers = {row.message_id: row.number for row in connection.execute(sent)}
            moves = [
                RowMove(row.id, Status.PROCESSING, status, row.lock_token, attempts[row.id][1])
                for row in rows
                if row.status == Status.PROCESSING and numbers.get(row.id) == attempts[row.id][0]
            ]
            for move in moves:
                close_attempt(connection, move.row_id, attempts[move.row_id][0], outcome, now)
            moved = states.move_many(connection, moves, now, ACTOR)
            if status is Status.RESOLVED:
                breakers.count_succeeded(connection, moved, now)
        return moved


def _way(connection: Connection, to_queues: Mapping[int, str]) -> tuple[ColumnElement[Any], ...]:
    """The columns of a Way; only plans that have named a queue are looked through for the attempt."""
    plan: ColumnElement[Any] = literal(0, BIGINT)
    if to_queues:
        items = select(PLAN_ITEMS.c.plan_id).where(
            among(connection, PLAN_ITEMS.c.plan_id, to_queues),
            PLAN_ITEMS.c.message_id == ATTEMPTS.c.message_id,
            PLAN_ITEMS.c.attempt == ATTEMPTS.c.number,
        )
        plan = func.coalesce(items.limit(1).correlate(ATTEMPTS).scalar_subquery(), plan)
    origin = (func.coalesce(each, "") for each in (MESSAGES.c.origin_queue, MESSAGES.c.origin_exchange))
    return plan, *origin, MESSAGES.c.source_queue


def _observed(row: Row[*tuple[Any, ...]], to_queues: Mapping[int, str]) -> Observed:
    row_id, attempt, sent_at, attempt_id, key, plan, queue, exchange, source_queue = row
    origin = Origin(queue or None, exchange, key or "") if queue or exchange else None
    to_queue = to_queues.get(plan)
    return Observed(
        row_id,
        attempt,
        sent_at,
        attempt_id,
        source_queue,
        sent_to=origin if to_queue is None else Origin(to_queue, None, ""),
        is_elsewhere=not queue or to_queue not in {None, queue},
        way=(plan, queue, exchange, source_queue),
    )
