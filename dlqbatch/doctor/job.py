"""`doctor`: look at the broker, the database and the settings, and name what is wrong. It changes nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime

from dlqbatch.amqp.patterns import is_wildcard
from dlqbatch.broker.access import access_to, connect, management_api
from dlqbatch.broker.connection import Connection
from dlqbatch.broker.facts import BindingFacts, BrokerFacts
from dlqbatch.broker.management import expansion
from dlqbatch.doctor import broker as broker_rules
from dlqbatch.doctor import database as database_rules
from dlqbatch.doctor import dead_lettering, own_queues, queues
from dlqbatch.doctor.connections import unprotected
from dlqbatch.doctor.facts import DatabaseFacts, Deployment, Part, VirtualHost
from dlqbatch.doctor.findings import Code, Finding, Severity
from dlqbatch.doctor.survey import Surveyor
from dlqbatch.doctor.survey import survey as survey_broker
from dlqbatch.errors import BrokerUnreachable
from dlqbatch.retain.rows import keep_of
from dlqbatch.settings import Settings
from dlqbatch.settings.topologies import topologies
from dlqbatch.topology.declare import dead_letter_queues, limits_deliveries
from dlqbatch.topology.kinds import Drained, Kind


@dataclass(frozen=True, slots=True)
class Diagnosis:
    findings: tuple[Finding, ...]
    """The worst first."""
    broker: BrokerFacts
    database: DatabaseFacts

    def count(self, severity: Severity) -> int:
        return sum(1 for finding in self.findings if finding.severity is severity)

    def looked_at(self) -> str:
        broker, version = self.broker, ".".join(map(str, self.broker.version))
        return (
            f"RabbitMQ {version} at {broker.where}, virtual host '{broker.vhost}', as '{broker.user}'; "
            f"database {self.database.where}"
        )

    def as_dict(self) -> dict[str, object]:
        return {
            "broker": {
                "where": self.broker.where,
                "version": ".".join(map(str, self.broker.version)),
                "virtual_host": self.broker.vhost,
                "management": self.broker.silent or self.broker.api,
            },
            "database": {"where": self.database.where, "version": self.database.version},
            "counts": {severity.value: self.count(severity) for severity in Severity},
            "findings": [finding.as_dict() for finding in self.findings],
        }


def examine(broker: BrokerFacts, database: DatabaseFacts, deployment: Deployment) -> tuple[Finding, ...]:
    """Everything that is wrong, the worst first.

    Nothing is said about what is not known, as most of the broker is not without its management API.
    """
    vhost = None if broker.map is None else VirtualHost(broker, broker.map, deployment)
    found = [
        *deployment.unprotected,
        *broker_rules.examine(broker, deployment),
        *database_rules.examine(database),
        *database_rules.examine_policy(vhost, database, deployment),
    ]
    if vhost is not None:
        found += [*dead_lettering.examine(vhost), *queues.examine(vhost), *own_queues.examine(vhost)]
    # One queue may be wrong in one way for two reasons; the same sentence twice helps nobody.
    order = list(Code)
    return tuple(sorted(dict.fromkeys(found), key=lambda one: (order.index(one.code), one.where, one.what)))


def diagnose(settings: Settings) -> Diagnosis:
    """BrokerUnreachable if there is no broker; a database or a management API that does not answer is a finding."""
    connection = connect(access_to(settings, "dlqbatch doctor"))
    try:
        deployment = _deployment(settings, connection)
        broker = survey_broker(connection, Surveyor(management_api(settings), clock=_now), deployment)
    finally:
        connection.close()
    database = database_rules.survey(
        settings.database_url.get_secret_value(),
        is_default=settings.database_url_is_default,
        connect_timeout=settings.connect_timeout_seconds,
        clock=_now,
        overdue_before=keep_of(settings).before(_now() - settings.alert_overdue),
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
        dead_letter_queues=frozenset(dead),
        retry=(settings.retry_exchange, settings.retry_routing_key) if settings.ladder else None,
        retry_queue=settings.retry_queue if settings.ladder else None,
        window_seconds=settings.observation_window.total_seconds(),
        unprotected=unprotected(settings, os.environ),
        written=tuple(route for kind in drained for route in _written(kind)),
        ingest=tuple(name for name in settings.ingest_queues if not is_wildcard(name)),
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
        kind.own_queues,
    )


def _matched(settings: Settings, names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The queues that match these names, and wildcards that match none; without the management API no wildcard does."""
    try:
        return expansion(names, management_api(settings))[:2]
    except BrokerUnreachable:
        return tuple(name for name in names if not is_wildcard(name)), ()


def _now() -> datetime:
    return datetime.now(UTC)
