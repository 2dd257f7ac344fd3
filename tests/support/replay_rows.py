"""Dead messages that can be replayed: rows with the bytes a broker delivered, and a queue that they failed in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import rawamqp
from dead_rows import NOW, row
from sqlalchemy import func, select, update

from dlqbatch.lifecycle import attempts
from dlqbatch.store import journal as states
from dlqbatch.store.engine import writing
from dlqbatch.store.states import Status
from dlqbatch.store.tables import ATTEMPTS, MESSAGES

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from sqlalchemy import Engine

ORIGIN = "work.orders"


def dead(number: int, queue: str = ORIGIN, key: str = "orders.created", **columns: Any) -> dict[str, Any]:
    """The message whose body is this number."""
    headers = [
        (b"dlqbatch-id", rawamqp.text(f"m-{number}")),
        (b"dlqbatch-retries", rawamqp.number(3)),
        (b"dlqbatch-origin-queue", rawamqp.text(queue)),
        (b"dlqbatch-origin-exchange", rawamqp.text("")),
        (b"dlqbatch-origin-key", rawamqp.text(key)),
        (b"shop", rawamqp.text("kept")),
    ]
    return row(
        identity=f"m-{number}",
        body=b"%d" % number,
        properties=rawamqp.properties(headers, delivery_mode=2, content_type=b"text/plain"),
        origin_queue=queue,
        origin_exchange="",
        origin_key=key,
        event=key,
        error_type="TIMEOUT_ERROR",
        **columns,
    )


def fill(engine: Engine, numbers: Iterable[int], **columns: Any) -> list[int]:
    """Rows for these numbers, in the order of their ids."""
    rows = [dead(number, **columns) for number in numbers]
    found: list[int] = []
    for start in range(0, len(rows), 1000):
        with writing(engine) as connection:
            found += states.arrive(connection, rows[start : start + 1000], NOW, "ingest", "test").values()
    return sorted(found)


def come_back(engine: Engine, number: int, at: datetime, *, failed: bool) -> None:
    """What ingest or the lifecycle finds out of so many open attempts."""
    with writing(engine) as connection:
        is_open = (ATTEMPTS.c.closed_at.is_(None), ATTEMPTS.c.sent_at.is_not(None))
        some = connection.execute(
            select(ATTEMPTS.c.message_id, MESSAGES.c.lock_token)
            .select_from(ATTEMPTS.join(MESSAGES, MESSAGES.c.id == ATTEMPTS.c.message_id))
            .where(*is_open)
            .order_by(ATTEMPTS.c.message_id)
            .limit(number)
        ).all()
        assert len(some) == number
        ids = [row_id for row_id, _ in some]
        closing = update(ATTEMPTS).where(ATTEMPTS.c.message_id.in_(ids), *is_open)
        connection.execute(closing.values(outcome="failed" if failed else "succeeded", closed_at=at))
        to = Status.MANUAL if failed else Status.RESOLVED
        moves = [states.RowMove(row_id, Status.PROCESSING, to, token, "test") for row_id, token in some]
        assert len(states.move_many(connection, moves, at, "lifecycle")) == number


def end_leases(engine: Engine, now: datetime) -> int:
    """As if the time had passed; says how many rows were held."""
    with writing(engine) as connection:
        held = (MESSAGES.c.status == "processing", MESSAGES.c.lease_until.is_not(None), ~attempts.IS_SENT)
        number = connection.scalar(select(func.count()).select_from(MESSAGES).where(*held))
        connection.execute(update(MESSAGES).where(*held).values(lease_until=now))
    return int(number or 0)
