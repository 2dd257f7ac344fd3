"""Who works on which row: due rows are claimed under a lease, an expired lease is taken over, a claim is given back."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import exists, func, select, text, true, update

from dlqbatch.deadstore import states
from dlqbatch.deadstore.attempts import IS_SENT, LEASE, abandon_unsent
from dlqbatch.deadstore.breakers import place
from dlqbatch.deadstore.engine import writing
from dlqbatch.deadstore.given import among
from dlqbatch.deadstore.plan_status import begun
from dlqbatch.deadstore.states import RowMove
from dlqbatch.deadstore.tables import ATTEMPTS, HAS_LEASE, IS_DUE, MESSAGES, WAITS_FOR_ITS_TIME
from dlqbatch.policy.classify import LOOKED_AT
from dlqbatch.policy.lifecycle import Back, Claimed, Status

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime, timedelta

    from sqlalchemy import ColumnElement, Engine, Row

    from dlqbatch.deadstore.engine import Kept
    from dlqbatch.policy.strategy import Strategy

LIMIT: Final = 256
ACTOR: Final = "lifecycle"
CLAIMED: Final[tuple[ColumnElement[Any], ...]] = (
    *(
        MESSAGES.c[name]
        for name in (
            *("id", "identity", "error_type", "event", "origin_queue", "origin_exchange", "origin_key"),
            *("dlq_retry_count", "next_retry_at"),
        )
    ),
    func.substr(MESSAGES.c.error_message, 1, LOOKED_AT).label("error_message"),
    func.length(MESSAGES.c.body).label("body_size"),
)
"""The columns that make a Claimed; of a long message only what is looked at."""
HAS_ATTEMPT: Final = (
    exists().where(ATTEMPTS.c.message_id == MESSAGES.c.id, ATTEMPTS.c.closed_at.is_(None)).label("has_attempt")
)
_IN_ORDER: Final = (MESSAGES.c.priority.desc(), MESSAGES.c.created_at, MESSAGES.c.id)
_LOOKS_AHEAD: Final = 1_000
"""How many rows one promotion marks as due; priority holds among the rows that are marked."""


def promote(engine: Engine | Kept, now: datetime, limit: int = _LOOKS_AHEAD) -> int:
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
            marking = update(MESSAGES).where(among(connection, MESSAGES.c.id, ids))
            connection.execute(marking.values(is_due=true()))
    return len(ids)


def claim(
    engine: Engine | Kept, owner: str, now: datetime, limit: int = LIMIT, lease: timedelta = LEASE, reason: str = "due"
) -> list[Claimed]:
    """Due rows, now in processing and this owner's until the lease ends; highest priority first, then the oldest.

    All share one token. Fewer than `limit` also when other workers are taking the rest at this moment.
    """
    promote(engine, now)
    with writing(engine) as connection:
        due = select(*CLAIMED).where(text(IS_DUE)).order_by(*_IN_ORDER).limit(limit).with_for_update(skip_locked=True)
        rows = connection.execute(due).all()
        lock = _lock(owner, now, lease)
        moves = [RowMove(row.id, Status.PENDING, Status.PROCESSING, None, reason, lock) for row in rows]
        states.move_locked(connection, moves, now, ACTOR)
        return [claimed(row, lock["lock_token"]) for row in rows]


def take_over(
    engine: Engine | Kept,
    owner: str,
    now: datetime,
    limit: int = LIMIT,
    lease: timedelta = LEASE,
    plan_id: int | None = None,
    actor: str = ACTOR,
) -> list[Claimed]:
    """Rows whose worker let its lease run out before its send was confirmed, now this owner's; their attempt goes on.

    Rows of a replay plan only when its id is given, and then no others. A lease on an attempt that was sent after all
    just ends: that row is under observation.
    """
    with writing(engine) as connection:
        is_over = MESSAGES.c.lease_until < now
        expired = select(MESSAGES.c.id).where(text(HAS_LEASE), is_over)
        if plan_id is not None:
            # By its items: what it has sent keeps its lease, which counts for nothing.
            is_its = among(connection, MESSAGES.c.id, begun(connection, plan_id))
            held = (MESSAGES.c.plan_id == plan_id, MESSAGES.c.status == Status.PROCESSING)
            expired = select(MESSAGES.c.id).where(is_its, *held, is_over)
        expired = expired.order_by(MESSAGES.c.lease_until).limit(limit)
        ids = connection.scalars(expired.with_for_update(skip_locked=True)).all()
        if not ids:
            return []
        mine = among(connection, MESSAGES.c.id, ids)
        lock = _lock(owner, now, lease)
        connection.execute(update(MESSAGES).where(mine, IS_SENT).values(lease_until=None))
        connection.execute(update(MESSAGES).where(mine, ~IS_SENT).values(lock))
        taking = select(*CLAIMED, HAS_ATTEMPT).where(mine, MESSAGES.c.lease_until.is_not(None))
        rows = connection.execute(taking.order_by(*_IN_ORDER)).all()
        states.note_many(connection, {row.id: "lease expired: taken over" for row in rows}, now, actor)
        return [claimed(row, lock["lock_token"], has_attempt=row.has_attempt) for row in rows]


def release(
    engine: Engine | Kept,
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
        backs = {row_id: Back(tokens[row_id], to, reason, next_retry_at) for row_id in unsent}
        return states.move_many(connection, [_backward(each, backs[each], unsent[each]) for each in unsent], now, actor)


def give_back(engine: Engine | Kept, rows: Mapping[int, Back], now: datetime, actor: str = ACTOR) -> set[int]:
    """Give claimed rows back, each in its own way; as `release` otherwise."""
    if not rows:
        return set()
    with writing(engine) as connection:
        unsent = abandon_unsent(connection, {row_id: back.token for row_id, back in rows.items()}, now)
        return states.move_many(connection, [_backward(each, rows[each], unsent[each]) for each in unsent], now, actor)


def _backward(row_id: int, back: Back, begun_by: Strategy | None) -> RowMove:
    """An attempt that was begun and not sent has its strategy from the same classification."""
    columns: dict[str, object] = {"next_retry_at": back.next_retry_at}
    if strategy := back.strategy or begun_by:
        columns["strategy"] = strategy
    return RowMove(row_id, Status.PROCESSING, back.to, back.token, back.reason, columns)


def _lock(owner: str, now: datetime, lease: timedelta) -> dict[str, Any]:
    return {"lock_owner": owner, "lock_token": secrets.token_hex(16), "locked_at": now, "lease_until": now + lease}


def claimed(row: Row[*tuple[Any, ...]], token: str, *, has_attempt: bool = False) -> Claimed:
    return Claimed(
        row_id=row.id,
        token=token,
        identity=row.identity,
        error_type=row.error_type,
        error_message=row.error_message,
        event=row.event,
        origin=place(row.origin_queue, row.origin_exchange, row.origin_key),
        failed_attempts=row.dlq_retry_count,
        next_retry_at=row.next_retry_at,
        body_size=row.body_size,
        has_attempt=has_attempt,
    )
