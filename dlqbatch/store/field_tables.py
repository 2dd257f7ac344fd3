"""The table of fields, by which a message is found among millions; and how far fields of older messages are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from sqlalchemy import Column, Connection, ForeignKey, Index, Table, Text, insert, select

from dlqbatch.store.bulk import values_table
from dlqbatch.store.column_types import BIGINT, Name, Time
from dlqbatch.store.tables import metadata

FIELDS: Final = Table(
    "dlq_fields",
    metadata,
    Column("name", Name, primary_key=True),
    Column("value", Name, primary_key=True),
    Column("message_id", BIGINT, ForeignKey("dlq_messages.id", ondelete="CASCADE"), primary_key=True),
)
Index("dlq_fields_by_message", FIELDS.c.message_id)
"""Values are texts as people write them; a long one is cut, and told from its like by its SHA-256."""

BACKFILLS: Final = Table(
    "dlq_field_backfills",
    metadata,
    Column("definition", Text, primary_key=True),
    Column("last_id", BIGINT, nullable=False),
    Column("ended_at", Time),
)
"""How far `db backfill-fields` is, for each set of fields that the settings have described."""


def write_fields(connection: Connection, fields: Mapping[int, Sequence[tuple[str, str]]]) -> None:
    """Insert names and values by message, which has none yet."""
    found = [(name, value, row_id) for row_id, pairs in fields.items() for name, value in pairs]
    if found:
        names, values, row_ids = (list(column) for column in zip(*found, strict=True))
        columns = {FIELDS.c.name: names, FIELDS.c.value: values, FIELDS.c.message_id: row_ids}
        lines = select(*values_table(connection, columns).c)
        connection.execute(insert(FIELDS).from_select([column.name for column in columns], lines))
