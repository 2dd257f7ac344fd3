"""Messages that wait for their next retry, by priority.

An index holds them by priority and time. Each query here looks up one priority after the other in it, so that it reads
neither what is not due nor more of what is due than its caller wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from sqlalchemy import CTE, ColumnElement, Connection, Row, ScalarSelect, Select, and_, exists, func, select, text

from dlqbatch.store.scopes import own
from dlqbatch.store.tables import MESSAGES, WAITS_FOR_ITS_TIME

_M: Final = MESSAGES.c


def _waits(connection: Connection) -> ColumnElement[bool]:
    return and_(text(WAITS_FOR_ITS_TIME), own(connection))


def overdue(connection: Connection, rows: Select[Any], now: datetime, limit: int) -> Sequence[Row[*tuple[Any, ...]]]:
    """The first `limit` of these rows whose time has come: highest priority first, then the longest waiting."""
    waits, level = _waits(connection), _priorities(connection)
    has_due = exists().where(waits, _M.priority == level.c.priority, _M.next_retry_at <= now)
    found: list[Row[*tuple[Any, ...]]] = []
    for priority in connection.scalars(select(level.c.priority).where(has_due).order_by(level.c.priority.desc())).all():
        of_it = rows.where(waits, _M.priority == priority, _M.next_retry_at <= now).order_by(_M.next_retry_at)
        found += connection.execute(of_it.limit(limit - len(found))).all()
        if len(found) >= limit:
            break
    return found


def count_overdue(connection: Connection, now: datetime) -> int:
    level = _priorities(connection)
    number = _of(connection, level, func.count(), _M.next_retry_at <= now)
    return int(connection.scalar(select(func.sum(number))) or 0)


def next_time(connection: Connection, now: datetime) -> datetime | None:
    """When the next message becomes due."""
    level = _priorities(connection)
    # By order and limit: for a least value PostgreSQL reads all that wait.
    nearest = _of(connection, level, _M.next_retry_at, _M.next_retry_at > now, first=True)
    found: datetime | None = connection.scalar(select(func.min(nearest)))
    return found


def _of(
    connection: Connection,
    level: CTE,
    what: ColumnElement[Any],
    condition: ColumnElement[bool],
    *,
    first: bool = False,
) -> ScalarSelect[Any]:
    of_it = select(what).where(_waits(connection), _M.priority == level.c.priority, condition)
    of_it = of_it.order_by(what).limit(1) if first else of_it
    return of_it.correlate(level).scalar_subquery()


def _priorities(connection: Connection) -> CTE:
    """The priorities of the messages that wait, found with one look at the index each; the last row is NULL."""
    highest = select(_M.priority).where(_waits(connection)).order_by(_M.priority.desc()).limit(1)
    level = select(highest.scalar_subquery().label("priority")).cte("priorities", recursive=True)
    lower = highest.where(_M.priority < level.c.priority).correlate(level).scalar_subquery()
    return level.union_all(select(lower).where(level.c.priority.is_not(None)))
