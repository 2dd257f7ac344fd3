"""`upgrade-check`: what this version of dlqbatch, and the next release of the broker, would meet here.

It is run with the new version, before it takes the place of the old one. It changes nothing; what it says of the broker
are findings of the doctor.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from sqlalchemy import Engine, text

from dlqbatch import __version__
from dlqbatch.broker.facts import listed
from dlqbatch.doctor.findings import Code, Finding
from dlqbatch.doctor.job import Diagnosis, diagnose
from dlqbatch.settings import Settings
from dlqbatch.store.engine import create_engine_for, reading
from dlqbatch.store.indexes import missing_indexes
from dlqbatch.store.migrate import grants, pending

_MEETS_UPGRADE: Final = frozenset(
    {
        *(Code.OLD_BROKER, Code.DEPRECATED_IN_USE, Code.QUEUE_MODE_ARGUMENT, Code.DELAYED_EXCHANGE),
        *(Code.DELIVERY_LIMIT_DEFAULT, Code.DELIVERY_LIMIT_UNSET, Code.NACK_NEVER_COUNTS, Code.MANAGEMENT_SILENT),
        Code.DELAY_CHANGE_UNFINISHED,
    }
)
"""What the doctor finds that an upgrade of the broker, or of dlqbatch, would meet."""
_NOTES: Final = frozenset({Code.DELIVERY_LIMIT_UNSET, Code.NACK_NEVER_COUNTS})
_GRANT: Final = re.compile(r"^GRANT ([A-Z, ]+) ON (dlq\w+(?:, dlq\w+)*) TO ([\w, ]+);", re.MULTILINE)
_LACKING: Final = text(
    "SELECT role, relation, privilege "
    "FROM unnest(CAST(:roles AS text[]), CAST(:relations AS text[]), CAST(:privileges AS text[])) "
    "AS wanted (role, relation, privilege) "
    "WHERE CASE WHEN EXISTS (SELECT FROM pg_roles WHERE rolname = role) AND to_regclass(relation) IS NOT NULL "
    "THEN NOT has_table_privilege(role, relation, privilege) ELSE false END"
)
_HAS_ROLES: Final = text("SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = ANY (:roles))")
_MESSAGES: Final = text("SELECT greatest(reltuples, 0)::bigint FROM pg_class WHERE oid = to_regclass('dlq_messages')")
_RUN_GRANTS: Final = "dlqbatch db grants | psql -v ON_ERROR_STOP=1 --single-transaction -d DATABASE"


class Need(StrEnum):
    BLOCKED = "blocked"
    """The upgrade would fail, or stop jobs, until this is done."""
    TO_DO = "to do"
    """A step of the upgrade."""
    NOTE = "note"
    """Worth knowing; nothing has to be done."""


@dataclass(frozen=True, slots=True)
class Step:
    need: Need
    of: str
    """database, grants or broker."""
    where: str
    what: str
    fix: str

    def as_dict(self) -> dict[str, object]:
        about = {"where": self.where, "what": self.what, "fix": self.fix}
        return {"need": self.need.value, "of": self.of, **about}


@dataclass(frozen=True, slots=True)
class Upgrade:
    diagnosis: Diagnosis
    steps: tuple[Step, ...]
    """What blocks first."""

    def has(self, need: Need) -> bool:
        return any(step.need is need for step in self.steps)

    def as_dict(self) -> dict[str, object]:
        known = self.diagnosis.as_dict()
        return {
            "version": __version__,
            "broker": known["broker"],
            "database": known["database"] | {"newest": self.diagnosis.database.newest},  # type: ignore[operator]
            "ready": not self.steps or not (self.has(Need.BLOCKED) or self.has(Need.TO_DO)),
            "steps": [step.as_dict() for step in self.steps],
        }


def check_upgrade(settings: Settings) -> Upgrade:
    """BrokerUnreachable if there is no broker; a setting that this version does not know was an error before."""
    diagnosis = diagnose(settings)
    steps = [*_database(settings, diagnosis), *_broker(diagnosis)]
    order = list(Need)
    return Upgrade(diagnosis, tuple(sorted(steps, key=lambda step: order.index(step.need))))


def _database(settings: Settings, diagnosis: Diagnosis) -> Iterator[Step]:
    facts = diagnosis.database
    if not facts.is_there:
        return
    if facts.unreachable is not None:
        yield Step(Need.BLOCKED, "database", facts.where, facts.unreachable, "dlqbatch db current")
        return
    if not facts.is_known:
        what = f"its schema is {facts.version}, which this version does not know: it is older than the one in use"
        yield Step(Need.BLOCKED, "database", facts.where, what, "pip install --upgrade dlqbatch")
        return
    if facts.version is None:
        return
    url = settings.database_url.get_secret_value()
    engine = create_engine_for(url, connect_timeout=settings.connect_timeout_seconds)
    left = pending(facts.version)
    if left:
        changes = "; ".join(f"{one.revision}: {one.what}" for one in left)
        what = f"schema {facts.version} becomes {facts.newest} ({changes}). {_cost(engine)}"
        yield Step(Need.TO_DO, "database", facts.where, what, "dlqbatch db upgrade")
    elif indexes := missing_indexes(engine):
        what = f"an upgrade was cut: the indexes {', '.join(indexes)} are missing, and queries are slow without them"
        yield Step(Need.TO_DO, "database", facts.where, what, "dlqbatch db upgrade")
    yield from _grants(engine, facts.where, is_pending=bool(left))


def _cost(engine: Engine) -> str:
    """What the upgrade takes, and what waits for it."""
    if engine.dialect.name != "postgresql":
        size = Path(str(engine.url.database)).stat().st_size / 1024**2
        return f"The file has {size:,.1f} MiB; nobody else can write to it until all of that is done"
    with reading(engine) as connection:
        messages = connection.scalar(_MESSAGES) or 0
    building = missing_indexes(engine)
    named = f", then {len(building)} indexes are built beside running jobs ({', '.join(building)})" if building else ""
    return (
        "The tables are locked for as long as it takes to add columns, and not while open transactions use them"
        f"{named}; there are about {messages:,} messages"
    )


def _grants(engine: Engine, where: str, *, is_pending: bool) -> Iterator[Step]:
    """What the roles of docs/permissions.md lack; an installation with roles of its own has none of them."""
    if engine.dialect.name != "postgresql":
        return
    wanted = [
        (role, table, privilege)
        for privileges, tables, roles in _GRANT.findall(grants())
        for privilege in privileges.split(", ")
        for table in tables.split(", ")
        for role in roles.split(", ")
    ]
    roles, tables, privileges = (list(column) for column in zip(*wanted, strict=True))
    with reading(engine) as connection:
        if not connection.scalar(_HAS_ROLES, {"roles": roles}):
            return
        asked = {"roles": roles, "relations": tables, "privileges": privileges}
        lacking: defaultdict[str, set[str]] = defaultdict(set)
        for role, table, privilege in connection.execute(_LACKING, asked):
            lacking[role].add(f"{privilege} on {table}")
    for role, rights in sorted(lacking.items()):
        what = f"the role lacks {', '.join(sorted(rights))}"
        yield Step(Need.TO_DO, "grants", role, what, _RUN_GRANTS)
    if is_pending and not lacking:
        what = "new tables come with the schema, and the roles get their rights to them by running the grants again"
        yield Step(Need.TO_DO, "grants", where, what, f"dlqbatch db upgrade && {_RUN_GRANTS}")


def _broker(diagnosis: Diagnosis) -> Iterator[Step]:
    yield from (_step(one) for one in diagnosis.findings if one.code in _MEETS_UPGRADE)
    if flags := diagnosis.broker.flags_off:
        what = (
            f"feature flags are stable and not enabled: {listed(flags)}. A later RabbitMQ does not start without them"
        )
        yield Step(Need.TO_DO, "broker", diagnosis.broker.where, what, "rabbitmqctl enable_feature_flag all")


def _step(finding: Finding) -> Step:
    need = Need.NOTE if finding.code in _NOTES else Need.TO_DO
    if finding.code is Code.DELAY_CHANGE_UNFINISHED:
        need = Need.BLOCKED
    return Step(need, "broker", finding.where, finding.what, finding.fix)
