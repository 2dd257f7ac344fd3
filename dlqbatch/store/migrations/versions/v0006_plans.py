"""What a plan has reserved waits for no time of its own; the queue that a replay has named is a message's origin."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

WAITS = sa.text("status = 'pending' AND NOT is_due AND next_retry_at IS NOT NULL AND plan_id IS NULL")


def upgrade() -> None:
    op.add_column("dlq_messages", sa.Column("moved_to", sa.Text))
    op.drop_index("dlq_messages_waiting", "dlq_messages")
    op.create_index(
        "dlq_messages_waiting", "dlq_messages", ["next_retry_at"], sqlite_where=WAITS, postgresql_where=WAITS
    )
