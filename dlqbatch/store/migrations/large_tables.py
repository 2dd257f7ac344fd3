"""Whether a migration leaves the indexes of the messages to what follows it, because their building takes minutes."""

import sqlalchemy as sa
from alembic import op


def is_large() -> bool:
    """`db upgrade` builds the indexes afterwards then, one by one, while jobs go on (dlqbatch/store/indexes.py)."""
    if op.get_context().as_sql or op.get_bind().dialect.name != "postgresql":
        return False
    return op.get_bind().scalar(sa.text("SELECT id FROM dlq_messages LIMIT 1")) is not None
