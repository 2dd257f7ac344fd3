"""Several deployments share one database: what belongs to one of them names its scope."""

import sqlalchemy as sa
from alembic import op

from dlqbatch.store.migrations.large_tables import is_large

revision = "0014"
down_revision = "0013"

TIME = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")
# All that was there, and what an older dlqbatch adds until it is replaced, belongs to the first scope. For such a
# default PostgreSQL writes no row.
FIRST = "1"
SCOPED = ("dlq_messages", "dlq_attempts", "dlq_transitions", "dlq_plans", "dlq_alerts", "dlq_queue_readings")
ACTIVE = "resolved_at IS NULL"


def upgrade() -> None:
    op.create_table(
        "dlq_scopes",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("since", TIME, nullable=False),
        sa.UniqueConstraint("name", name="dlq_scopes_name"),
    )
    for table in SCOPED:
        op.add_column(table, sa.Column("scope_id", sa.Integer, nullable=False, server_default=sa.text(FIRST)))
    op.add_column("dlq_runs", sa.Column("scope", sa.Text))
    _breakers()
    _unproven()
    _partial("dlq_alerts_scope_active", "dlq_alerts", ["scope_id", "name", "subject"], ACTIVE, unique=True)
    op.drop_index("dlq_alerts_active", "dlq_alerts")
    if not is_large():
        _indexes()


def _indexes() -> None:
    due = "status = 'pending' AND is_due AND plan_id IS NULL"
    waits = "status = 'pending' AND NOT is_due AND next_retry_at IS NOT NULL AND plan_id IS NULL"
    has_lease = "status = 'processing' AND lease_until IS NOT NULL AND plan_id IS NULL"
    observed = "closed_at IS NULL AND sent_at IS NOT NULL"
    messages, first = "dlq_messages", sa.text("priority DESC")
    _partial("dlq_messages_scope_due", messages, ["scope_id", first, "created_at", "id"], due)
    _partial("dlq_messages_scope_overdue", messages, ["scope_id", first, "next_retry_at"], waits)
    _partial("dlq_messages_scope_leases", messages, ["scope_id", "lease_until"], has_lease)
    op.create_index("dlq_messages_scope_ages", messages, ["scope_id", "status", "status_since", "id"])
    failures = ["scope_id", "status", "fingerprint", "origin_queue", "created_at"]
    op.create_index("dlq_messages_scope_failures", messages, failures)
    _partial("dlq_attempts_scope_observed", "dlq_attempts", ["scope_id", "sent_at"], observed)
    for name in ("due", "overdue", "leases", "by_age_in_status", "by_failure"):
        op.drop_index(f"dlq_messages_{name}", messages)
    op.drop_index("dlq_attempts_observed", "dlq_attempts")


def _partial(name: str, table: str, columns: list[str | sa.TextClause], where: str, *, unique: bool = False) -> None:
    condition = sa.text(where)
    op.create_index(name, table, columns, unique=unique, sqlite_where=condition, postgresql_where=condition)


def _breakers() -> None:
    """A new table: an older dlqbatch goes on with its own, whose key is the origin alone."""
    op.create_table(
        "dlq_scope_breakers",
        sa.Column("scope_id", sa.Integer, primary_key=True, autoincrement=False, server_default=sa.text(FIRST)),
        sa.Column("origin", sa.Text, primary_key=True),
        sa.Column("phase", sa.Text, nullable=False),
        sa.Column("since", TIME),
        sa.Column("probe", sa.Text),
        sa.Column("counted_from", TIME),
        sa.Column("sent", sa.Integer, nullable=False),
        sa.Column("failed", sa.Integer, nullable=False),
        sa.Column("sent_before", sa.Integer, nullable=False),
        sa.Column("failed_before", sa.Integer, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
        sa.CheckConstraint("phase IN ('closed', 'half-open', 'open')", name="dlq_scope_breakers_phase"),
    )
    columns = "origin, phase, since, probe, counted_from, sent, failed, sent_before, failed_before, updated_at"
    if op.get_context().dialect.name == "postgresql":
        op.execute("ALTER TABLE dlq_scope_breakers SET (fillfactor = 50)")
    copying = f"INSERT INTO dlq_scope_breakers (scope_id, {columns}) SELECT {FIRST}, {columns} FROM dlq_breakers"  # noqa: S608
    op.execute(copying)


def _unproven() -> None:
    """As the breakers; each run of the lifecycle writes it anew."""
    op.create_table(
        "dlq_scope_unproven",
        sa.Column("scope_id", sa.Integer, primary_key=True, autoincrement=False, server_default=sa.text(FIRST)),
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
