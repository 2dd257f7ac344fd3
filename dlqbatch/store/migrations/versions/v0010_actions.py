"""What people do is an action with its messages, which can be undone: each goes back to the state that it had."""

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0010"
down_revision = "0009"

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")
JSON = JSONB().with_variant(sa.Text(), "sqlite")
EMPTY = sa.text("'{}'")
STATES = ("archived", "failed", "manual", "pending", "processing", "resolved")
MOVES = (
    "coalesce(from_status, '') || '>' || to_status IN ("
    "'>manual', '>pending', 'archived>archived', 'archived>failed', 'archived>manual', 'archived>pending', "
    "'failed>archived', 'failed>failed', 'failed>processing', "
    "'manual>archived', 'manual>manual', 'manual>processing', "
    "'pending>pending', 'pending>processing', "
    "'processing>failed', 'processing>manual', 'processing>pending', 'processing>processing', 'processing>resolved', "
    "'resolved>pending', 'resolved>resolved')"
)


def upgrade() -> None:
    op.create_table(
        "dlq_actions",
        sa.Column("id", ID, sa.Identity(), primary_key=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("verified", sa.Boolean, nullable=False, server_default=sa.text("false")),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("filters", JSON, nullable=False, server_default=EMPTY),
        sa.Column("at", TIME, nullable=False),
        sa.Column("ended_at", TIME),
        sa.Column("counts", JSON, nullable=False, server_default=EMPTY),
        sa.Column("details", JSON, nullable=False, server_default=EMPTY),
        sa.Column("undoes", ID),
        sa.Column("undone_by", ID),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "dlq_action_rows",
        sa.Column(
            "action_id", ID, sa.ForeignKey("dlq_actions.id", ondelete="CASCADE"), primary_key=True, nullable=False
        ),
        sa.Column("message_id", ID, primary_key=True, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("from_status", sa.Text),
        sa.Column("to_status", sa.Text),
        sa.Column("before", JSON, nullable=False, server_default=EMPTY),
        sa.Column("last_before", ID),
        sa.Column("last_after", ID),
        sa.Column("edit_of", ID),
        sa.Column("reason", sa.Text),
        sa.CheckConstraint("state IN ('done', 'refused', 'skipped', 'undone')", name="dlq_action_rows_state"),
    )
    op.create_index("dlq_action_rows_by_message", "dlq_action_rows", ["message_id", "last_after"])
    if context.get_context().dialect.name == "postgresql":
        # Every row met the narrower condition, so that none has to be read while others wait for the table.
        op.execute("ALTER TABLE dlq_transitions DROP CONSTRAINT dlq_transitions_moves")
        op.execute(f"ALTER TABLE dlq_transitions ADD CONSTRAINT dlq_transitions_moves CHECK ({MOVES}) NOT VALID")
    else:
        _copy_transitions()


def _copy_transitions() -> None:
    """SQLite changes no condition of a table that is there."""
    op.create_table(
        "dlq_transitions_new",
        sa.Column("id", ID, sa.Identity(), primary_key=True),
        sa.Column("message_id", ID, sa.ForeignKey("dlq_messages.id", ondelete="CASCADE"), nullable=False),
        sa.Column("from_status", sa.Text),
        sa.Column("to_status", sa.Text, nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.CheckConstraint(MOVES, name="dlq_transitions_moves"),
        sqlite_autoincrement=True,
    )
    op.execute(
        "INSERT INTO dlq_transitions_new (id, message_id, from_status, to_status, at, actor, reason) "
        "SELECT id, message_id, from_status, to_status, at, actor, reason FROM dlq_transitions"
    )
    op.drop_table("dlq_transitions")
    op.rename_table("dlq_transitions_new", "dlq_transitions")
    op.create_index("dlq_transitions_by_message", "dlq_transitions", ["message_id", "id"])
    op.create_index("dlq_transitions_by_time", "dlq_transitions", ["at", "to_status"])
