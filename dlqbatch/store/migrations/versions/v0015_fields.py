"""Fields of messages, such as an order's number, are found by an index."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")


HAS_ONE = sa.text("message_id IS NOT NULL")


def upgrade() -> None:
    if not _is_large():
        op.create_index(
            "dlq_messages_by_message_id",
            "dlq_messages",
            ["message_id"],
            sqlite_where=HAS_ONE,
            postgresql_where=HAS_ONE,
        )
    op.create_table(
        "dlq_fields",
        sa.Column("name", sa.Text, primary_key=True, nullable=False),
        sa.Column("value", sa.Text, primary_key=True, nullable=False),
        sa.Column(
            "message_id", ID, sa.ForeignKey("dlq_messages.id", ondelete="CASCADE"), primary_key=True, nullable=False
        ),
    )
    op.create_index("dlq_fields_by_message", "dlq_fields", ["message_id"])
    op.create_table(
        "dlq_field_backfills",
        sa.Column("definition", sa.Text, primary_key=True, nullable=False),
        sa.Column("last_id", ID, nullable=False),
        sa.Column("ended_at", TIME),
    )


def _is_large() -> bool:
    """Whether `db upgrade` builds the index afterwards, while jobs go on (dlqbatch/store/indexes.py)."""
    if op.get_context().as_sql or op.get_bind().dialect.name != "postgresql":
        return False
    return op.get_bind().scalar(sa.text("SELECT id FROM dlq_messages LIMIT 1")) is not None
