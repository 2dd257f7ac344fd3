"""What a replay plan has sent keeps its plan and its lease until it comes to rest; the indexes tell it apart."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

IS_PLANNED = sa.text("plan_id IS NOT NULL")
HAS_LEASE = sa.text("status = 'processing' AND lease_until IS NOT NULL AND plan_id IS NULL")


def upgrade() -> None:
    for name, columns, condition in (
        ("dlq_messages_leases", ["lease_until"], HAS_LEASE),
        ("dlq_messages_by_plan", ["plan_id", "status", "id"], IS_PLANNED),
    ):
        op.drop_index(name, "dlq_messages")
        op.create_index(name, "dlq_messages", columns, sqlite_where=condition, postgresql_where=condition)
