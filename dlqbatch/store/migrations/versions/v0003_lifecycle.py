"""The lifecycle: rules, circuit breakers, replay plans, alerts, where cold copies are, which runs were cut."""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeEngine

from dlqbatch.lifecycle.rules import DEFAULT_RULES

revision = "0003"
down_revision = "0002"

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")
JSON = JSONB().with_variant(sa.Text(), "sqlite")


def upgrade() -> None:
    _rules()
    _breakers()
    _plans()
    _alerts()
    _cold_copies()
    _unproven_runs()


def _rules() -> None:
    table = op.create_table(
        "dlq_rules",
        sa.Column("name", sa.Text, primary_key=True),
        _needed("position", sa.Integer),
        _needed("match_on", sa.Text),
        _needed("pattern", sa.Text),
        _needed("strategy", sa.Text),
        sa.CheckConstraint("match_on IN ('any', 'text', 'type')", name="dlq_rules_match_on"),
        sa.CheckConstraint(
            "strategy IN ('conditional', 'immediate', 'manual', 'scheduled')", name="dlq_rules_strategy"
        ),
    )
    # As they are when the table is made; from then on the rules are the user's.
    op.bulk_insert(
        table,
        [
            {
                "name": rule.name,
                "position": rule.position,
                "match_on": rule.on.value,
                "pattern": rule.pattern,
                "strategy": rule.strategy.value,
            }
            for rule in DEFAULT_RULES
        ],
    )


def _breakers() -> None:
    op.create_table(
        "dlq_breakers",
        sa.Column("origin", sa.Text, primary_key=True),
        _needed("phase", sa.Text),
        sa.Column("since", TIME),
        sa.Column("probe", sa.Text),
        sa.Column("counted_from", TIME),
        _needed("sent", sa.Integer),
        _needed("failed", sa.Integer),
        _needed("sent_before", sa.Integer),
        _needed("failed_before", sa.Integer),
        _needed("updated_at", TIME),
        sa.CheckConstraint("phase IN ('closed', 'half-open', 'open')", name="dlq_breakers_phase"),
    )


def _plans() -> None:
    op.create_table(
        "dlq_plans",
        _number(),
        _needed("hash", sa.Text),
        _needed("state", sa.Text),
        _needed("state_since", TIME),
        _needed("created_at", TIME),
        _needed("actor", sa.Text),
        _needed("reason", sa.Text),
        _needed("filters", JSON),
        sa.Column("to_queue", sa.Text),
        _needed("size", sa.Integer),
        _needed("risks", JSON),
        _needed("progress", JSON, "'{}'"),
        sa.UniqueConstraint("hash", name="dlq_plans_hash"),
        sa.CheckConstraint("state IN ('aborted', 'applying', 'done', 'planned', 'stopped')", name="dlq_plans_state"),
        sqlite_autoincrement=True,
    )
    _index("dlq_plans_by_time", "dlq_plans", "created_at")
    op.create_table(
        "dlq_plan_items",
        sa.Column("plan_id", ID, sa.ForeignKey("dlq_plans.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("place", sa.Integer, primary_key=True),
        _needed("message_id", ID),
        _needed("seen_status", sa.Text),
        _needed("seen_updated_at", TIME),
        _needed("state", sa.Text),
        sa.Column("attempt", sa.Integer),
        sa.Column("reason", sa.Text),
        sa.UniqueConstraint("plan_id", "message_id", name="dlq_plan_items_once"),
        sa.CheckConstraint("state IN ('sent', 'skipped', 'waiting')", name="dlq_plan_items_state"),
    )
    _index("dlq_plan_items_by_state", "dlq_plan_items", "plan_id", "state", "place")


def _alerts() -> None:
    op.create_table(
        "dlq_alerts",
        _number(),
        _needed("name", sa.Text),
        _needed("subject", sa.Text),
        _needed("severity", sa.Text),
        _needed("fired_at", TIME),
        sa.Column("resolved_at", TIME),
        sa.Column("value", sa.Float),
        sa.Column("threshold", sa.Float),
        _needed("summary", sa.Text),
        sa.Column("fired_told_at", TIME),
        sa.Column("resolved_told_at", TIME),
        sa.Column("telling_until", TIME),
        _needed("tries", sa.Integer, "0"),
        sa.CheckConstraint("severity IN ('critical', 'warning')", name="dlq_alerts_severity"),
        sqlite_autoincrement=True,
    )
    _index("dlq_alerts_by_name", "dlq_alerts", "name", "subject", "fired_at")
    _index("dlq_alerts_active", "dlq_alerts", "name", "subject", where="resolved_at IS NULL", unique=True)
    _index(
        "dlq_alerts_untold",
        "dlq_alerts",
        "id",
        where="fired_told_at IS NULL OR (resolved_at IS NOT NULL AND resolved_told_at IS NULL)",
    )


def _cold_copies() -> None:
    op.create_table(
        "dlq_cold_copies",
        sa.Column(
            "message_id",
            ID,
            sa.ForeignKey("dlq_messages.id", ondelete="CASCADE"),
            primary_key=True,
            autoincrement=False,
        ),
        _needed("part", sa.Text),
        _needed("written_at", TIME),
    )


def _unproven_runs() -> None:
    op.create_table("dlq_unproven_runs", sa.Column("run", sa.Text, primary_key=True), _needed("since", TIME))
    # Of these nobody has noted until now that they ended in order.
    op.execute(
        "INSERT INTO dlq_unproven_runs (run, since) SELECT substr(identity, 1, 24), min(created_at) "
        "FROM dlq_messages WHERE NOT ack_proven AND NOT had_id GROUP BY 1"
    )
    op.drop_index("dlq_messages_unproven", "dlq_messages")
    _index("dlq_messages_unproven", "dlq_messages", "substr(identity, 1, 24)", "full_digest", where="NOT ack_proven")


def _number() -> sa.Column[int]:
    return sa.Column("id", ID, sa.Identity(), primary_key=True)


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
