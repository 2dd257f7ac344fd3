"""Autovacuum comes while a large table has few dead rows; attempts leave room to be written in place."""

from alembic import op

revision = "0013"
down_revision = "0012"

# By default a fifth of a table: of ten million rows two million have changed before counts read an index alone again.
_OFTEN = (
    "autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.02, "
    "autovacuum_analyze_scale_factor = 0.02"
)
_SETTINGS = {
    "dlq_messages": _OFTEN,
    "dlq_attempts": f"{_OFTEN}, fillfactor = 80",
    "dlq_transitions": _OFTEN,
    "dlq_plan_items": _OFTEN,
    "dlq_breakers": "fillfactor = 50",
}


def upgrade() -> None:
    # Nobody waits for the lock that this takes, neither readers nor writers.
    if op.get_context().dialect.name == "postgresql":
        for table, settings in _SETTINGS.items():
            op.execute(f"ALTER TABLE {table} SET ({settings})")
