"""Read the fields of messages that were in the dead store before their fields were described, batch by batch."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, Engine, case, delete, func, literal, select
from sqlalchemy.dialects import postgresql, sqlite

from dlqbatch.amqp.fields import LARGEST_READ, Fields
from dlqbatch.store.access import StoreClock
from dlqbatch.store.bulk import in_list
from dlqbatch.store.engine import keeping, reading, writing
from dlqbatch.store.field_tables import BACKFILLS, FIELDS, write_fields
from dlqbatch.store.tables import MESSAGES

AT_ONCE: Final = 200
"""Messages of one transaction, in which nobody else changes them."""
_M: Final = MESSAGES.c
_B: Final = BACKFILLS.c


@dataclass(frozen=True, slots=True)
class Backfilled:
    messages: int
    """The messages that this call has read."""
    last_id: int
    """Messages up to this number have their fields."""
    newest_id: int
    is_complete: bool


def backfill(
    engine: Engine,
    fields: Fields,
    *,
    seconds: float,
    again: bool = False,
    stopped: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> Backfilled:
    """Go on where the last call for the same fields ended, or begin again; every batch is committed.

    Jobs may run beside it: what they store has its fields already.
    """
    definition = hashlib.sha256(json.dumps(sorted(fields.places.items())).encode()).hexdigest()
    ends, done, clock = time.monotonic() + seconds, 0, StoreClock(engine)
    with keeping(engine) as kept:
        with reading(kept) as connection:
            newest = int(connection.scalar(select(func.max(_M.id))) or 0)
            last = int(connection.scalar(select(_B.last_id).where(_B.definition == definition)) or 0)
        last = 0 if again else last
        while last < newest and not stopped() and (time.monotonic() < ends or not done):
            with writing(kept) as connection:
                ids = _batch(connection, fields, last)
                last = ids[-1] if ids else newest
                done += len(ids)
                _note(connection, definition, last, clock() if last >= newest else None)
            progress(done, newest)
    return Backfilled(done, last, newest, last >= newest)


def _batch(connection: Connection, fields: Fields, after: int) -> list[int]:
    """The numbers of the next messages, whose fields are written anew."""
    body = case((func.length(_M.body) <= LARGEST_READ, _M.body), else_=literal(b""))
    query = select(_M.id, body, _M.properties).where(_M.id > after).order_by(_M.id).limit(AT_ONCE)
    rows = connection.execute(query.with_for_update(key_share=True)).all()
    ids = [row.id for row in rows]
    if ids:
        connection.execute(delete(FIELDS).where(in_list(connection, FIELDS.c.message_id, ids)))
    write_fields(connection, {row_id: fields.read(content, properties) for row_id, content, properties in rows})
    return ids


def _note(connection: Connection, definition: str, last: int, ended: datetime | None) -> None:
    adding = (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(BACKFILLS)
    values = {"last_id": last, "ended_at": ended}
    line = adding.values(definition=definition, **values)
    connection.execute(line.on_conflict_do_update(index_elements=[_B.definition], set_=values))
