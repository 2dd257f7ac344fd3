"""Who works on which row: due rows are claimed under a lease, an expired lease is taken over, a claim is given back."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Engine, Row, exists, func, select, text, true, update

from dlqbatch.lifecycle import breaker_rows as breakers
from dlqbatch.lifecycle.attempts import IS_SENT, LEASE, abandon_unsent
from dlqbatch.lifecycle.rules import LONGEST_SEARCHED
from dlqbatch.lifecycle.strategy import Back, Claimed
from dlqbatch.store import journal
from dlqbatch.store.bulk import in_list
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.journal import RowMove
from dlqbatch.store.reservation import begun
from dlqbatch.store.states import Status, Strategy
from dlqbatch.store.tables import ATTEMPTS, HAS_LEASE, IS_DUE, MESSAGES
from dlqbatch.store.waiting import overdue

_M: Final = MESSAGES.c
LIMIT: Final = 256
ACTOR: Final = "lifecycle"
CLAIMED: Final[tuple[ColumnElement[Any], ...]] = (
    *(_M.id, _M.identity, _M.error_type, _M.event, _M.origin_queue, _M.origin_exchange, _M.origin_key),
    *(_M.dlq_retry_count, _M.next_retry_at),
    func.substr(_M.error_message, 1, LONGEST_SEARCHED).label("error_message"),
    func.length(_M.body).label("body_size"),
)
"""The columns that make a Claimed; of a long message only what is looked at."""
HAS_ATTEMPT: Final = exists().where(ATTEMPTS.c.message_id == _M.id, ATTEMPTS.c.closed_at.is_(None)).label("has_attempt")
_IN_ORDER: Final = (_M.priority.desc(), _M.created_at, _M.id)
_PROMOTED_AT_ONCE: Final = 1_000
"""How many rows are marked as due at once; age counts only among rows that are marked."""


HoldBack = Callable[[Connection, Sequence[Row[*tuple[Any, ...]]], datetime], set[int]]
"""Puts off rows that have become due, and returns the ids of these: nobody claims them."""


def promote(engine: Engine, now: datetime, limit: int = _PROMOTED_AT_ONCE, hold_back: HoldBack | None = None) -> int:
    """Mark rows whose time has come: highest priority first, then the longest waiting; says how many."""
    waiting = select(_M.id, _M.strategy, _M.origin_queue, _M.origin_exchange, _M.origin_key)
    with writing(engine) as connection:
        rows = overdue(connection, waiting.with_for_update(skip_locked=True), now, limit)
        put_off = hold_back(connection, rows, now) if hold_back is not None else set()
        ids = [row.id for row in rows if row.id not in put_off]
        if ids:
            marking = update(MESSAGES).where(in_list(connection, _M.id, ids))
            connection.execute(marking.values(is_due=true()))
    return len(ids)


def claim(
    engine: Engine,
    owner: str,
    now: datetime,
    limit: int = LIMIT,
    lease: timedelta = LEASE,
    reason: str = "due",
    hold_back: HoldBack | None = None,
) -> list[Claimed]:
    """Due rows, now in processing and this owner's until the lease ends; highest priority first, then the oldest.

    All share one token. Fewer than `limit` also when other workers are taking the rest at this moment; none only when
    nothing is due that nobody has taken, or when what has become due was held back.
    """
    due = select(*CLAIMED).where(text(IS_DUE)).order_by(*_IN_ORDER).limit(limit).with_for_update(skip_locked=True)
    while True:
        marked = promote(engine, now, _PROMOTED_AT_ONCE, hold_back)
        lock = _lock(owner, now, lease)
        with writing(engine) as connection:
            rows = connection.execute(due).all()
            moves = [RowMove(row.id, Status.PENDING, Status.PROCESSING, None, reason, lock) for row in rows]
            journal.move_locked(connection, moves, now, ACTOR)
        # A plan, or another worker, may take all that was marked before it is claimed.
        if rows or not marked:
            return [claimed(row, lock["lock_token"]) for row in rows]


def due(engine: Engine, limit: int, now: datetime) -> list[Claimed]:
    """The rows that a run would claim, in its order: expired leases first, then what is due, marked or not."""
    expired = (text(HAS_LEASE), _M.lease_until < now, ~IS_SENT)
    rows = select(*CLAIMED, HAS_ATTEMPT, _M.priority, _M.created_at)
    with reading(engine) as connection:
        taken_over = connection.execute(rows.where(*expired).order_by(_M.lease_until).limit(limit)).all()
        marked = connection.execute(rows.where(text(IS_DUE)).order_by(*_IN_ORDER).limit(limit)).all()
        unmarked = overdue(connection, rows, now, limit)
    in_order = sorted([*marked, *unmarked], key=lambda row: (-row.priority, row.created_at, row.id))
    return [claimed(row, "", has_attempt=row.has_attempt) for row in [*taken_over, *in_order][:limit]]


def take_over(
    engine: Engine,
    owner: str,
    now: datetime,
    limit: int = LIMIT,
    lease: timedelta = LEASE,
    plan_id: int | None = None,
    actor: str = ACTOR,
) -> list[Claimed]:
    """Take over rows whose lease ended before their send was confirmed; they keep their attempt.

    Rows of a replay plan are taken only when its id is given, and then no others. Where the attempt was sent after all,
    the lease is only removed: that row is under observation.
    """
    with writing(engine) as connection:
        is_over = _M.lease_until < now
        expired = select(_M.id).where(text(HAS_LEASE), is_over)
        if plan_id is not None:
            # By its items: what it has sent keeps its lease, which counts for nothing.
            is_its = in_list(connection, _M.id, begun(connection, plan_id))
            held = (_M.plan_id == plan_id, _M.status == Status.PROCESSING)
            expired = select(_M.id).where(is_its, *held, is_over)
        expired = expired.order_by(_M.lease_until).limit(limit)
        ids = connection.scalars(expired.with_for_update(skip_locked=True)).all()
        if not ids:
            return []
        mine = in_list(connection, _M.id, ids)
        lock = _lock(owner, now, lease)
        connection.execute(update(MESSAGES).where(mine, IS_SENT).values(lease_until=None))
        connection.execute(update(MESSAGES).where(mine, ~IS_SENT).values(lock))
        taking = select(*CLAIMED, HAS_ATTEMPT).where(mine, _M.lease_until.is_not(None))
        rows = connection.execute(taking.order_by(*_IN_ORDER)).all()
        journal.note_many(connection, {row.id: "lease expired: taken over" for row in rows}, now, actor)
        return [claimed(row, lock["lock_token"], has_attempt=row.has_attempt) for row in rows]


def give_back(engine: Engine, rows: Mapping[int, Back], now: datetime, actor: str = ACTOR) -> set[int]:
    """Give claimed rows back, each in its own way; an attempt that was never confirmed is abandoned.

    Returns the ids that went back: not those that another worker has taken over, nor those already sent.
    """
    if not rows:
        return set()
    with writing(engine) as connection:
        unsent = abandon_unsent(connection, {row_id: back.token for row_id, back in rows.items()}, now)
        moves = [_backward(row_id, rows[row_id], begun_by) for row_id, begun_by in unsent.items()]
        moved = journal.move_many(connection, moves, now, actor)
        # What is tried again is still the probe of its circuit breaker.
        breakers.release_probes(connection, [each for each in moved if rows[each].to is Status.MANUAL], now)
        return moved


def _backward(row_id: int, back: Back, begun_by: Strategy | None) -> RowMove:
    """Without a new strategy the row gets that of its attempt, which comes from the same classification."""
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
        origin=breakers.place(row.origin_queue, row.origin_exchange, row.origin_key),
        failed_attempts=row.dlq_retry_count,
        next_retry_at=row.next_retry_at,
        body_size=row.body_size,
        has_attempt=has_attempt,
    )
