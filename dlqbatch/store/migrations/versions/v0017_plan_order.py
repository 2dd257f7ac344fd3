"""Messages of a replay plan that have one key go one after the other; an older dlqbatch knows no such plans."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.add_column("dlq_plan_items", sa.Column("order_key", sa.Text))
