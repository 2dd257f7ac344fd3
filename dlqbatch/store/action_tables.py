"""The tables of what people do: their actions, the messages of these, and what they decided about groups."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Boolean, CheckConstraint, Column, ForeignKey, Identity, Index, Integer, Table, Text, text

from dlqbatch.store.column_types import BIGINT, Json, Name, Named, Shown, Time
from dlqbatch.store.states import Status
from dlqbatch.store.tables import metadata, one_of
from dlqbatch.store.text import LONGEST_NOTE

IS_HELD: Final = "held_at IS NOT NULL OR reviving"
ROW_STATES: Final = ("done", "refused", "skipped", "undone")
"""What became of a message in an action."""

ACTIONS: Final = Table(
    "dlq_actions",
    metadata,
    Column("id", BIGINT, Identity(), primary_key=True),
    Column("kind", Text, nullable=False),
    Column("actor", Name, nullable=False),
    Column("verified", Boolean, nullable=False, server_default=text("false")),
    Column("reason", Shown(LONGEST_NOTE), nullable=False),
    Column("filters", Json, nullable=False, server_default=text("'{}'")),
    Column("at", Time, nullable=False),
    Column("ended_at", Time),
    Column("counts", Json, nullable=False, server_default=text("'{}'")),
    Column("details", Json, nullable=False, server_default=text("'{}'")),
    Column("undoes", BIGINT),
    Column("undone_by", BIGINT),
    sqlite_autoincrement=True,
)
"""What people did; without `ended_at` it is under way, or was cut."""

ACTION_ROWS: Final = Table(
    "dlq_action_rows",
    metadata,
    Column("action_id", BIGINT, ForeignKey("dlq_actions.id", ondelete="CASCADE"), primary_key=True),
    Column("message_id", BIGINT, primary_key=True),
    Column("state", Text, nullable=False),
    Column("from_status", Named(Status)),
    Column("to_status", Named(Status)),
    Column("before", Json, nullable=False, server_default=text("'{}'")),
    Column("last_before", BIGINT),
    Column("last_after", BIGINT),
    Column("edit_of", BIGINT),
    Column("reason", Shown(LONGEST_NOTE)),
    CheckConstraint(one_of("state", ROW_STATES), name="dlq_action_rows_state"),
)
Index("dlq_action_rows_by_message", ACTION_ROWS.c.message_id, ACTION_ROWS.c.last_after)
"""The messages of an action; `last_before` and `last_after` are the newest lines of the journal around the change."""

GROUPS: Final = Table(
    "dlq_groups",
    metadata,
    Column("scope_id", Integer, primary_key=True, autoincrement=False, server_default=text("1")),
    Column("fingerprint", Name, primary_key=True),
    Column("queue", Name, primary_key=True, server_default=text("''")),
    Column("held_at", Time),
    Column("held_by", Name),
    Column("held_why", Shown(LONGEST_NOTE)),
    Column("reviving", Boolean, nullable=False, server_default=text("false")),
    Column("note", Shown(LONGEST_NOTE)),
    Column("owner", Name),
    Column("tags", Json, nullable=False, server_default=text("'[]'")),
    Column("acknowledged_at", Time),
    Column("acknowledged_by", Name),
    Column("acknowledged_until", Time),
    Column("acknowledged_more", Integer),
    Column("updated_at", Time, nullable=False),
)
"""What people decided about a group: in one queue, or with an empty name in all of them."""
Index("dlq_groups_held", GROUPS.c.held_at, sqlite_where=text(IS_HELD), postgresql_where=text(IS_HELD))
