"""Who may see content unmasked: on PostgreSQL whoever may insert into this view of the journal."""

from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    if op.get_context().dialect.name == "postgresql":
        op.execute(
            "CREATE VIEW dlq_reveals AS SELECT message_id, from_status, to_status, at, actor, reason "
            "FROM dlq_transitions WHERE from_status = to_status AND starts_with(reason, 'shown unmasked: ') "
            "WITH CHECK OPTION"
        )
