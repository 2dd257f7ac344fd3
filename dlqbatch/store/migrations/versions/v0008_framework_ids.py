"""What a framework publishes anew, without our headers, is found by the id that it keeps in the body."""

import sqlalchemy as sa
from alembic import op

from dlqbatch.store.migrations.large_tables import is_large

revision = "0008"
down_revision = "0007"

HAS_ONE = sa.text("framework_id IS NOT NULL")


def upgrade() -> None:
    op.add_column("dlq_messages", sa.Column("framework_id", sa.Text))
    op.add_column("dlq_messages", sa.Column("returned_digest", sa.LargeBinary))
    if not is_large():
        op.create_index(
            "dlq_messages_by_framework_id",
            "dlq_messages",
            ["framework_id"],
            sqlite_where=HAS_ONE,
            postgresql_where=HAS_ONE,
        )
