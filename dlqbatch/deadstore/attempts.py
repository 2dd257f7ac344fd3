"""One retry from the store: written before its publish, marked after the confirm, closed when its end is known."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from sqlalchemy import bindparam, case, exists, func, insert, select, update

from dlqbatch.deadstore.engine import writing
from dlqbatch.deadstore.tables import ATTEMPTS, MESSAGES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from sqlalchemy import Connection, Engine

    from dlqbatch.deadstore.record import Outcome
    from dlqbatch.policy.strategy import Strategy

LEASE: Final = timedelta(minutes=5)
IS_SENT: Final = exists().where(
    ATTEMPTS.c.message_id == MESSAGES.c.id, ATTEMPTS.c.closed_at.is_(None), ATTEMPTS.c.sent_at.is_not(None)
)
"""The row's open attempt was confirmed: it is under observation."""


def begin_attempts(
    engine: Engine,
    tokens: Mapping[int, str],
    strategy: Strategy | None,
    worker: str,
    at: datetime,
    lease: timedelta = LEASE,
) -> dict[int, int]:
    """Attempt numbers by row id, committed, with a lease that starts anew: publish these rows and no others.

    Left out are rows that another worker has taken over, and rows whose open attempt turned out to be sent.
    """
    with writing(engine) as connection:
        owned = _owned(connection, tokens)
        numbers: dict[int, int] = {}
        new = []
        for row_id, (last, unsent) in _latest(connection, owned).items():
            numbers[row_id] = unsent or last + 1
            if not unsent:
                new.append({"message_id": row_id, "number": last + 1})
        if new:
            connection.execute(insert(ATTEMPTS).values(strategy=strategy, worker=worker, created_at=at), new)
        if numbers:
            connection.execute(
                update(MESSAGES).where(MESSAGES.c.id.in_(numbers)).values(lease_until=at + lease, updated_at=at)
            )
    return numbers


def mark_sent(engine: Engine, numbers: Mapping[int, int], at: datetime) -> None:
    """The broker has confirmed these attempts, by row id: no state changes, but the lease ends.

    True whoever holds the row by now: a worker that took it over must not send again.
    """
    if not numbers:
        return
    with writing(engine) as connection:
        # Rows before attempts, in one order, as everywhere: nobody waits in a circle.
        _lock(connection, numbers)
        this = (ATTEMPTS.c.message_id == bindparam("_row"), ATTEMPTS.c.number == bindparam("_number"))
        connection.execute(
            update(ATTEMPTS).where(*this, ATTEMPTS.c.sent_at.is_(None)).values(sent_at=at),
            [{"_row": row_id, "_number": number} for row_id, number in numbers.items()],
        )
        ending = update(MESSAGES).where(MESSAGES.c.id.in_(numbers), IS_SENT)
        connection.execute(ending.values(lease_until=None, updated_at=at))


def close_attempt(
    connection: Connection, row_id: int, number: int, outcome: Outcome, at: datetime, was: Outcome | None = None
) -> bool:
    """False if it does not stand as expected: `was` None is open, an outcome is one that a late return corrects."""
    closing = update(ATTEMPTS).where(
        ATTEMPTS.c.message_id == row_id,
        ATTEMPTS.c.number == number,
        ATTEMPTS.c.outcome.is_not_distinct_from(was),
    )
    return connection.execute(closing.values(outcome=outcome, closed_at=at)).rowcount == 1


def abandon_unsent(connection: Connection, tokens: Mapping[int, str], at: datetime) -> list[int]:
    """Close open attempts that no broker confirmed; the ids of the rows that are still their token's and not sent.

    The number is used up: the broker may hold the message though its confirm was lost.
    """
    rows = list(_latest(connection, _owned(connection, tokens)))
    if rows:
        is_open = (ATTEMPTS.c.message_id.in_(rows), ATTEMPTS.c.closed_at.is_(None))
        connection.execute(update(ATTEMPTS).where(*is_open).values(outcome="abandoned", closed_at=at))
    return rows


def _owned(connection: Connection, tokens: Mapping[int, str]) -> list[int]:
    return [row_id for row_id, token in _lock(connection, tokens) if token == tokens[row_id]]


def _lock(connection: Connection, row_ids: Iterable[int]) -> list[tuple[int, str | None]]:
    locking = (
        select(MESSAGES.c.id, MESSAGES.c.lock_token)
        .where(MESSAGES.c.id.in_(list(row_ids)))
        .order_by(MESSAGES.c.id)
        .with_for_update()
    )
    return [(row_id, token) for row_id, token in connection.execute(locking)]


def _latest(connection: Connection, row_ids: list[int]) -> dict[int, tuple[int, int | None]]:
    """By row: its highest number, and that of an open unsent attempt; without rows whose open attempt was sent."""
    is_open = ATTEMPTS.c.closed_at.is_(None)
    found = connection.execute(
        select(
            ATTEMPTS.c.message_id,
            func.max(ATTEMPTS.c.number),
            func.max(case((is_open, ATTEMPTS.c.number))),
            func.max(case((is_open & ATTEMPTS.c.sent_at.is_not(None), ATTEMPTS.c.number))),
        )
        .where(ATTEMPTS.c.message_id.in_(row_ids))
        .group_by(ATTEMPTS.c.message_id)
    )
    latest: dict[int, tuple[int, int | None]] = dict.fromkeys(row_ids, (0, None))
    for row_id, last, open_number, sent_number in found:
        if sent_number is None:
            latest[row_id] = (last, open_number)
        else:
            del latest[row_id]
    return latest
