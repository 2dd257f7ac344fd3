"""Rows whose time has come: which they are, what they hold; archived or deleted unless somebody was faster."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import delete, exists, func, insert, literal_column, select, text, tuple_, update

from dlqbatch.deadstore import run_history, states
from dlqbatch.deadstore.engine import reading, writing
from dlqbatch.deadstore.plan_status import REPLAYED_AS
from dlqbatch.deadstore.reservation import OVER
from dlqbatch.deadstore.states import RowMove
from dlqbatch.deadstore.tables import (
    ACK_UNPROVEN,
    ALERTS,
    ATTEMPTS,
    COLD_COPIES,
    MESSAGES,
    PLAN_ITEMS,
    PLANS,
    TAKEN_BY,
    TRANSITIONS,
    UNPROVEN_RUNS,
)
from dlqbatch.message.cold import ATTEMPT, TRANSITION, Line
from dlqbatch.policy.alerts import NEW_GROUP
from dlqbatch.policy.cold import Due, batches
from dlqbatch.policy.lifecycle import Status

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import Connection, Engine, Table

ACTOR: Final = "retain"
"""Plans that hold no rows and never will."""
_BYTES_READ_AT_ONCE: Final = 4 * 1024 * 1024
_M: Final = MESSAGES.c
_RUN: Final = UNPROVEN_RUNS.c
_LAST_STEP: Final = (
    select(func.coalesce(func.max(TRANSITIONS.c.id), 0)).where(TRANSITIONS.c.message_id == _M.id).scalar_subquery()
)
_SIZE: Final = (
    func.length(_M.body)
    + func.length(_M.properties)
    + func.coalesce(func.length(_M.error_stack), 0)
    + func.coalesce(func.length(_M.error_message), 0)
)


class Retention:
    """Each call is a transaction of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def due(self, status: Status, before: datetime, limit: int) -> Sequence[Due]:
        """In this state since before that time, the longest first; without those that a replay plan has reserved."""
        chosen = (
            select(_M.id, _M.status, _M.updated_at, _LAST_STEP, _SIZE, COLD_COPIES.c.part)
            .outerjoin(COLD_COPIES, COLD_COPIES.c.message_id == _M.id)
            .where(_M.status == status, _M.status_since < before, _M.plan_id.is_(None))
            .order_by(_M.status_since, _M.id)
            .limit(limit)
        )
        with reading(self._engine) as connection:
            return [Due(*row) for row in connection.execute(chosen)]

    def lines(self, due: Sequence[Due]) -> Iterator[Line]:
        """Whole, a few at a time; without those that are gone."""
        for few in batches(due, most_bytes=_BYTES_READ_AT_ONCE):
            with reading(self._engine) as connection:
                is_large = few[0].size > _BYTES_READ_AT_ONCE  # then it is alone
                found = _lines(connection, [each.id for each in few], in_pieces=is_large)
            while found:
                yield found.pop(0)

    def copied(self, due: Sequence[Due], part: str, now: datetime) -> set[int]:
        """Note where the copy of each is; what had failed is archived with it. The ids of those nobody had changed."""
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

    def delete(self, due: Sequence[Due]) -> set[int]:
        """The ids of those that nobody had changed; they are gone, with all that belongs to them."""
        with writing(self._engine) as connection:
            ours = _unchanged(connection, due)
            if ours:
                _keep_outcomes(connection, ours)
                connection.execute(delete(MESSAGES).where(_M.id.in_(ours)))
            return ours

    def prune(self, before: datetime, runs_before: datetime, limit: int) -> Mapping[str, int]:
        """At most so many of each: plans and alerts that were over before that time, runs that began before theirs."""
        with writing(self._engine) as connection:
            plans = select(PLANS.c.id).where(
                PLANS.c.state.in_(OVER), PLANS.c.state_since < before, ~exists().where(_M.plan_id == PLANS.c.id)
            )
            # Its items first, a bounded number of them: a plan may have frozen a million.
            items = (PLAN_ITEMS.c.plan_id, PLAN_ITEMS.c.place)
            some = select(*items).where(PLAN_ITEMS.c.plan_id.in_(plans)).limit(limit)
            frozen = connection.execute(delete(PLAN_ITEMS).where(tuple_(*items).in_(some))).rowcount
            empty = plans.where(~exists().where(PLAN_ITEMS.c.plan_id == PLANS.c.id)).limit(limit)
            # That a group was told of is known by its alert alone, and it is told once, however long ago.
            over = select(ALERTS.c.id).where(ALERTS.c.resolved_at < before, ALERTS.c.name != NEW_GROUP).limit(limit)
            pruned = {
                "plan_items": frozen,
                "plans": connection.execute(delete(PLANS).where(PLANS.c.id.in_(empty))).rowcount,
                "alerts": connection.execute(delete(ALERTS).where(ALERTS.c.id.in_(over))).rowcount,
            }
        with writing(self._engine) as connection:
            # Of a run that was cut, and whose messages are gone since.
            could_come = exists().select_from(MESSAGES).where(literal_column(TAKEN_BY) == _RUN.run, text(ACK_UNPROVEN))
            connection.execute(delete(UNPROVEN_RUNS).where(_RUN.since < runs_before, ~could_come))
        return pruned | {"runs": run_history.prune(self._engine, runs_before, limit)}


def _keep_outcomes(connection: Connection, row_ids: Collection[int]) -> None:
    """What became of a replay is still asked for when its messages are gone, and their attempts with them.

    The journal tells which plans they were in; asked by message alone, all items of all plans would be looked through.
    """
    told = TRANSITIONS.c
    by_plan = PLANS.c.hash == func.substr(told.reason, len(REPLAYED_AS) + 1)
    replays = (
        select(PLANS.c.id, told.message_id)
        .join(TRANSITIONS, by_plan)
        .where(told.message_id.in_(row_ids), told.reason.startswith(REPLAYED_AS, autoescape=True))
    )
    item = PLAN_ITEMS.c
    of_this = (ATTEMPTS.c.message_id == item.message_id, ATTEMPTS.c.number == item.attempt)
    outcome = select(ATTEMPTS.c.outcome).where(*of_this).scalar_subquery()
    sent = (tuple_(item.plan_id, item.message_id).in_(replays), item.state == "sent")
    connection.execute(update(PLAN_ITEMS).where(*sent).values(reason=outcome))


def _unchanged(connection: Connection, due: Sequence[Due]) -> set[int]:
    """Lock them, and say which are as they were; who is locked by somebody else is being changed."""
    known = {each.id: each for each in due}
    locked = connection.execute(
        select(_M.id, _M.status, _M.updated_at, _M.plan_id)
        .where(_M.id.in_(known))
        .order_by(_M.id)
        .with_for_update(skip_locked=True)
    ).all()
    # Asked behind the lock: a line of the journal, too, needs its row to stand still.
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
    columns = [column for column in _M if not (in_pieces and column is _M.body)]
    rows = connection.execute(select(*columns).where(_M.id.in_(row_ids)).order_by(_M.id)).mappings().all()
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
    """Piece by piece, for PostgreSQL's driver takes six times the memory of what it reads at once; None: it is gone."""
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
