"""The dead store: messages, their attempts and transitions, and the log of runs."""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeEngine

revision = "0002"
down_revision = "0001"

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")
JSON = JSONB().with_variant(sa.Text(), "sqlite")

STATUS = "IN ('archived', 'failed', 'manual', 'pending', 'processing', 'resolved')"
STRATEGY = "strategy IN ('conditional', 'immediate', 'manual', 'scheduled')"
MOVES = (
    "coalesce(from_status, '') || '>' || to_status IN ('>manual', '>pending', 'archived>archived', 'archived>manual', "
    "'failed>archived', 'failed>failed', 'failed>processing', 'manual>archived', 'manual>manual', 'manual>processing', "
    "'pending>pending', 'pending>processing', 'processing>failed', 'processing>manual', 'processing>pending', "
    "'processing>processing', 'processing>resolved', 'resolved>pending', 'resolved>resolved')"
)


def upgrade() -> None:
    _messages()
    _attempts()
    _transitions()
    _runs()


def _messages() -> None:
    op.create_table(
        "dlq_messages",
        _number(),
        _needed("identity", sa.Text),
        _needed("digest", sa.LargeBinary),
        _needed("full_digest", sa.LargeBinary),
        _needed("had_id", sa.Boolean),
        sa.Column("parent", sa.Text),
        _needed("source_queue", sa.Text),
        _needed("exchange", sa.Text),
        _needed("routing_key", sa.Text),
        _needed("body", sa.LargeBinary),
        _needed("properties", sa.LargeBinary),
        sa.Column("message_id", sa.Text),
        sa.Column("origin_queue", sa.Text),
        sa.Column("origin_exchange", sa.Text),
        sa.Column("origin_key", sa.Text),
        sa.Column("event", sa.Text),
        sa.Column("reason", sa.Text),
        sa.Column("error_type", sa.Text),
        sa.Column("error_message", sa.Text),
        sa.Column("error_stack", sa.Text),
        _needed("fingerprint", sa.Text),
        _needed("retry_count", sa.Integer),
        _needed("dlq_retry_count", sa.Integer, "0"),
        _needed("first_failed_at", TIME),
        _needed("last_failed_at", TIME),
        _needed("status", sa.Text),
        _needed("status_since", TIME),
        sa.Column("strategy", sa.Text),
        sa.Column("lock_owner", sa.Text),
        sa.Column("lock_token", sa.Text),
        sa.Column("locked_at", TIME),
        sa.Column("lease_until", TIME),
        sa.Column("next_retry_at", TIME),
        _needed("is_due", sa.Boolean, "false"),
        _needed("priority", sa.SmallInteger, "0"),
        _needed("tags", JSON, "'[]'"),
        sa.Column("source", sa.Text),
        _needed("system_state", JSON, "'{}'"),
        sa.Column("plan_id", ID),
        _needed("possible_duplicate", sa.Boolean, "false"),
        _needed("ack_proven", sa.Boolean, "false"),
        _needed("created_at", TIME),
        _needed("updated_at", TIME),
        sa.UniqueConstraint("identity", name="dlq_messages_identity"),
        sa.CheckConstraint(f"status {STATUS}", name="dlq_messages_status"),
        sa.CheckConstraint(STRATEGY, name="dlq_messages_strategy"),
        sa.CheckConstraint("priority BETWEEN 0 AND 255", name="dlq_messages_priority"),
        sa.CheckConstraint("length(digest) = 32 AND length(full_digest) = 32", name="dlq_messages_digests"),
        sa.CheckConstraint("length(fingerprint) = 16", name="dlq_messages_fingerprint"),
        sa.CheckConstraint("(status = 'processing') = (lock_token IS NOT NULL)", name="dlq_messages_lock"),
        sa.CheckConstraint("lease_until IS NULL OR status = 'processing'", name="dlq_messages_lease"),
        sa.CheckConstraint("status = 'pending' OR NOT is_due", name="dlq_messages_due"),
        sqlite_autoincrement=True,
    )
    _index("dlq_messages_by_parent", "dlq_messages", "parent", where="parent IS NOT NULL")
    _index("dlq_messages_by_time", "dlq_messages", "created_at", "id")
    _index("dlq_messages_by_group", "dlq_messages", "fingerprint", "created_at", "id")
    _index("dlq_messages_by_origin", "dlq_messages", "origin_queue", "created_at", "id")
    _index("dlq_messages_by_event", "dlq_messages", "event", "created_at", "id")
    _index("dlq_messages_by_error", "dlq_messages", "error_type", "created_at", "id")
    _index("dlq_messages_by_status", "dlq_messages", "status", "created_at", "id")
    _index("dlq_messages_by_age_in_status", "dlq_messages", "status", "status_since", "id")
    _index("dlq_messages_groups", "dlq_messages", "status", "fingerprint", "created_at")
    _index("dlq_messages_unproven", "dlq_messages", "full_digest", where="NOT ack_proven")
    _index(
        "dlq_messages_due",
        "dlq_messages",
        "priority DESC",
        "created_at",
        "id",
        where="status = 'pending' AND is_due AND plan_id IS NULL",
    )
    _index(
        "dlq_messages_waiting",
        "dlq_messages",
        "next_retry_at",
        where="status = 'pending' AND NOT is_due AND next_retry_at IS NOT NULL",
    )
    _index(
        "dlq_messages_leases",
        "dlq_messages",
        "lease_until",
        where="status = 'processing' AND lease_until IS NOT NULL",
    )
    _index("dlq_messages_by_plan", "dlq_messages", "plan_id", "id", where="plan_id IS NOT NULL")


def _attempts() -> None:
    op.create_table(
        "dlq_attempts",
        _number(),
        _message(),
        _needed("number", sa.Integer),
        sa.Column("strategy", sa.Text),
        _needed("worker", sa.Text),
        _needed("created_at", TIME),
        sa.Column("sent_at", TIME),
        sa.Column("closed_at", TIME),
        sa.Column("outcome", sa.Text),
        sa.UniqueConstraint("message_id", "number", name="dlq_attempts_number"),
        sa.CheckConstraint("number > 0", name="dlq_attempts_from_one"),
        sa.CheckConstraint(STRATEGY, name="dlq_attempts_strategy"),
        sa.CheckConstraint("outcome IN ('abandoned', 'failed', 'succeeded')", name="dlq_attempts_outcome"),
        sa.CheckConstraint("(outcome IS NULL) = (closed_at IS NULL)", name="dlq_attempts_closed"),
        sqlite_autoincrement=True,
    )
    _index("dlq_attempts_open", "dlq_attempts", "message_id", where="closed_at IS NULL", unique=True)
    _index("dlq_attempts_observed", "dlq_attempts", "sent_at", where="closed_at IS NULL AND sent_at IS NOT NULL")
    _index("dlq_attempts_recent", "dlq_attempts", "closed_at", where="closed_at IS NOT NULL")


def _transitions() -> None:
    op.create_table(
        "dlq_transitions",
        _number(),
        _message(),
        sa.Column("from_status", sa.Text),
        _needed("to_status", sa.Text),
        _needed("at", TIME),
        _needed("actor", sa.Text),
        _needed("reason", sa.Text),
        sa.CheckConstraint(MOVES, name="dlq_transitions_moves"),
        sqlite_autoincrement=True,
    )
    _index("dlq_transitions_by_message", "dlq_transitions", "message_id", "id")
    _index("dlq_transitions_by_time", "dlq_transitions", "at", "to_status")


def _runs() -> None:
    op.create_table(
        "dlq_runs",
        _number(),
        _needed("job", sa.Text),
        _needed("started_at", TIME),
        _needed("ended_at", TIME),
        _needed("outcome", sa.Text),
        _needed("stopped_by", sa.Text),
        _needed("emptied", JSON),
        _needed("report", JSON),
        sqlite_autoincrement=True,
    )
    _index("dlq_runs_by_job", "dlq_runs", "job", "started_at")
    _index("dlq_runs_by_time", "dlq_runs", "started_at")


def _number() -> sa.Column[int]:
    return sa.Column("id", ID, sa.Identity(), primary_key=True)


def _message() -> sa.Column[int]:
    return sa.Column("message_id", ID, sa.ForeignKey("dlq_messages.id", ondelete="CASCADE"), nullable=False)


def _needed(name: str, kind: type[TypeEngine[Any]] | TypeEngine[Any], default: str | None = None) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False, server_default=None if default is None else sa.text(default))


def _index(name: str, table: str, *columns: str, where: str | None = None, unique: bool = False) -> None:
    condition = None if where is None else sa.text(where)
    op.create_index(
        name,
        table,
        [sa.text(column) for column in columns],
        unique=unique,
        sqlite_where=condition,
        postgresql_where=condition,
    )
