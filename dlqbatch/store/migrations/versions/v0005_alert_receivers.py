"""What each receiver of alerts was told; when the monitor counted last."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "dlq_alert_receivers",
        sa.Column(
            "alert_id", ID, sa.ForeignKey("dlq_alerts.id", ondelete="CASCADE"), primary_key=True, autoincrement=False
        ),
        sa.Column("receiver", sa.Text, primary_key=True),
        sa.Column("told", sa.Text),
        sa.Column("told_at", TIME),
        sa.Column("tries", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("next_try_at", TIME, nullable=False),
        sa.Column("telling_until", TIME),
        sa.CheckConstraint("told IN ('fired', 'resolved')", name="dlq_alert_receivers_told"),
    )
    op.create_table(
        "dlq_looks",
        sa.Column("figure", sa.Text, primary_key=True),
        sa.Column("at", TIME, nullable=False),
        sa.Column("counted", sa.Integer, nullable=False),
    )
