"""A message can be erased; it is archived then, and no program brings it back, an older one neither."""

from alembic import op

revision = "0016"
down_revision = "0015"

NEVER_LEAVES = "CONSTRAINT dlq_messages_erased CHECK (erased_at IS NULL OR status = 'archived')"


def upgrade() -> None:
    if op.get_context().dialect.name == "sqlite":
        op.execute(f"ALTER TABLE dlq_messages ADD COLUMN erased_at TEXT {NEVER_LEAVES}")
    else:
        op.execute("ALTER TABLE dlq_messages ADD COLUMN erased_at TIMESTAMP WITH TIME ZONE")
        # No row has the column yet: to look at each of them would only hold everybody up.
        op.execute(f"ALTER TABLE dlq_messages ADD {NEVER_LEAVES} NOT VALID")
