"""What people decide about groups of equal failures: a hold, a note, an owner, an acknowledgement."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

from dlqbatch.store.migrations.large_tables import is_large

revision = "0012"
down_revision = "0011"

TIME = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")
JSON = JSONB().with_variant(sa.Text(), "sqlite")
HELD = sa.text("held_at IS NOT NULL OR reviving")


def upgrade() -> None:
    op.create_table(
        "dlq_groups",
        sa.Column("scope_id", sa.Integer, primary_key=True, autoincrement=False, server_default=sa.text("1")),
        sa.Column("fingerprint", sa.Text, primary_key=True, nullable=False),
        sa.Column("queue", sa.Text, primary_key=True, nullable=False, server_default=sa.text("''")),
        sa.Column("held_at", TIME),
        sa.Column("held_by", sa.Text),
        sa.Column("held_why", sa.Text),
        sa.Column("reviving", sa.Boolean, nullable=False, server_default=sa.text("false")),
        sa.Column("note", sa.Text),
        sa.Column("owner", sa.Text),
        sa.Column("tags", JSON, nullable=False, server_default=sa.text("'[]'")),
        sa.Column("acknowledged_at", TIME),
        sa.Column("acknowledged_by", sa.Text),
        sa.Column("acknowledged_until", TIME),
        sa.Column("acknowledged_more", sa.Integer),
        sa.Column("updated_at", TIME, nullable=False),
    )
    op.create_index("dlq_groups_held", "dlq_groups", ["held_at"], sqlite_where=HELD, postgresql_where=HELD)
    if not is_large():
        # In this order: whoever reads waits only for the second, which takes no time.
        op.create_index(
            "dlq_messages_by_failure", "dlq_messages", ["status", "fingerprint", "origin_queue", "created_at"]
        )
        op.drop_index("dlq_messages_groups", "dlq_messages")
