"""The SQL of retain: which rows are due, what they hold, and how they are counted, archived and deleted.

A row that has changed since it was selected is skipped.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    Connection,
    Engine,
    ScalarSelect,
    Table,
    and_,
    delete,
    exists,
    func,
    insert,
    literal,
    literal_column,
    or_,
    select,
    text,
    tuple_,
    update,
)

from dlqbatch.retain.format import ATTEMPT, TRANSITION, Line
from dlqbatch.settings import Settings
from dlqbatch.store import journal as states
from dlqbatch.store.action_tables import ACTION_ROWS, ACTIONS
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.journal import RowMove
from dlqbatch.store.reservation import OVER, REPLAYED_AS
from dlqbatch.store.scopes import own
from dlqbatch.store.states import NEW_GROUP, Status
from dlqbatch.store.tables import (
    ACK_UNPROVEN,
    ALERTS,
    ATTEMPTS,
    COLD_COPIES,
    MESSAGES,
    PLAN_ITEMS,
    PLANS,
    RUNS,
    SCOPES,
    TAKEN_BY,
    TRANSITIONS,
    UNPROVEN_RUNS,
)

# The actor of retain's lines in the journal.
ACTOR: Final = "retain"
MOST_TOGETHER: Final = 1_000
MOST_BYTES_TOGETHER: Final = 32 * 1024 * 1024
_BYTES_READ_AT_ONCE: Final = 4 * 1024 * 1024
_M: Final = MESSAGES.c
_RUN: Final = UNPROVEN_RUNS.c
_LAST_STEP: Final = (
    select(func.coalesce(func.max(TRANSITIONS.c.id), 0)).where(TRANSITIONS.c.message_id == _M.id).scalar_subquery()
)
_SCOPE: Final = select(SCOPES.c.name).where(SCOPES.c.id == _M.scope_id).scalar_subquery().label("scope")
_SIZE: Final = (
    func.length(_M.body)
    + func.length(_M.properties)
    + func.coalesce(func.length(_M.error_stack), 0)
    + func.coalesce(func.length(_M.error_message), 0)
)


@dataclass(frozen=True, slots=True)
class Keep:
    """How long a message is kept, counted from the moment it entered its state."""

    resolved: timedelta
    failed: timedelta
    archived: timedelta

    def before(self, now: datetime) -> Mapping[Status, datetime]:
        """By state: a message that entered it before that time is due. In any other state it is kept for a person."""
        return {
            Status.RESOLVED: now - self.resolved,
            Status.FAILED: now - self.failed,
            Status.ARCHIVED: now - self.archived,
        }


def keep_of(settings: Settings) -> Keep:
    return Keep(settings.keep_resolved, settings.keep_failed, settings.keep_archived)


class Due(NamedTuple):
    """A row that is due, as it was when it was selected."""

    id: int
    status: Status
    updated_at: datetime
    last_step: int
    """The newest line of its journal."""
    size: int
    """In bytes."""
    part: str | None
    """The part of cold storage that has its last copy."""
    since: datetime
    """When it entered its state."""


def batches(
    due: Iterable[Due], most: int = MOST_TOGETHER, most_bytes: int = MOST_BYTES_TOGETHER
) -> Iterator[tuple[Due, ...]]:
    """Batches in the order of the rows; a row that is larger than `most_bytes` is a batch of its own."""
    batch: list[Due] = []
    size = 0
    for each in due:
        if batch and (len(batch) >= most or size + each.size > most_bytes):
            yield tuple(batch)
            batch, size = [], 0
        batch.append(each)
        size += each.size
    if batch:
        yield tuple(batch)


def count_due(connection: Connection, before: Mapping[Status, datetime]) -> dict[Status, int]:
    """By state: how many messages entered it before that time, without those that a replay plan has reserved.

    The reserved ones are counted apart and subtracted, so that the count of all reads an index and no rows.
    """

    def number(status: Status, since: datetime, *, reserved: bool) -> ScalarSelect[int]:
        counted = select(func.count()).where(own(connection), _M.status == status, _M.status_since < since)
        return (counted.where(_M.plan_id.is_not(None)) if reserved else counted).scalar_subquery()

    columns = [(number(*one, reserved=False) - number(*one, reserved=True)) for one in before.items()]
    found = connection.execute(select(*columns)).one() if columns else ()
    return dict(zip(before, found, strict=True))


class Retention:
    """Each call is a transaction of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def count_due(self, before: Mapping[Status, datetime]) -> Mapping[Status, int]:
        with reading(self._engine) as connection:
            return count_due(connection, before)

    def due(self, status: Status, before: datetime, limit: int, after: Due | None = None) -> Sequence[Due]:
        """Rows in this state since before that time, the longest first, without those that a replay plan has reserved.

        `after` is the last row of the page before.
        """
        chosen = (
            select(_M.id, _M.status, _M.updated_at, _LAST_STEP, _SIZE, COLD_COPIES.c.part, _M.status_since)
            .outerjoin(COLD_COPIES, COLD_COPIES.c.message_id == _M.id)
            .where(_M.status == status, _M.status_since < before, _M.plan_id.is_(None))
            .order_by(_M.status_since, _M.id)
            .limit(limit)
        )
        if after is not None:
            last = tuple_(literal(after.since, _M.status_since.type), literal(after.id, _M.id.type))
            chosen = chosen.where(tuple_(_M.status_since, _M.id) > last)
        with reading(self._engine) as connection:
            return [Due(*row) for row in connection.execute(chosen.where(own(connection)))]

    def lines(self, due: Sequence[Due]) -> Iterator[Line]:
        """The whole rows with their attempts and journals, read a few at a time; without those that are gone."""
        for few in batches(due, most_bytes=_BYTES_READ_AT_ONCE):
            with reading(self._engine) as connection:
                is_large = few[0].size > _BYTES_READ_AT_ONCE  # such a row is alone
                found = _lines(connection, [each.id for each in few], in_pieces=is_large)
            while found:
                yield found.pop(0)

    def copied(self, due: Sequence[Due], part: str, now: datetime) -> set[int]:
        """Note the part that has their copies, and archive those that had failed; return the ids of unchanged rows."""
        with writing(self._engine) as connection:
            ours = _unchanged(connection, due)
            if ours:
                connection.execute(delete(COLD_COPIES).where(COLD_COPIES.c.message_id.in_(ours)))
                noted = [{"message_id": row_id, "part": part, "written_at": now} for row_id in sorted(ours)]
                connection.execute(insert(COLD_COPIES), noted)
            moves = [
                RowMove(each.id, each.status, Status.ARCHIVED, None, f"its time is over; copied to {part}")
                for each in due
                if each.id in ours and each.status != Status.ARCHIVED
            ]
            if len(states.move_many(connection, moves, now, ACTOR)) != len(moves):
                raise AssertionError("a row changed though it was locked")
            return ours

    def erased(self, row_ids: Collection[int]) -> list[int]:
        """Those of the messages that are erased."""
        with reading(self._engine) as connection:
            is_one = (_M.id.in_(row_ids), _M.erased_at.is_not(None))
            return list(connection.scalars(select(_M.id).where(*is_one).order_by(_M.id)))

    def delete(self, due: Sequence[Due]) -> set[int]:
        """Delete the rows that nobody has changed, with all that belongs to them; return their ids."""
        with writing(self._engine) as connection:
            ours = _unchanged(connection, due)
            if ours:
                _keep_outcomes(connection, ours)
                connection.execute(delete(MESSAGES).where(_M.id.in_(ours)))
            return ours

    def prune(self, before: datetime, runs_before: datetime, limit: int, now: datetime) -> Mapping[str, int]:
        """Delete at most so many of each: plans, alerts and actions before `before`, and runs before `runs_before`.

        Plans that have waited since `runs_before` go too if they were never applied, and are aborted if they were
        stopped.
        """
        with writing(self._engine) as connection:
            # A stopped plan to which nobody came back is given up; the lifecycle releases its messages.
            ours = own(connection, PLANS.c.scope_id)
            stopped = select(PLANS.c.id).where(ours, PLANS.c.state == "stopped", PLANS.c.state_since < runs_before)
            if forgotten := connection.scalars(stopped.limit(limit)).all():
                given_up = update(PLANS).where(PLANS.c.id.in_(forgotten), PLANS.c.state == "stopped")
                connection.execute(given_up.values(state="aborted", state_since=now))
            is_over = and_(PLANS.c.state.in_(OVER), PLANS.c.state_since < before)
            never_applied = and_(PLANS.c.state == "planned", PLANS.c.state_since < runs_before)
            is_free = ~exists().where(_M.plan_id == PLANS.c.id)
            plans = select(PLANS.c.id).where(ours, or_(is_over, never_applied), is_free)
            # The items go first, a bounded number of them: a plan may have a million.
            items = (PLAN_ITEMS.c.plan_id, PLAN_ITEMS.c.place)
            some = select(*items).where(PLAN_ITEMS.c.plan_id.in_(plans)).limit(limit)
            frozen = connection.execute(delete(PLAN_ITEMS).where(tuple_(*items).in_(some))).rowcount
            empty = plans.where(~exists().where(PLAN_ITEMS.c.plan_id == PLANS.c.id)).limit(limit)
            # The alert of a group stays: it alone says that the group has been reported, which happens once.
            has_ended = (own(connection, ALERTS.c.scope_id), ALERTS.c.resolved_at < before)
            over = select(ALERTS.c.id).where(*has_ended, ALERTS.c.name != NEW_GROUP).limit(limit)
            pruned = {
                "plan_items": frozen,
                "plans": connection.execute(delete(PLANS).where(PLANS.c.id.in_(empty))).rowcount,
                "alerts": connection.execute(delete(ALERTS).where(ALERTS.c.id.in_(over))).rowcount,
            }
        with writing(self._engine) as connection:
            # Runs that were killed, and whose messages are gone since.
            could_come = exists().select_from(MESSAGES).where(literal_column(TAKEN_BY) == _RUN.run, text(ACK_UNPROVEN))
            connection.execute(delete(UNPROVEN_RUNS).where(_RUN.since < runs_before, ~could_come))
        return pruned | {
            "runs": prune_runs(self._engine, runs_before, limit),
            **prune_actions(self._engine, before, limit),
        }


def prune_actions(engine: Engine, before: datetime, limit: int) -> dict[str, int]:
    """Delete actions from before that time, and first their messages, at most `limit` of each; return how many."""
    old = select(ACTIONS.c.id).where(ACTIONS.c.at < before)
    keys = (ACTION_ROWS.c.action_id, ACTION_ROWS.c.message_id)
    with writing(engine) as connection:
        some = select(*keys).where(ACTION_ROWS.c.action_id.in_(old)).limit(limit)
        rows = connection.execute(delete(ACTION_ROWS).where(tuple_(*keys).in_(some))).rowcount
        empty = old.where(~exists().where(ACTION_ROWS.c.action_id == ACTIONS.c.id)).limit(limit)
        actions = connection.execute(delete(ACTIONS).where(ACTIONS.c.id.in_(empty))).rowcount
    return {"action_rows": rows, "actions": actions}


def prune_runs(engine: Engine, before: datetime, limit: int) -> int:
    """Delete runs that began before that time, the oldest first, at most `limit`; return how many."""
    old = select(RUNS.c.id).where(RUNS.c.started_at < before).order_by(RUNS.c.started_at).limit(limit)
    with writing(engine) as connection:
        return connection.execute(delete(RUNS).where(RUNS.c.id.in_(old))).rowcount


def _keep_outcomes(connection: Connection, row_ids: Collection[int]) -> None:
    """Keep what became of a replay in the items of its plan, because the attempts go with their messages.

    The journal says in which plans the messages were; a search by message alone would read all items of all plans.
    """
    step = TRANSITIONS.c
    by_plan = PLANS.c.hash == func.substr(step.reason, len(REPLAYED_AS) + 1)
    replays = (
        select(PLANS.c.id, step.message_id)
        .join(TRANSITIONS, by_plan)
        .where(step.message_id.in_(row_ids), step.reason.startswith(REPLAYED_AS, autoescape=True))
    )
    item = PLAN_ITEMS.c
    of_this = (ATTEMPTS.c.message_id == item.message_id, ATTEMPTS.c.number == item.attempt)
    outcome = select(ATTEMPTS.c.outcome).where(*of_this).scalar_subquery()
    sent = (tuple_(item.plan_id, item.message_id).in_(replays), item.state == "sent")
    connection.execute(update(PLAN_ITEMS).where(*sent).values(reason=outcome))


def _unchanged(connection: Connection, due: Sequence[Due]) -> set[int]:
    """Lock the rows and return the ids of those that are as they were; a row that is locked is being changed."""
    known = {each.id: each for each in due}
    locked = connection.execute(
        select(_M.id, _M.status, _M.updated_at, _M.plan_id)
        .where(_M.id.in_(known))
        .order_by(_M.id)
        .with_for_update(skip_locked=True)
    ).all()
    # Read after the lock, because a line of the journal is only written with its row locked.
    steps = dict(
        connection.execute(
            select(TRANSITIONS.c.message_id, func.max(TRANSITIONS.c.id))
            .where(TRANSITIONS.c.message_id.in_([row.id for row in locked]))
            .group_by(TRANSITIONS.c.message_id)
        ).all()
    )
    return {
        row.id
        for row in locked
        if (row.status, row.updated_at, steps.get(row.id, 0)) == known[row.id][1:4] and row.plan_id is None
    }


def _lines(connection: Connection, row_ids: list[int], *, in_pieces: bool) -> list[Line]:
    columns = [column for column in _M if column is not _M.scope_id and not (in_pieces and column is _M.body)]
    rows = connection.execute(select(*columns, _SCOPE).where(_M.id.in_(row_ids)).order_by(_M.id)).mappings().all()
    messages = [dict(row) for row in rows]
    if in_pieces:
        messages = [message | {"body": _body(connection, message["id"])} for message in messages]
    attempts = _by_message(connection, ATTEMPTS, tuple(ATTEMPT), row_ids)
    transitions = _by_message(connection, TRANSITIONS, tuple(TRANSITION), row_ids)
    return [
        Line(message, tuple(attempts.get(message["id"], ())), tuple(transitions.get(message["id"], ())))
        for message in messages
        if message["body"] is not None
    ]


def _body(connection: Connection, row_id: int) -> bytes | None:
    """Read in pieces, because PostgreSQL's driver takes six times the memory of what it reads; None if it is gone."""
    body = io.BytesIO()
    while True:
        piece = func.substr(_M.body, body.tell() + 1, _BYTES_READ_AT_ONCE)
        found = connection.execute(select(piece).where(_M.id == row_id)).scalar_one_or_none()
        if found is None:
            return None
        if not found:
            return body.getvalue()
        body.write(found)


def _by_message(
    connection: Connection, table: Table, names: tuple[str, ...], row_ids: list[int]
) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    chosen = select(table.c.message_id, *(table.c[name] for name in names))
    for message_id, *values in connection.execute(chosen.where(table.c.message_id.in_(row_ids)).order_by(table.c.id)):
        found.setdefault(message_id, []).append(dict(zip(names, values, strict=True)))
    return found
