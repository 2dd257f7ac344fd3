"""A stream keeps what is read from it; how far it was read is kept here."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"

BIGINT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "dlq_stream_offsets",
        sa.Column("scope_id", sa.Integer, primary_key=True, nullable=False, autoincrement=False),
        sa.Column("queue", sa.Text, primary_key=True, nullable=False),
        sa.Column("last_offset", BIGINT, nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("life", sa.Integer, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
    )
