"""Rows of replay plans that are over are given back: those that a killed apply held, or that a cut abort left reserved.

Every lifecycle run does it, and every command that plans, applies or aborts a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import Connection, Engine, exists, select, update

from dlqbatch.lifecycle import attempts, leases
from dlqbatch.store import journal
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.journal import RowMove
from dlqbatch.store.reservation import ended_plans_with_rows, items_of_rows, places_of, release_reservations
from dlqbatch.store.scopes import own
from dlqbatch.store.states import Status
from dlqbatch.store.tables import MESSAGES, PLAN_ITEMS, PLANS

_AT_ONCE: Final = 1_000  # rows of one transaction
_M: Final = MESSAGES.c
_P: Final = PLANS.c
_I: Final = PLAN_ITEMS.c


def release_ended_plans(
    engine: Engine,
    *,
    actor: str,
    worker: str,
    lease: timedelta,
    now: datetime,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Release the rows of plans that are done or aborted; what an apply still holds goes back after its lease.

    Where `is_over` ends it, the next call goes on.
    """
    with reading(engine) as connection:
        # Held, or sent: to tell them apart here would be to look at all that are sent.
        held = exists().where(_M.plan_id == _P.id, _M.status == Status.PROCESSING)
        is_aborted = (own(connection, _P.scope_id), _P.state == "aborted")
        aborted = connection.scalars(select(_P.id).where(*is_aborted, held)).all()
    for plan_id in aborted:
        return_expired(engine, plan_id, actor=actor, worker=worker, lease=lease, now=now)
    for plan_id in ended_plans_with_rows(engine):
        if is_over() or not release_reservations(engine, plan_id, is_over):
            return


def return_expired(engine: Engine, plan_id: int, *, actor: str, worker: str, lease: timedelta, now: datetime) -> None:
    """Rows of the plan whose apply was killed become what they were before, as soon as their leases are over."""
    while expired := leases.take_over(engine, worker, now, _AT_ONCE, lease, plan_id, actor):
        tokens = {row.row_id: row.token for row in expired}
        reasons = dict.fromkeys(tokens, "the apply was cut, and its plan is over")
        with writing(engine) as connection:
            places = places_of(connection, plan_id, tokens)
            return_to_plan(connection, plan_id, places, tokens, reasons, now, actor)


def return_to_plan(
    connection: Connection,
    plan_id: int,
    places: Mapping[int, int],
    tokens: Mapping[int, str],
    reasons: Mapping[int, str],
    now: datetime,
    actor: str,
    columns: Mapping[str, object] | None = None,
    to: Status | None = None,
) -> set[int]:
    """Rows that were taken and not sent wait in the plan again, as they were before, or as `to`; their ids."""
    unsent = attempts.abandon_unsent(connection, tokens, now)
    items = items_of_rows(plan_id, places, unsent, connection)
    before = connection.execute(select(_I.message_id, _I.seen_status).where(*items)).all()
    moves = [
        RowMove(row_id, Status.PROCESSING, to or seen, tokens[row_id], reasons[row_id], columns or {})
        for row_id, seen in before
    ]
    moved = journal.move_many(connection, moves, now, actor)
    # As they are now is how the plan knows them from here on.
    back = update(PLAN_ITEMS).where(*items_of_rows(plan_id, places, moved, connection))
    connection.execute(back.values(seen_updated_at=now, attempt=None))
    return moved
