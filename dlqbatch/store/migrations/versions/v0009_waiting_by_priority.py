"""What waits for its time is found by priority first, so that priority holds across a backlog of any length."""

import sqlalchemy as sa
from alembic import op

from dlqbatch.store.migrations.large_tables import is_large

revision = "0009"
down_revision = "0008"

WAITS = sa.text("status = 'pending' AND NOT is_due AND next_retry_at IS NOT NULL AND plan_id IS NULL")


def upgrade() -> None:
    if is_large():
        return
    # In this order: whoever reads waits only for the second, which takes no time.
    op.create_index(
        "dlq_messages_overdue",
        "dlq_messages",
        [sa.text("priority DESC"), "next_retry_at"],
        sqlite_where=WAITS,
        postgresql_where=WAITS,
    )
    op.drop_index("dlq_messages_waiting", "dlq_messages")
