"""How far each stream was read: written in the transaction that stores the messages up to there."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Column, Engine, Integer, LargeBinary, Table, select

from dlqbatch.store.column_types import BIGINT, Name, Time
from dlqbatch.store.engine import reading
from dlqbatch.store.scopes import own
from dlqbatch.store.tables import metadata

STREAM_OFFSETS: Final = Table(
    "dlq_stream_offsets",
    metadata,
    Column("scope_id", Integer, primary_key=True, autoincrement=False),
    Column("queue", Name, primary_key=True),
    Column("last_offset", BIGINT, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("life", Integer, nullable=False),
    Column("updated_at", Time, nullable=False),
)
"""`digest` is of the message at `last_offset`; `life` counts how often another stream was found under the name."""


def known_streams(engine: Engine) -> frozenset[str]:
    """The streams that were read: what stands in them says nothing of what is still to be read."""
    with reading(engine) as connection:
        query = select(STREAM_OFFSETS.c.queue).where(own(connection, STREAM_OFFSETS.c.scope_id))
        return frozenset(connection.scalars(query))
