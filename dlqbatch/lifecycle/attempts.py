"""One retry from the store: written before its publish, marked after the confirm, closed when its end is known."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Engine, Row, exists, func, literal, or_, select, text, true, update

from dlqbatch.lifecycle import breaker_rows as breakers
from dlqbatch.lifecycle.breaker import Limits
from dlqbatch.store.bulk import in_list, insert_into, values_table
from dlqbatch.store.engine import writing
from dlqbatch.store.scopes import scope_of
from dlqbatch.store.states import Outcome, Strategy
from dlqbatch.store.tables import ATTEMPTS, IS_OPEN, MESSAGES

_M: Final = MESSAGES.c
_A: Final = ATTEMPTS.c
LEASE: Final = timedelta(minutes=5)
LIMITS: Final = Limits()
# The row's open attempt was confirmed: it is under observation.
IS_SENT: Final = exists().where(_A.message_id == _M.id, _A.closed_at.is_(None), _A.sent_at.is_not(None))
# A lease with this part of it left is not renewed: that costs the database as much as the claim did.
_NEARLY_WHOLE: Final = 0.9
# The columns that make an Outgoing, in its order, but for where it goes and its body.
_PUBLISHED: Final = ("identity", "parent", "exchange", "routing_key", "properties")


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A row with an open attempt, and all that publishing it takes."""

    row_id: int
    attempt: int
    to_queue: str | None
    """The queue that a replay has named: it is sent there, and that is its origin from then on."""
    identity: str
    parent: str | None
    exchange: str
    routing_key: str
    properties: bytes
    body: bytes


def begin(
    connection: Connection,
    tokens: Mapping[int, str],
    strategies: Mapping[int, Strategy | None],
    worker: str,
    at: datetime,
    lease: timedelta,
) -> dict[int, int]:
    """Attempt numbers by row id, with a lease that starts anew: publish these rows, and no others, after the commit.

    Left out are rows that another worker has taken over, and rows whose open attempt turned out to be sent. The
    strategy of a row says when to try again if this attempt fails.
    """
    numbers = begin_locked(connection, _owned(connection, tokens), strategies, worker, at)
    for strategy, row_ids in _by(strategies, numbers).items():
        _hold_on(connection, row_ids, strategy, at, lease)
    return numbers


def begin_locked(
    connection: Connection,
    row_ids: Iterable[int],
    strategies: Mapping[int, Strategy | None],
    worker: str,
    at: datetime,
) -> dict[int, int]:
    """As `begin`, for rows of the caller that this transaction has locked; their leases stay."""
    ids = list(row_ids)
    if not ids:
        return {}
    begun = _add(connection, {row_id: strategies[row_id] for row_id in ids}, worker, at)
    if len(begun) < len(ids):
        unsent = select(_A.message_id, _A.number).where(_A.closed_at.is_(None), _A.sent_at.is_(None))
        found = connection.execute(unsent.where(in_list(connection, _A.message_id, set(ids) - begun.keys())))
        begun |= {row.message_id: row.number for row in found}
    return {row_id: begun[row_id] for row_id in ids if row_id in begun}


def _add(
    connection: Connection, strategies: Mapping[int, Strategy | None], worker: str, at: datetime
) -> dict[int, int]:
    """Insert an attempt for each row that has no open one; the numbers by row id."""
    listed = values_table(connection, {_A.message_id: list(strategies), _A.strategy: list(strategies.values())})
    # A subquery for each row: of a table that was empty a moment ago a join would read everything, every time.
    earlier = ATTEMPTS.alias()
    last = select(func.max(earlier.c.number)).where(earlier.c.message_id == listed.c.message_id).scalar_subquery()
    rows = select(
        *(*listed.c, func.coalesce(last, 0) + 1, literal(worker, _A.worker.type), literal(at, _A.created_at.type)),
        literal(scope_of(connection), _A.scope_id.type),
    ).where(true())  # or SQLite takes the ON of the conflict for that of a join
    names = ["message_id", "strategy", "number", "worker", "created_at", "scope_id"]
    adding = insert_into(connection, ATTEMPTS).from_select(names, rows)
    adding = adding.on_conflict_do_nothing(index_elements=[_A.message_id], index_where=text(IS_OPEN))
    found = connection.execute(adding.returning(_A.message_id, _A.number))
    return {row.message_id: row.number for row in found}


def _by(strategies: Mapping[int, Strategy | None], row_ids: Iterable[int]) -> dict[Strategy | None, list[int]]:
    found: defaultdict[Strategy | None, list[int]] = defaultdict(list)
    for row_id in row_ids:
        found[strategies[row_id]].append(row_id)
    return found


def _hold_on(
    connection: Connection, row_ids: Sequence[int], strategy: Strategy | None, at: datetime, lease: timedelta
) -> None:
    """Renew leases, unless a row was claimed a moment ago."""
    is_stale = or_(_M.lease_until.is_(None), _M.lease_until < at + lease * _NEARLY_WHOLE)
    values: dict[str, Any] = {"lease_until": at + lease, "updated_at": at}
    if strategy is not None:
        # A row without a strategy counts as immediate until its outcome is written.
        is_stale = or_(is_stale, func.coalesce(_M.strategy, Strategy.IMMEDIATE) != strategy)
        values["strategy"] = strategy
    connection.execute(update(MESSAGES).where(in_list(connection, _M.id, row_ids), is_stale).values(values))


def content_of(
    connection: Connection,
    numbers: Mapping[int, int],
    to_queue: str | None = None,
    *conditions: ColumnElement[bool],
) -> list[Outgoing]:
    """The rows of `begin` with their bytes, in its order; none if one of the conditions does not hold.

    The caller limits them to what fits in memory.
    """
    columns = [_M.id, _M.moved_to, *(_M[name] for name in _PUBLISHED), _M.body]
    found = connection.execute(select(*columns).where(in_list(connection, _M.id, numbers), *conditions))
    rows: dict[int, tuple[Any, ...]] = {row_id: (to_queue or moved_to, *rest) for row_id, moved_to, *rest in found}
    return [Outgoing(each, number, *rows[each]) for each, number in numbers.items() if each in rows]


def without_bodies(connection: Connection, row_ids: Iterable[int]) -> list[Outgoing]:
    """As an attempt would publish these rows, in this order; without their bodies, since no decision reads them."""
    columns = [_M.id, _M.moved_to, *(_M[name] for name in _PUBLISHED)]
    ids = list(row_ids)
    found = connection.execute(select(*columns).where(in_list(connection, _M.id, ids)))
    rows: dict[int, list[Any]] = {row_id: rest for row_id, *rest in found}
    return [Outgoing(each, 1, *(*rows[each], b"")) for each in ids if each in rows]


def mark_sent(engine: Engine, numbers: Mapping[int, int], at: datetime, limits: Limits = LIMITS) -> None:
    """Mark attempts that the broker has confirmed, by row id; from then on the leases of their rows count for nothing.

    The rows are not written: that would cost more than all else here. It does not matter who holds a row by now: a
    worker that took it over must not send it again. Each attempt counts once for the circuit breaker of its origin;
    `limits` are those of the breakers.
    """
    if not numbers:
        return
    with writing(engine) as connection:
        # Rows before attempts, in the order of their ids, as everywhere: that avoids deadlocks.
        locking = select(_M.id, _M.origin_queue, _M.origin_exchange, _M.origin_key)
        locking = locking.where(in_list(connection, _M.id, numbers)).order_by(_M.id).with_for_update()
        places = {row_id: breakers.place(*origin) for row_id, *origin in connection.execute(locking)}
        marked = confirm(connection, numbers, at)
        origins = (places.get(row.message_id) for row in marked)
        breakers.count_sent(connection, [origin for origin in origins if origin is not None], at, limits)


def confirm(connection: Connection, numbers: Mapping[int, int], at: datetime) -> Sequence[Row[*tuple[Any, ...]]]:
    """Mark these attempts as sent; those that were not marked before. Rows and leases stay as they are."""
    sent = values_table(connection, {_A.message_id: list(numbers), _A.number: list(numbers.values())})
    this = (_A.message_id == sent.c.message_id, _A.number == sent.c.number)
    marking = update(ATTEMPTS).where(*this, _A.sent_at.is_(None)).values(sent_at=at)
    marked = connection.execute(marking.returning(_A.message_id, _A.strategy, _A.closed_at, _A.outcome)).all()
    _take_back(connection, [row.message_id for row in marked if row.outcome == "abandoned"])
    return marked


def _take_back(connection: Connection, row_ids: Sequence[int]) -> None:
    """Open an abandoned last attempt again that was confirmed after all, so that nobody sends another one."""
    if row_ids:
        later = ATTEMPTS.alias()
        is_last = ~exists().where(later.c.message_id == _A.message_id, later.c.number > _A.number)
        mine = (in_list(connection, _A.message_id, row_ids), _A.outcome == "abandoned", _A.sent_at.is_not(None))
        connection.execute(update(ATTEMPTS).where(*mine, is_last).values(closed_at=None, outcome=None))


def close_attempts(
    connection: Connection, numbers: Mapping[int, int], outcome: Outcome, at: datetime, was: Outcome | None = None
) -> set[int]:
    """Close the attempts with these numbers, by row id; the rows whose attempt stood as expected.

    `was` None is an open attempt, an outcome is one that a late return corrects.
    """
    if not numbers:
        return set()
    ended = values_table(connection, {_A.message_id: list(numbers), _A.number: list(numbers.values())})
    these = (_A.message_id == ended.c.message_id, _A.number == ended.c.number)
    # Spelt so that the planner finds an open attempt by its index.
    expected = _A.closed_at.is_(None) if was is None else _A.outcome == was
    closing = update(ATTEMPTS).where(*these, expected).values(outcome=outcome, closed_at=at)
    return set(connection.scalars(closing.returning(_A.message_id)))


def abandon_unsent(connection: Connection, tokens: Mapping[int, str], at: datetime) -> dict[int, Strategy | None]:
    """Close open attempts that were not confirmed; their strategies by row id.

    The result has every row that its token still holds and that was not sent. The number of the attempt is used up: the
    broker may hold the message though its confirm was lost.
    """
    owned = _owned(connection, tokens)
    sent = select(_A.message_id).where(_A.closed_at.is_(None), _A.sent_at.is_not(None))
    is_sent = set(connection.scalars(sent.where(in_list(connection, _A.message_id, owned))))
    rows: dict[int, Strategy | None] = {row_id: None for row_id in owned if row_id not in is_sent}
    if rows:
        is_open = (in_list(connection, _A.message_id, rows), _A.closed_at.is_(None))
        closing = update(ATTEMPTS).where(*is_open).values(outcome="abandoned", closed_at=at)
        found = connection.execute(closing.returning(_A.message_id, _A.strategy))
        rows.update({row.message_id: row.strategy for row in found})
    return rows


def _owned(connection: Connection, tokens: Mapping[int, str]) -> list[int]:
    """The rows that are still their token's, locked."""
    return [row_id for row_id, token in lock(connection, tokens) if token == tokens[row_id]]


def lock(connection: Connection, row_ids: Iterable[int]) -> list[tuple[int, str | None]]:
    locking = select(_M.id, _M.lock_token).where(in_list(connection, _M.id, row_ids)).order_by(_M.id).with_for_update()
    return [(row_id, token) for row_id, token in connection.execute(locking)]
