"""Who works on which row: due rows are claimed under a lease, an expired lease is taken over, a claim is given back."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from sqlalchemy import select, text, true, update

from dlqbatch.deadstore import states
from dlqbatch.deadstore.attempts import IS_SENT, LEASE, abandon_unsent
from dlqbatch.deadstore.engine import writing
from dlqbatch.deadstore.record import SUMMARY, Record
from dlqbatch.deadstore.states import RowMove
from dlqbatch.deadstore.tables import HAS_LEASE, IS_DUE, MESSAGES, WAITS_FOR_ITS_TIME
from dlqbatch.policy.lifecycle import Status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime, timedelta

    from sqlalchemy import Connection, Engine

LIMIT: Final = 100
ACTOR: Final = "lifecycle"
_LOOKS_AHEAD: Final = 10
"""How many claims' worth of rows one promotion marks as due; priority holds among the rows that are marked."""


def promote(engine: Engine, now: datetime, limit: int = LIMIT * _LOOKS_AHEAD) -> int:
    """Mark rows whose time has come, the longest waiting first; says how many."""
    with writing(engine) as connection:
        waiting = (
            select(MESSAGES.c.id)
            .where(text(WAITS_FOR_ITS_TIME), MESSAGES.c.next_retry_at <= now)
            .order_by(MESSAGES.c.next_retry_at)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        ids = connection.scalars(waiting).all()
        if ids:
            connection.execute(update(MESSAGES).where(MESSAGES.c.id.in_(ids)).values(is_due=true()))
    return len(ids)


def claim(
    engine: Engine, owner: str, now: datetime, limit: int = LIMIT, lease: timedelta = LEASE, reason: str = "due"
) -> list[Record]:
    """Due rows, now in processing and this owner's until the lease ends; highest priority first, then the oldest.

    All share one token. Fewer than `limit` also when other workers are taking the rest at this moment.
    """
    promote(engine, now, limit * _LOOKS_AHEAD)
    with writing(engine) as connection:
        due = (
            select(MESSAGES.c.id)
            .where(text(IS_DUE))
            .order_by(MESSAGES.c.priority.desc(), MESSAGES.c.created_at, MESSAGES.c.id)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        ids = connection.scalars(due).all()
        lock = _lock(owner, now, lease)
        moves = [RowMove(row_id, Status.PENDING, Status.PROCESSING, None, reason, lock) for row_id in ids]
        if len(states.move_many(connection, moves, now, ACTOR)) != len(ids):
            raise AssertionError("a row changed though it was locked")
        return _records(connection, ids)


def take_over(
    engine: Engine,
    owner: str,
    now: datetime,
    limit: int = LIMIT,
    lease: timedelta = LEASE,
    plan_id: int | None = None,
    actor: str = ACTOR,
) -> list[Record]:
    """Rows whose worker let its lease run out before its send was confirmed, now this owner's; their attempt goes on.

    Rows of a replay plan only when its id is given, and then no others. A lease on an attempt that was sent after all
    just ends: that row is under observation.
    """
    with writing(engine) as connection:
        expired = (
            select(MESSAGES.c.id)
            .where(text(HAS_LEASE), MESSAGES.c.lease_until < now, MESSAGES.c.plan_id.is_not_distinct_from(plan_id))
            .order_by(MESSAGES.c.lease_until)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        ids = connection.scalars(expired).all()
        if not ids:
            return []
        mine = MESSAGES.c.id.in_(ids)
        connection.execute(update(MESSAGES).where(mine, IS_SENT).values(lease_until=None))
        connection.execute(update(MESSAGES).where(mine, ~IS_SENT).values(_lock(owner, now, lease)))
        taken = connection.scalars(select(MESSAGES.c.id).where(mine, MESSAGES.c.lease_until.is_not(None))).all()
        states.note_many(connection, dict.fromkeys(taken, "lease expired: taken over"), now, actor)
        return _records(connection, taken)


def release(
    engine: Engine,
    tokens: Mapping[int, str],
    now: datetime,
    reason: str,
    next_retry_at: datetime | None,
    to: Status = Status.PENDING,
    actor: str = ACTOR,
) -> set[int]:
    """Give claimed rows back, by row id and token; an attempt that was never confirmed is abandoned.

    Returns the ids that went back: not those that another worker has taken over, nor those already sent.
    """
    with writing(engine) as connection:
        unsent = abandon_unsent(connection, tokens, now)
        moves = [
            RowMove(row_id, Status.PROCESSING, to, tokens[row_id], reason, {"next_retry_at": next_retry_at})
            for row_id in unsent
        ]
        return states.move_many(connection, moves, now, actor)


def _lock(owner: str, now: datetime, lease: timedelta) -> dict[str, object]:
    return {"lock_owner": owner, "lock_token": secrets.token_hex(16), "locked_at": now, "lease_until": now + lease}


def _records(connection: Connection, ids: Sequence[int]) -> list[Record]:
    found = connection.execute(select(*SUMMARY).where(MESSAGES.c.id.in_(ids)))
    records = [Record(*row) for row in found]
    return sorted(records, key=lambda record: (-record.priority, record.created_at, record.id))
