"""A look at what is there, put together: it changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dlqbatch.broker.connection import Connection, connect
from dlqbatch.broker.management import expansion
from dlqbatch.broker.survey import Surveyor
from dlqbatch.broker.survey import survey as survey_broker
from dlqbatch.errors import BrokerUnreachable
from dlqbatch.policy.doctor import Severity, examine
from dlqbatch.policy.doctor.facts import BindingFacts, Deployment, Part
from dlqbatch.settings.topologies import topologies
from dlqbatch.topology.kinds import Drained, Kind
from dlqbatch.wiring.access import access_to, management_api
from dlqbatch.wiring.ladders import dead_letter_queues, limits_deliveries

if TYPE_CHECKING:
    from dlqbatch.policy.doctor import Finding
    from dlqbatch.policy.doctor.facts import BrokerFacts, DatabaseFacts
    from dlqbatch.settings import Settings


@dataclass(frozen=True, slots=True)
class Diagnosis:
    findings: tuple[Finding, ...]
    """The worst first."""
    broker: BrokerFacts
    database: DatabaseFacts

    def count(self, severity: Severity) -> int:
        return sum(1 for finding in self.findings if finding.severity is severity)

    def as_dict(self) -> dict[str, object]:
        return {
            "broker": {
                "version": ".".join(map(str, self.broker.version)),
                "virtual_host": self.broker.vhost,
                "management": self.broker.silent or self.broker.api,
            },
            "database": {"where": self.database.where, "version": self.database.version},
            "counts": {severity.value: self.count(severity) for severity in Severity},
            "findings": [finding.as_dict() for finding in self.findings],
        }


def diagnose(settings: Settings) -> Diagnosis:
    """BrokerUnreachable if there is no broker; a database or a management API that does not answer is a finding."""
    from dlqbatch.deadstore.survey import survey as survey_database  # noqa: PLC0415  (SQLAlchemy costs a fifth of a second)

    connection = connect(access_to(settings, "dlqbatch doctor"))
    try:
        deployment = _deployment(settings, connection)
        broker = survey_broker(connection, Surveyor(management_api(settings), clock=_now), deployment)
    finally:
        connection.close()
    database = survey_database(
        settings.database_url.get_secret_value(),
        is_default=settings.database_url_is_default,
        connect_timeout=settings.connect_timeout_seconds,
        clock=_now,
    )
    return Diagnosis(examine(broker, database, deployment), broker, database)


def _deployment(settings: Settings, connection: Connection) -> Deployment:
    kinds = topologies(settings)
    drained = [kind for kind in kinds.values() if isinstance(kind, Drained)]
    sources = [source for kind in drained for source in kind.sources]
    ingest, unmatched = _matched(settings, settings.ingest_queues)
    checked, _ = _matched(settings, settings.check_queues)
    dead = dead_letter_queues(settings)
    return Deployment(
        parts=tuple(_part(name, kind, connection) for name, kind in kinds.items()),
        first_stage=frozenset(source.queue for source in sources if source.first_stage),
        read=frozenset([*(source.queue for source in sources), *dead, *ingest, *checked]),
        dead_letter_queue=dead[0] if dead else settings.dlq_queue,
        retry=(settings.retry_exchange, settings.retry_routing_key) if settings.ladder else None,
        written=tuple(route for kind in drained for route in _written(kind)),
        ingest=tuple(name for name in settings.ingest_queues if "*" not in name),
        ingest_unmatched=unmatched,
        events={
            name: settings.default_max_retries if retries is None else retries
            for name, retries in settings.events.items()
        },
        default_max_retries=settings.default_max_retries,
        allow_empty_policy=settings.allow_empty_policy,
    )


def _written(kind: Drained) -> tuple[tuple[str, str], ...]:
    dead = kind.dead()
    delays = [kind.delay("event", tier) for tier in range(1, kind.tiers + 1)]
    return tuple((route.exchange, route.key or "") for route in (dead, *delays))


def _part(name: str, kind: Kind, connection: Connection) -> Part:
    wanted = kind.topology(unlimited_deliveries=limits_deliveries(connection))
    return Part(
        name,
        {one.name: one.type for one in wanted.exchanges},
        {one.name: one.arguments for one in wanted.queues},
        tuple(BindingFacts(one.exchange, one.key, one.queue) for one in wanted.bindings),
        frozenset(kind.delay_queues),
    )


def _matched(settings: Settings, names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Without the management API the wildcards stand for nothing that can be looked at."""
    try:
        return expansion(names, management_api(settings))[:2]
    except BrokerUnreachable:
        return tuple(name for name in names if "*" not in name), ()


def _now() -> datetime:
    return datetime.now(UTC)
