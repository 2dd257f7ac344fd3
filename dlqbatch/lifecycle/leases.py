"""Who works on which row: due rows are claimed under a lease, an expired lease is taken over, a claim is given back."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Engine, Row, Select, and_, exists, func, or_, select, text, update

from dlqbatch.lifecycle import breaker_rows as breakers
from dlqbatch.lifecycle.attempts import IS_SENT, LEASE, abandon_unsent
from dlqbatch.lifecycle.rules import LONGEST_SEARCHED
from dlqbatch.lifecycle.strategy import Back, Claimed
from dlqbatch.store import holds, journal
from dlqbatch.store.bulk import in_list
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.journal import RowMove
from dlqbatch.store.reservation import begun
from dlqbatch.store.scopes import own
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
_ORDERED: Final[tuple[ColumnElement[Any], ...]] = (_M.id, _M.priority, _M.created_at)
_IN_ORDER: Final = (_M.priority.desc(), _M.created_at, _M.id)
HAS_ATTEMPT: Final = exists().where(ATTEMPTS.c.message_id == _M.id, ATTEMPTS.c.closed_at.is_(None)).label("has_attempt")
_LOOKED_AT: Final = 1_000
"""How many due rows a claim looks at; age counts only among them."""
_SENT_AT_ONCE: Final = 5_000
"""Leases of sent rows that one run removes: as many as a run sends by default."""


HoldBack = Callable[[Connection, Sequence[Row[*tuple[Any, ...]]], datetime], set[int]]
"""Puts off rows that have become due, and returns the ids of these: nobody claims them."""


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
    lock = _lock(owner, now, lease)
    while True:
        with writing(engine) as connection:
            for group in holds.lifted(connection):
                holds.revive(connection, group.fingerprint, group.queue, now)
            found, is_more = _take_due(connection, now, limit, hold_back)
            moves = [RowMove(row.id, Status.PENDING, Status.PROCESSING, None, reason, lock) for row in found]
            journal.move_locked(connection, moves, now, ACTOR)
        if found or not is_more:
            return [claimed(row, lock["lock_token"]) for row in found]


def _take_due(
    connection: Connection, now: datetime, limit: int, hold_back: HoldBack | None
) -> tuple[list[Row[*tuple[Any, ...]]], bool]:
    """Due rows, locked; and whether more may be due, because what was looked at is of groups that are on hold."""
    found: list[Row[*tuple[Any, ...]]] = []
    parked: set[int] = set()
    put_off: set[int] = set()
    ids = [row.id for row in _next(connection, select(*_ORDERED), now, _LOOKED_AT)]
    # Of what waits behind a breaker one row is let through as the probe, each time that they are held back.
    while ids and len(found) < limit and not put_off:
        some, ids = ids[: limit - len(found)], ids[limit - len(found) :]
        rows = _still_due(connection, some, now)
        parked |= holds.park(connection, rows, now)
        rows = [row for row in rows if row.id not in parked]
        put_off = hold_back(connection, rows, now) if hold_back is not None else set()
        found += [row for row in rows if row.id not in put_off]
    if not found and not put_off and not parked:
        # Other workers hold all of these: what is due behind them is free.
        free = overdue(connection, select(_M.id).with_for_update(skip_locked=True), now, limit)
        rows = _still_due(connection, [row.id for row in free], now)
        parked = holds.park(connection, rows, now)
        found = [row for row in rows if row.id not in parked]
    return found, bool(parked)


def _next(connection: Connection, rows: Select[Any], now: datetime, limit: int) -> list[Row[*tuple[Any, ...]]]:
    """The first of these rows, whose columns begin with _ORDERED, in the order in which they are claimed."""
    # An older dlqbatch, which may run beside this one, marks the rows that it is about to claim.
    marked = connection.execute(rows.where(text(IS_DUE), own(connection)).order_by(*_IN_ORDER).limit(limit)).all()
    found = [*marked, *overdue(connection, rows, now, limit)]
    return sorted(found, key=lambda row: (-row.priority, row.created_at, row.id))[:limit]


def _still_due(connection: Connection, row_ids: Sequence[int], now: datetime) -> list[Row[*tuple[Any, ...]]]:
    """Lock those of the rows that nobody has taken, locked or reserved meanwhile; in the order of their ids' list."""
    is_free = (_M.status == Status.PENDING, _M.plan_id.is_(None), or_(_M.is_due, _M.next_retry_at <= now))
    locking = select(*CLAIMED, _M.strategy).where(in_list(connection, _M.id, row_ids), *is_free)
    rows = {row.id: row for row in connection.execute(locking.with_for_update(skip_locked=True))}
    return [rows[row_id] for row_id in row_ids if row_id in rows]


def due(engine: Engine, limit: int, now: datetime) -> list[Claimed]:
    """The rows that a run would claim, in its order: expired leases first, then what is due."""
    expired = (text(HAS_LEASE), _M.lease_until < now, ~IS_SENT)
    rows = select(*_ORDERED, *CLAIMED[1:], HAS_ATTEMPT)
    with reading(engine) as connection:
        rows = rows.where(own(connection), holds.not_on_hold(connection))
        taken_over = connection.execute(rows.where(*expired).order_by(_M.lease_until).limit(limit)).all()
        in_order = _next(connection, rows, now, limit)
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
        is_over = and_(_M.lease_until < now, holds.not_on_hold(connection))
        expired = select(_M.id).where(text(HAS_LEASE), own(connection), is_over, ~IS_SENT)
        if plan_id is not None:
            # By its items: what it has sent keeps its lease, which counts for nothing.
            is_its = in_list(connection, _M.id, begun(connection, plan_id))
            held = (_M.plan_id == plan_id, _M.status == Status.PROCESSING)
            expired = select(_M.id).where(own(connection), is_its, *held, is_over)
        expired = expired.order_by(_M.lease_until).limit(limit)
        ids = connection.scalars(expired.with_for_update(skip_locked=True, of=MESSAGES)).all()
        if not ids:
            if plan_id is None:
                _remove_sent_leases(connection, now)
            return []
        mine = in_list(connection, _M.id, ids)
        lock = _lock(owner, now, lease)
        # Asked again now that the rows are locked: a confirm is marked with its row locked, and may have been faster.
        connection.execute(update(MESSAGES).where(mine, IS_SENT).values(lease_until=None))
        connection.execute(update(MESSAGES).where(mine, ~IS_SENT).values(lock))
        taking = select(*CLAIMED, HAS_ATTEMPT).where(mine, _M.lease_until.is_not(None))
        rows = connection.execute(taking.order_by(*_IN_ORDER)).all()
        journal.note_many(connection, {row.id: "lease expired: taken over" for row in rows}, now, actor)
        return [claimed(row, lock["lock_token"], has_attempt=row.has_attempt) for row in rows]


def _remove_sent_leases(connection: Connection, now: datetime) -> None:
    """Leases that are over and whose row was sent count for nothing; without them nobody reads past their rows.

    A row that comes to rest before its lease is over, as most do, was never written for that.
    """
    over = select(_M.id).where(text(HAS_LEASE), own(connection), _M.lease_until < now, IS_SENT).limit(_SENT_AT_ONCE)
    if ids := connection.scalars(over.with_for_update(skip_locked=True)).all():
        connection.execute(update(MESSAGES).where(in_list(connection, _M.id, ids)).values(lease_until=None))


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
