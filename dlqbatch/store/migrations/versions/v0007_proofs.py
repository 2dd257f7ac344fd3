"""Whether a retry was acknowledged is proven from what the broker shows of its queue, and what is missing is kept."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0007"
down_revision = "0006"

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")
JSON = JSONB().with_variant(sa.Text(), "sqlite")


def upgrade() -> None:
    op.add_column("dlq_attempts", sa.Column("acknowledged_at", TIME))
    op.add_column("dlq_attempts", sa.Column("proof", sa.Text))
    op.create_table(
        "dlq_queue_readings",
        sa.Column("id", ID, sa.Identity(), primary_key=True),
        sa.Column("queue", sa.Text, nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("counted_from", TIME, nullable=False),
        sa.Column("reading", JSON, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("dlq_queue_readings_by_queue", "dlq_queue_readings", ["queue", "at"])
    op.create_table(
        "dlq_unproven_retries",
        sa.Column("place", sa.Text, primary_key=True),
        sa.Column("retries", sa.Integer, nullable=False),
        sa.Column("sent_at", TIME, nullable=False),
        sa.Column("acknowledged", sa.Boolean, nullable=False),
        sa.Column("missing", sa.Text, nullable=False),
        sa.Column("queue", sa.Text),
        sa.Column("ready", sa.Integer),
        sa.Column("unacknowledged", sa.Integer),
        sa.Column("delayed", sa.Integer),
        sa.Column("consumers", sa.Integer),
        sa.Column("at", TIME, nullable=False),
    )
