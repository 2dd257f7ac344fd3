"""Look for a text in bodies and headers: no index knows them, so that time and rows are bounded, and it can go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, Engine, func, select

from dlqbatch.amqp.masking import LONGEST
from dlqbatch.amqp.packed import unpack
from dlqbatch.amqp.readable import readable
from dlqbatch.logs import masking
from dlqbatch.messages.queries import SUMMARY, Record, page_of
from dlqbatch.messages.shown import masked_record
from dlqbatch.store.bulk import distinct, in_list
from dlqbatch.store.engine import keeping, reading
from dlqbatch.store.field_tables import FIELDS
from dlqbatch.store.filters import Filters, Place
from dlqbatch.store.tables import MESSAGES
from dlqbatch.store.text import key

MOST_ROWS: Final = 50_000
"""The largest number of messages that one call looks at."""
_AT_ONCE: Final = 200
_BYTES_AT_ONCE: Final = 16 * LONGEST
_M: Final = MESSAGES.c


@dataclass(frozen=True, slots=True)
class Searched:
    messages: tuple[Record, ...]
    """The newest first, masked."""
    looked_at: int
    """The number of messages whose bodies and headers were read."""
    back_to: datetime | None
    """The time of the oldest of them."""
    next: str | None
    """What the next call begins after; None: there is nothing behind."""


def search_bodies(
    engine: Engine,
    text: str,
    filters: Filters,
    *,
    limit: int,
    after: str | None = None,
    seconds: float,
    stopped: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> Searched:
    """Messages of which the text is in the body or a header as they are shown: what is masked is not found.

    Upper and lower case are the same. Of a body the first MiB is read.
    """
    place = None if after is None else Place.parse(after)
    ends, looked_at, last = time.monotonic() + seconds, 0, None
    found: list[Record] = []
    with keeping(engine) as kept:
        while True:
            with reading(kept) as connection:
                rows, behind = page_of(connection, SUMMARY, filters, _AT_ONCE, place)
                records = [Record(*row[: len(SUMMARY)]) for row in rows]
                held = _mentioning(connection, records, text)
                for record in records:
                    looked_at, last = looked_at + 1, Place(record.created_at, record.id)
                    if next(held):
                        found.append(masked_record(record))
                        if len(found) >= limit:
                            break
            progress(looked_at, MOST_ROWS)
            place = behind if len(found) < limit else last
            is_over = stopped() or time.monotonic() >= ends or looked_at >= MOST_ROWS or len(found) >= limit
            if place is None or is_over:
                break
    return Searched(tuple(found), looked_at, None if last is None else last.created_at, place and place.token)


def fields_with(engine: Engine, text: str) -> list[str]:
    """The fields that have exactly this value, as they are written after --field."""
    with reading(engine) as connection:
        names = distinct(connection, FIELDS.c.name)
        has = select(FIELDS.c.name).distinct().where(in_list(connection, FIELDS.c.name, names))
        return [f"{name}={text}" for name in connection.scalars(has.where(FIELDS.c.value == key(text)))]


def _mentioning(connection: Connection, records: list[Record], text: str) -> Iterator[bool]:
    """For each record whether its content holds the text; few contents are in memory at once."""
    sought = text.lower()
    batch: list[int] = []
    size = 0
    for number, record in enumerate(records):
        batch.append(record.id)
        size += min(record.body_size, LONGEST)
        if size >= _BYTES_AT_ONCE or number == len(records) - 1:
            head = func.substr(_M.body, 1, LONGEST)
            query = select(_M.id, head, _M.properties).where(in_list(connection, _M.id, batch))
            content = {row_id: (body, properties) for row_id, body, properties in connection.execute(query)}
            yield from (each in content and _holds(sought, *content[each]) for each in batch)
            batch, size = [], 0


_PACKINGS: Final = (b"gzip", b"deflate", b"zlib", b"compress", b"base64")
"""What `content_encoding` may say; most messages hold none of these words, and their properties need not be read."""


def _encoding(properties: bytes) -> object:
    return readable(bytes(properties)).properties.get("content_encoding")


def _holds(sought: str, body: bytes, properties: bytes) -> bool:
    rules = masking()
    wanted = sought.encode("utf-8", "surrogateescape")
    # Most bodies do not hold it: only of the others it is asked whether a mask hides it.
    says_packed = any(word in bytes(properties).lower() for word in _PACKINGS)
    unpacked = unpack(bytes(body), _encoding(properties) if says_packed else None)
    body = unpacked.body
    if wanted in body.lower() or (not sought.isascii() and sought in body.decode("utf-8", "replace").lower()):
        masked = rules.body(body, unpacked.encoding if says_packed else _encoding(properties))
        if sought in masked.decode("utf-8", "surrogateescape").lower():
            return True
    if wanted not in bytes(properties).lower():
        return False
    held = readable(bytes(properties))
    shown = {**rules.fields(held.headers), **rules.fields(held.properties)}
    return any(sought in f"{name} {value}".lower() for name, value in shown.items())
