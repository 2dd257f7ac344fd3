"""A publisher, a tag, an edit, and the number of arrivals are found without a look at all messages."""

import sqlalchemy as sa
from alembic import op

from dlqbatch.store.migrations.large_tables import is_large

revision = "0020"
down_revision = "0019"

INDEXES = {
    "dlq_messages_by_source": ("dlq_messages", ["source", "created_at", "id"], "source IS NOT NULL"),
    "dlq_messages_with_tags": ("dlq_messages", ["tags"], "tags <> '[]'"),
    "dlq_transitions_arrivals": (
        "dlq_transitions",
        ["scope_id", "at"],
        "from_status IS NULL AND actor = 'ingest'",
    ),
    "dlq_transitions_edits": (
        "dlq_transitions",
        ["message_id"],
        "from_status IS NULL AND substr(reason, 1, 19) = 'an edit of message '",
    ),
}


def upgrade() -> None:
    if is_large():
        return
    for name, (table, columns, condition) in INDEXES.items():
        where = sa.text(condition)
        kind = "gin" if name == "dlq_messages_with_tags" else "btree"
        op.create_index(name, table, columns, sqlite_where=where, postgresql_where=where, postgresql_using=kind)
