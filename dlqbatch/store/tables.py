"""The tables of the dead store as queries see them; a test holds them equal to what the migrations make."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    Float,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    TextClause,
    UniqueConstraint,
    text,
)

from dlqbatch.store.column_types import BIGINT, Json, Name, Named, Shown, Time
from dlqbatch.store.states import ITEM_MOVES, PLAN_MOVES, On, Phase, Status, Strategy, pairs
from dlqbatch.store.text import LONGEST_NOTE, LONGEST_TEXT

OUTCOMES: Final = ("abandoned", "failed", "succeeded")
SEVERITIES: Final = ("warning", "critical")
TOLD: Final = ("fired", "resolved")

# Literals, word for word the condition of a partial index: with a parameter in it neither planner could use the index.
IS_DUE: Final = "status = 'pending' AND is_due AND plan_id IS NULL"
WAITS_FOR_ITS_TIME: Final = "status = 'pending' AND NOT is_due AND next_retry_at IS NOT NULL AND plan_id IS NULL"
HAS_LEASE: Final = "status = 'processing' AND lease_until IS NOT NULL AND plan_id IS NULL"
"""The rows that a lifecycle has leased; what a replay plan has taken is found by the plan's items."""
IS_OPEN: Final = "closed_at IS NULL"
OBSERVED: Final = "dlq_attempts.closed_at IS NULL AND dlq_attempts.sent_at IS NOT NULL"
"""The attempts that were sent, and are neither resolved nor back."""
ARRIVED_BY_INGEST: Final = "from_status IS NULL AND actor = 'ingest'"
MADE_BY_EDIT: Final = "from_status IS NULL AND substr(reason, 1, 19) = 'an edit of message '"
HAS_TAGS: Final = "tags <> '[]'"
ACK_UNPROVEN: Final = "NOT ack_proven"
TAKEN_BY: Final = "substr(identity, 1, 24)"
"""The run of ingest that took a row without an id: its identity begins with the name of the run."""


def one_of(column: str, values: Iterable[str]) -> str:
    return f"{column} IN ({', '.join(repr(str(value)) for value in sorted(values))})"


def _allowed() -> str:
    notes = ((status, status) for status in Status)
    # Without coalesce an arrival would make the whole condition NULL, which every CHECK lets pass.
    written = {f"{from_ or ''}>{to}" for from_, to in (*pairs(), *notes)}
    return one_of("coalesce(from_status, '') || '>' || to_status", written)


def _partial(name: str, *columns: ColumnElement[Any] | TextClause, where: str) -> Index:
    return Index(name, *columns, sqlite_where=text(where), postgresql_where=text(where))


metadata: Final = MetaData()

SCOPES: Final = Table(
    "dlq_scopes",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("name", Name, nullable=False),
    Column("since", Time, nullable=False),
    UniqueConstraint("name", name="dlq_scopes_name"),
)
"""The deployments that share this database, each a broker and a virtual host. The first one has the id 1."""


def _scope() -> Column[int]:
    """What an older dlqbatch writes, and what was there before there were scopes, belongs to the first scope."""
    return Column("scope_id", Integer, nullable=False, server_default=text("1"))


MESSAGES: Final = Table(
    "dlq_messages",
    metadata,
    Column("id", BIGINT, Identity(), primary_key=True),
    Column("identity", Name, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("full_digest", LargeBinary, nullable=False),
    Column("had_id", Boolean, nullable=False),
    Column("parent", Name),
    Column("source_queue", Name, nullable=False),
    Column("exchange", Name, nullable=False),
    Column("routing_key", Name, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("properties", LargeBinary, nullable=False),
    Column("message_id", Name),
    Column("framework_id", Name),
    Column("returned_digest", LargeBinary),
    Column("origin_queue", Name),
    Column("origin_exchange", Name),
    Column("origin_key", Name),
    Column("moved_to", Name),
    Column("event", Name),
    Column("reason", Shown(LONGEST_NOTE)),
    Column("error_type", Name),
    Column("error_message", Shown(LONGEST_TEXT)),
    Column("error_stack", Shown(LONGEST_TEXT)),
    Column("fingerprint", Name, nullable=False),
    Column("retry_count", Integer, nullable=False),
    Column("dlq_retry_count", Integer, nullable=False, server_default=text("0")),
    Column("first_failed_at", Time, nullable=False),
    Column("last_failed_at", Time, nullable=False),
    Column("status", Named(Status), nullable=False),
    Column("status_since", Time, nullable=False),
    Column("strategy", Named(Strategy)),
    Column("lock_owner", Name),
    Column("lock_token", Text),
    Column("locked_at", Time),
    Column("lease_until", Time),
    Column("next_retry_at", Time),
    Column("is_due", Boolean, nullable=False, server_default=text("false")),
    Column("priority", SmallInteger, nullable=False, server_default=text("0")),
    Column("tags", Json, nullable=False, server_default=text("'[]'")),
    Column("source", Name),
    Column("system_state", Json, nullable=False, server_default=text("'{}'")),
    Column("plan_id", BIGINT),
    Column("possible_duplicate", Boolean, nullable=False, server_default=text("false")),
    Column("ack_proven", Boolean, nullable=False, server_default=text("false")),
    _scope(),
    Column("created_at", Time, nullable=False),
    Column("updated_at", Time, nullable=False),
    Column("erased_at", Time, CheckConstraint("erased_at IS NULL OR status = 'archived'", name="dlq_messages_erased")),
    UniqueConstraint("identity", name="dlq_messages_identity"),
    CheckConstraint(one_of("status", Status), name="dlq_messages_status"),
    CheckConstraint(one_of("strategy", Strategy), name="dlq_messages_strategy"),
    CheckConstraint("priority BETWEEN 0 AND 255", name="dlq_messages_priority"),
    CheckConstraint("length(digest) = 32 AND length(full_digest) = 32", name="dlq_messages_digests"),
    CheckConstraint("length(fingerprint) = 16", name="dlq_messages_fingerprint"),
    CheckConstraint("(status = 'processing') = (lock_token IS NOT NULL)", name="dlq_messages_lock"),
    CheckConstraint("lease_until IS NULL OR status = 'processing'", name="dlq_messages_lease"),
    CheckConstraint("status = 'pending' OR NOT is_due", name="dlq_messages_due"),
    sqlite_autoincrement=True,  # an id that a plan has frozen never comes again
)
_M = MESSAGES.c
Index("dlq_messages_by_parent", _M.parent, sqlite_where=_M.parent.is_not(None), postgresql_where=_M.parent.is_not(None))
_partial("dlq_messages_by_message_id", _M.message_id, where="message_id IS NOT NULL")
_partial("dlq_messages_by_framework_id", _M.framework_id, where="framework_id IS NOT NULL")
Index("dlq_messages_by_time", _M.created_at, _M.id)
Index("dlq_messages_by_group", _M.fingerprint, _M.created_at, _M.id)
Index("dlq_messages_by_origin", _M.origin_queue, _M.created_at, _M.id)
Index("dlq_messages_by_event", _M.event, _M.created_at, _M.id)
Index("dlq_messages_by_error", _M.error_type, _M.created_at, _M.id)
_partial("dlq_messages_by_source", _M.source, _M.created_at, _M.id, where="source IS NOT NULL")
_partial("dlq_messages_with_tags", _M.tags, where=HAS_TAGS).dialect_options["postgresql"]["using"] = "gin"
Index("dlq_messages_by_status", _M.status, _M.created_at, _M.id)
Index("dlq_messages_scope_ages", _M.scope_id, _M.status, _M.status_since, _M.id)
Index("dlq_messages_scope_failures", _M.scope_id, _M.status, _M.fingerprint, _M.origin_queue, _M.created_at)
_partial("dlq_messages_unproven", text(TAKEN_BY), _M.full_digest, where=ACK_UNPROVEN)
_partial("dlq_messages_scope_due", _M.scope_id, _M.priority.desc(), _M.created_at, _M.id, where=IS_DUE)
_partial("dlq_messages_scope_overdue", _M.scope_id, _M.priority.desc(), _M.next_retry_at, where=WAITS_FOR_ITS_TIME)
_partial("dlq_messages_scope_leases", _M.scope_id, _M.lease_until, where=HAS_LEASE)
_partial("dlq_messages_by_plan", _M.plan_id, _M.status, _M.id, where="plan_id IS NOT NULL")

ATTEMPTS: Final = Table(
    "dlq_attempts",
    metadata,
    Column("id", BIGINT, Identity(), primary_key=True),
    Column("message_id", BIGINT, ForeignKey("dlq_messages.id", ondelete="CASCADE"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("strategy", Named(Strategy)),
    Column("worker", Name, nullable=False),
    Column("created_at", Time, nullable=False),
    Column("sent_at", Time),
    Column("closed_at", Time),
    Column("outcome", Text),
    Column("acknowledged_at", Time),
    Column("proof", Shown(LONGEST_NOTE)),
    _scope(),
    UniqueConstraint("message_id", "number", name="dlq_attempts_number"),
    CheckConstraint("number > 0", name="dlq_attempts_from_one"),
    CheckConstraint(one_of("strategy", Strategy), name="dlq_attempts_strategy"),
    CheckConstraint(one_of("outcome", OUTCOMES), name="dlq_attempts_outcome"),
    CheckConstraint("(outcome IS NULL) = (closed_at IS NULL)", name="dlq_attempts_closed"),
    sqlite_autoincrement=True,
)
_partial("dlq_attempts_open", ATTEMPTS.c.message_id, where=IS_OPEN).unique = True
_IS_OBSERVED: Final = f"{IS_OPEN} AND sent_at IS NOT NULL"
_partial("dlq_attempts_scope_observed", ATTEMPTS.c.scope_id, ATTEMPTS.c.sent_at, where=_IS_OBSERVED)
_partial("dlq_attempts_recent", ATTEMPTS.c.closed_at, where="closed_at IS NOT NULL")

TRANSITIONS: Final = Table(
    "dlq_transitions",
    metadata,
    Column("id", BIGINT, Identity(), primary_key=True),
    Column("message_id", BIGINT, ForeignKey("dlq_messages.id", ondelete="CASCADE"), nullable=False),
    Column("from_status", Named(Status)),
    Column("to_status", Named(Status), nullable=False),
    Column("at", Time, nullable=False),
    Column("actor", Name, nullable=False),
    Column("reason", Shown(LONGEST_NOTE), nullable=False),
    _scope(),
    CheckConstraint(_allowed(), name="dlq_transitions_moves"),
    sqlite_autoincrement=True,
)
Index("dlq_transitions_by_message", TRANSITIONS.c.message_id, TRANSITIONS.c.id)
Index("dlq_transitions_by_time", TRANSITIONS.c.at, TRANSITIONS.c.to_status)
_partial("dlq_transitions_arrivals", TRANSITIONS.c.scope_id, TRANSITIONS.c.at, where=ARRIVED_BY_INGEST)
_partial("dlq_transitions_edits", TRANSITIONS.c.message_id, where=MADE_BY_EDIT)

RUNS: Final = Table(
    "dlq_runs",
    metadata,
    Column("id", BIGINT, Identity(), primary_key=True),
    Column("job", Name, nullable=False),
    Column("started_at", Time, nullable=False),
    Column("ended_at", Time, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("stopped_by", Text, nullable=False),
    Column("emptied", Json, nullable=False),
    Column("report", Json, nullable=False),
    Column("scope", Name),
    sqlite_autoincrement=True,
)
Index("dlq_runs_by_job", RUNS.c.job, RUNS.c.started_at)
Index("dlq_runs_by_time", RUNS.c.started_at)

RULES: Final = Table(
    "dlq_rules",
    metadata,
    Column("name", Name, primary_key=True),
    Column("position", Integer, nullable=False),
    Column("match_on", Named(On), nullable=False),
    Column("pattern", Text, nullable=False),
    Column("strategy", Named(Strategy), nullable=False),
    CheckConstraint(one_of("match_on", On), name="dlq_rules_match_on"),
    CheckConstraint(one_of("strategy", Strategy), name="dlq_rules_strategy"),
)

BREAKERS: Final = Table(
    "dlq_scope_breakers",
    metadata,
    Column("scope_id", Integer, primary_key=True, autoincrement=False, server_default=text("1")),
    Column("origin", Name, primary_key=True),
    Column("phase", Named(Phase), nullable=False),
    Column("since", Time),
    Column("probe", Text),
    Column("counted_from", Time),
    Column("sent", Integer, nullable=False),
    Column("failed", Integer, nullable=False),
    Column("sent_before", Integer, nullable=False),
    Column("failed_before", Integer, nullable=False),
    Column("updated_at", Time, nullable=False),
    CheckConstraint(one_of("phase", Phase), name="dlq_scope_breakers_phase"),
)

PLANS: Final = Table(
    "dlq_plans",
    metadata,
    Column("id", BIGINT, Identity(), primary_key=True),
    Column("hash", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("state_since", Time, nullable=False),
    Column("created_at", Time, nullable=False),
    Column("actor", Name, nullable=False),
    Column("reason", Shown(LONGEST_NOTE), nullable=False),
    Column("filters", Json, nullable=False),
    Column("to_queue", Name),
    Column("size", Integer, nullable=False),
    Column("risks", Json, nullable=False),
    Column("progress", Json, nullable=False, server_default=text("'{}'")),
    _scope(),
    UniqueConstraint("hash", name="dlq_plans_hash"),
    CheckConstraint(one_of("state", PLAN_MOVES), name="dlq_plans_state"),
    sqlite_autoincrement=True,
)
Index("dlq_plans_by_time", PLANS.c.created_at)

PLAN_ITEMS: Final = Table(
    "dlq_plan_items",
    metadata,
    Column("plan_id", BIGINT, ForeignKey("dlq_plans.id", ondelete="CASCADE"), primary_key=True),
    Column("place", Integer, primary_key=True),
    Column("message_id", BIGINT, nullable=False),
    Column("seen_status", Named(Status), nullable=False),
    Column("seen_updated_at", Time, nullable=False),
    Column("state", Text, nullable=False),
    Column("attempt", Integer),
    Column("reason", Shown(LONGEST_NOTE)),
    Column("order_key", Name),
    UniqueConstraint("plan_id", "message_id", name="dlq_plan_items_once"),
    CheckConstraint(one_of("state", ITEM_MOVES), name="dlq_plan_items_state"),
)
Index("dlq_plan_items_by_state", PLAN_ITEMS.c.plan_id, PLAN_ITEMS.c.state, PLAN_ITEMS.c.place)

ALERTS: Final = Table(
    "dlq_alerts",
    metadata,
    Column("id", BIGINT, Identity(), primary_key=True),
    Column("name", Name, nullable=False),
    Column("subject", Name, nullable=False),
    Column("severity", Text, nullable=False),
    Column("fired_at", Time, nullable=False),
    Column("resolved_at", Time),
    Column("value", Float),
    Column("threshold", Float),
    Column("summary", Shown(LONGEST_NOTE), nullable=False),
    Column("fired_told_at", Time),
    Column("resolved_told_at", Time),
    # Not used since dlq_alert_receivers is there; an older dlqbatch that still runs beside it does use them.
    Column("telling_until", Time),
    Column("tries", Integer, nullable=False, server_default=text("0")),
    _scope(),
    CheckConstraint(one_of("severity", SEVERITIES), name="dlq_alerts_severity"),
    sqlite_autoincrement=True,
)
Index("dlq_alerts_by_name", ALERTS.c.name, ALERTS.c.subject, ALERTS.c.fired_at)
_partial(
    "dlq_alerts_scope_active", *(ALERTS.c.scope_id, ALERTS.c.name, ALERTS.c.subject), where="resolved_at IS NULL"
).unique = True
_partial(
    "dlq_alerts_untold",
    ALERTS.c.id,
    where="fired_told_at IS NULL OR (resolved_at IS NOT NULL AND resolved_told_at IS NULL)",
)

ALERT_RECEIVERS: Final = Table(
    "dlq_alert_receivers",
    metadata,
    Column("alert_id", BIGINT, ForeignKey("dlq_alerts.id", ondelete="CASCADE"), primary_key=True, autoincrement=False),
    Column("receiver", Name, primary_key=True),
    Column("told", Text),
    Column("told_at", Time),
    Column("tries", Integer, nullable=False, server_default=text("0")),
    Column("next_try_at", Time, nullable=False),
    Column("telling_until", Time),
    CheckConstraint(one_of("told", TOLD), name="dlq_alert_receivers_told"),
)

LOOKS: Final = Table(
    "dlq_looks",
    metadata,
    Column("figure", Name, primary_key=True),
    Column("at", Time, nullable=False),
    Column("counted", Integer, nullable=False),
)

COLD_COPIES: Final = Table(
    "dlq_cold_copies",
    metadata,
    Column(
        "message_id", BIGINT, ForeignKey("dlq_messages.id", ondelete="CASCADE"), primary_key=True, autoincrement=False
    ),
    Column("part", Name, nullable=False),
    Column("written_at", Time, nullable=False),
)

QUEUE_READINGS: Final = Table(
    "dlq_queue_readings",
    metadata,
    Column("id", BIGINT, Identity(), primary_key=True),
    Column("queue", Name, nullable=False),
    Column("at", Time, nullable=False),
    Column("counted_from", Time, nullable=False),
    Column("reading", Json, nullable=False),
    _scope(),
    sqlite_autoincrement=True,
)
Index("dlq_queue_readings_by_queue", QUEUE_READINGS.c.queue, QUEUE_READINGS.c.at)
"""What the broker showed of queues that retries were sent to, for as long as a proof can need it."""

UNPROVEN_RETRIES: Final = Table(
    "dlq_scope_unproven",
    metadata,
    Column("scope_id", Integer, primary_key=True, autoincrement=False, server_default=text("1")),
    Column("place", Name, primary_key=True),
    Column("retries", Integer, nullable=False),
    Column("sent_at", Time, nullable=False),
    Column("acknowledged", Boolean, nullable=False),
    Column("missing", Shown(LONGEST_NOTE), nullable=False),
    Column("queue", Name),
    Column("ready", Integer),
    Column("unacknowledged", Integer),
    Column("delayed", Integer),
    Column("consumers", Integer),
    Column("at", Time, nullable=False),
)
"""What the newest lifecycle run found missing, for each origin, before its retries are resolved."""

UNPROVEN_RUNS: Final = Table(
    "dlq_unproven_runs",
    metadata,
    Column("run", Text, primary_key=True),
    Column("since", Time, nullable=False),
)
