"""The policy's table, unless the installation has it already: then it is adopted as it is."""

import sqlalchemy as sa
from alembic import context, op

from dlqbatch.errors import DatabaseUnreadable
from dlqbatch.store.engine import where

revision = "0001"
down_revision = None

TABLE = "dlq_event_config"
COLUMNS = ("id", "name", "max_retries")


def upgrade() -> None:
    if not context.is_offline_mode():
        inspector = sa.inspect(op.get_bind())
        if inspector.has_table(TABLE):
            _check({column["name"] for column in inspector.get_columns(TABLE)})
            return
    op.create_table(
        TABLE,
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("name", sa.String(100), nullable=True),
        sa.Column("max_retries", sa.Integer, nullable=True),
        if_not_exists=True,
    )


def _check(found: set[str]) -> None:
    missing = [name for name in COLUMNS if name not in found]
    if missing:
        raise DatabaseUnreadable(
            where(op.get_bind().engine.url),
            f"the existing table {TABLE} has no column {' and no column '.join(missing)}; "
            "rename that table, or give it the columns id, name and max_retries",
        )
