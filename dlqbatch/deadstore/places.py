"""Where a row's message may have failed: only what comes back from there speaks for the row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from dlqbatch.deadstore.tables import PLAN_ITEMS, PLANS
from dlqbatch.deadstore.text import key

if TYPE_CHECKING:
    from sqlalchemy import Connection, Row

    from dlqbatch.message.envelope import Origin


def is_elsewhere(connection: Connection, origin: Origin | None, row: Row[*tuple[Any, ...]]) -> bool:
    """The message failed in a place where the row's never was: neither at its origin nor where a plan sent it."""
    queue = key(origin.queue) if origin is not None and origin.queue is not None else None
    exchange = key(origin.exchange) if origin is not None and origin.exchange is not None else None
    if row.origin_queue is not None:
        is_there = queue == row.origin_queue
    else:
        # Behind an exchange alone every queue is its place.
        is_there = exchange == row.origin_exchange and (exchange is not None or queue is None)
    if is_there or queue is None:
        return not is_there
    sent_there = (
        select(PLANS.c.id)
        .join(PLAN_ITEMS, PLAN_ITEMS.c.plan_id == PLANS.c.id)
        .where(PLANS.c.to_queue == queue, PLAN_ITEMS.c.message_id == row.id)
    )
    return connection.scalar(sent_there.limit(1)) is None
