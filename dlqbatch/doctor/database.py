"""What `doctor` reads of the database, and what is wrong with it and with its table of events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from shlex import join, quote
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from sqlalchemy import URL, Engine, text

from dlqbatch.amqp.patterns import is_pattern
from dlqbatch.amqp.retry_headers import RETURN_PREFIX
from dlqbatch.broker.routing import overlap
from dlqbatch.doctor import commands
from dlqbatch.doctor.broker import SKEW, SYNCHRONISE, ahead, is_local
from dlqbatch.doctor.findings import Code, Finding
from dlqbatch.doctor.virtual_host import Deployment, VirtualHost
from dlqbatch.drain.event_config import EventConfig
from dlqbatch.drain.event_policy import EventRow, Policy
from dlqbatch.errors import DatabaseUnreadable, PolicyMissing
from dlqbatch.lifecycle.rule_rows import BrokenRule, Rules
from dlqbatch.retain.rows import count_due
from dlqbatch.store.engine import create_engine_for, parse, reading, where
from dlqbatch.store.migrate import current, latest, planned
from dlqbatch.store.states import Status

_TABLE = "dlq_event_config"
_UPGRADE = "dlqbatch db upgrade"
_VERIFIED: Final = "verify-full"
_USUAL: Final = "prefer"
"""The mode of libpq where nobody has named another: it sends in clear if the server wants that."""


@dataclass(frozen=True, slots=True)
class DatabaseFacts:
    where: str
    client: str
    """The shell command that takes one statement of SQL as its last argument."""
    unreachable: str | None = None
    is_there: bool = True
    """False: the default SQLite file does not exist yet."""
    version: str | None = None
    newest: str = ""
    is_known: bool = True
    """This program knows the version of the schema."""
    skew: float | None = None
    """Seconds that the clock of the database is ahead of ours; None if it has no clock of its own."""
    rows: tuple[EventRow, ...] | None = None
    """None: the table of events is not there, or cannot be read."""
    unreadable: str | None = None
    """Why the table of events cannot be read."""
    broken_rules: tuple[BrokenRule, ...] = ()
    overdue: Mapping[str, int] = field(default_factory=dict)
    """Messages by state that `retain` should have taken some time ago."""


def examine(database: DatabaseFacts) -> Iterator[Finding]:
    if not database.is_there:
        return
    if database.unreachable is not None:
        fix = "dlqbatch db current"
        yield Finding(Code.DATABASE_UNREACHABLE, database.where, f"{database.unreachable}. Without it no job runs", fix)
        return
    if database.skew is not None and abs(database.skew) > SKEW:
        what = f"its clock is {ahead(database.skew)} ours; the dead store counts by its own, headers and logs by ours"
        yield Finding(Code.CLOCK_SKEW_DATABASE, database.where, what, SYNCHRONISE)
    yield from _schema(database)
    if database.unreadable is not None:
        what = f"the policy cannot be read, so a drain moves nothing: {database.unreadable}"
        yield Finding(Code.POLICY_UNREADABLE, database.where, what, "dlqbatch events list")
    yield from _rows(database, database.rows or ())
    for rule in database.broken_rules:
        what = f"no run asks this rule: {rule.problem}"
        yield Finding(Code.RULE_BROKEN, rule.name, what, f"dlqbatch rules remove -- {quote(rule.name)}")
    overdue = {state: number for state, number in database.overdue.items() if number}
    if overdue:
        each = ", ".join(f"{number:,} {state}" for state, number in overdue.items())
        what = (
            f"retention is {sum(overdue.values()):,} messages behind ({each}): retain does not run, or does not keep up"
        )
        yield Finding(Code.RETENTION_BEHIND, database.where, what, "dlqbatch retain")


def _schema(database: DatabaseFacts) -> Iterator[Finding]:
    if database.version is None:
        what = "there is no dead store: a drain needs none, ingest and the jobs after it do"
        yield Finding(Code.SCHEMA_MISSING, database.where, what, _UPGRADE)
    elif not database.is_known:
        what = f"its schema is {database.version}, which this program does not know: it is older than the database"
        yield Finding(Code.SCHEMA_UNKNOWN, database.where, what, "pip install --upgrade dlqbatch")
    elif database.version != database.newest:
        what = f"its schema is {database.version}, this program works with {database.newest}"
        yield Finding(Code.SCHEMA_OLD, database.where, what, _UPGRADE)


def _rows(database: DatabaseFacts, rows: Iterable[EventRow]) -> Iterator[Finding]:
    named: defaultdict[str, list[EventRow]] = defaultdict(list)
    nameless = []
    for row in rows:
        if row.name is None:
            nameless.append(row.id)
        else:
            named[row.name].append(row)
    if nameless:
        what = f"{len(nameless)} rows have no name and are ignored: {', '.join(map(str, nameless[:10]))}"
        fix = commands.sql(database.client, f"DELETE FROM {_TABLE} WHERE name IS NULL")  # noqa: S608  (its own name)
        yield Finding(Code.EVENT_NAMELESS, _TABLE, what, fix)
    for name, same in named.items():
        counting = max(same, key=_row_id)
        again = f"{commands.remove_event(name)} && {commands.set_event(name, counting.max_retries)}"
        if len(same) > 1:
            ids = ", ".join(str(row.id) for row in same)
            what = f"it stands in {len(same)} rows ({ids}), and only row {counting.id} counts"
            yield Finding(Code.EVENT_DUPLICATE, name, what, again)
        if counting.max_retries is not None and counting.max_retries < 0:
            what = f"its max_retries is {counting.max_retries}, which counts as 0: every failure is a dead letter"
            yield Finding(Code.EVENT_NEGATIVE, name, what, commands.set_event(name, 0))
        if name != name.strip():
            what = "there are blanks around the name, so that it matches only a routing key that has them too"
            fix = f"{commands.remove_event(name)} && {commands.set_event(name.strip(), counting.max_retries)}"
            yield Finding(Code.EVENT_BLANKS, name, what, fix)


def _row_id(row: EventRow) -> int:
    return row.id


def unprotected(url: str, environment: Mapping[str, str]) -> Iterator[Finding]:
    """A finding if the certificate of a server on another machine is not verified."""
    parts = urlsplit(url)
    if not parts.scheme.startswith("postgres"):
        return
    options = dict(parse_qsl(parts.query))
    hosts = [parts.hostname] if parts.hostname else []
    hosts += [host for host in options.get("host", "").split(",") if host]
    hosts = hosts or [environment.get("PGHOST", "")]
    mode = options.get("sslmode") or environment.get("PGSSLMODE") or _USUAL
    far = [host for host in hosts if not is_local(host)]
    if far and mode != _VERIFIED:
        login, at, place = parts.netloc.rpartition("@")
        address = f"{parts.scheme}://{'USER:PASSWORD@' if at or login else ''}{place}{parts.path}"
        fix = f"export DLQBATCH_DATABASE_URL='{address}?sslmode={_VERIFIED}&sslrootcert=/path/to/ca.pem'"
        what = (
            "the server's certificate is not checked, if there is one: whoever answers under that name gets the "
            "password and the messages"
        )
        yield Finding(Code.DATABASE_UNVERIFIED, f"{', '.join(far)} (sslmode={mode})", what, fix)


def examine_policy(vhost: VirtualHost | None, database: DatabaseFacts, deployment: Deployment) -> Iterator[Finding]:
    if database.unreachable is not None or database.unreadable is not None:
        return
    policy = Policy(database.rows or (), deployment.events, deployment.default_max_retries)
    if not policy:
        if deployment.first_stage and not deployment.allow_empty_policy:
            what = "not a single event is configured, in the table or in application.properties: a drain moves nothing"
            first = "" if database.rows is not None else "dlqbatch db upgrade && "
            fix = f"{first}{commands.set_event('#', deployment.default_max_retries)}"
            yield Finding(Code.POLICY_EMPTY, database.where, what, fix)
        return
    if vhost is None or not vhost.origins:
        return
    names = {row.name for row in database.rows or () if row.name is not None}
    # A name with blanks around it has a finding already, and is another name as soon as that is fixed.
    yield from _without_binding(vhost, {name for name in names if name == name.strip()})
    yield from _without_event(vhost, policy, names | deployment.events.keys())


def _without_binding(vhost: VirtualHost, names: set[str]) -> Iterator[Finding]:
    """Only events of the table: those of application.properties may be meant for other virtual hosts."""
    patterns = []
    plumbing = (vhost.deployment.own_queues | vhost.deployment.read) - vhost.origins
    for binding in vhost.there.bindings:
        if not binding.to_queue or binding.destination in plumbing or binding.source.startswith(RETURN_PREFIX):
            continue
        pattern = vhost.routes.pattern(binding)
        if pattern is None:
            return  # any key may come this way
        patterns.append(pattern)
    queues = vhost.there.queues.keys() - plumbing
    for name in sorted(names):
        if any(overlap(name, pattern) for pattern in patterns) or any(overlap(name, queue) for queue in queues):
            continue
        what = "no binding lets such a routing key into any queue of this virtual host"
        yield Finding(Code.EVENT_WITHOUT_BINDING, name, what, commands.remove_event(name))


def _without_event(vhost: VirtualHost, policy: Policy, names: set[str]) -> Iterator[Finding]:
    for queue in sorted(vhost.origins):
        for binding in vhost.routes.into(queue):
            key = vhost.routes.pattern(binding)
            if key is None or binding.source.startswith(RETURN_PREFIX):
                continue
            if any(overlap(key, name) for name in names) if is_pattern(key) else policy.max_retries(key) is not None:
                continue
            what = (
                f"failures of '{queue}' arrive with the key '{key}' (exchange '{binding.source}'), which no event "
                "names: they become dead letters at once, not-configured"
            )
            fix = commands.set_event(key, vhost.deployment.default_max_retries)
            yield Finding(Code.BINDING_WITHOUT_EVENT, queue, what, fix)


def survey(
    url: str,
    *,
    is_default: bool,
    connect_timeout: float,
    clock: Callable[[], datetime],
    overdue_before: Mapping[Status, datetime] | None = None,
) -> DatabaseFacts:
    """Read the database and change nothing.

    `overdue_before`: a message that came into a state before the time of that state is overdue. `is_default`: the
    SQLite file of the defaults may be missing, because the first `db upgrade` makes it.
    """
    parsed = parse(url)
    facts = DatabaseFacts(where(parsed), _client(parsed))
    if parsed.get_backend_name() == "sqlite" and not Path(str(parsed.database)).exists():
        return replace(facts, is_there=not is_default)
    engine = create_engine_for(url, connect_timeout=connect_timeout)
    try:
        version = current(url, connect_timeout=connect_timeout)
        skew = _skew(engine, clock)
    except DatabaseUnreadable as error:
        return replace(facts, unreachable=error.why)
    facts = replace(facts, version=version, newest=latest(), skew=skew)
    try:
        planned(url, connect_timeout=connect_timeout)
    except DatabaseUnreadable:
        facts = replace(facts, is_known=False)
    return _tables(engine, facts, overdue_before or {})


def _tables(engine: Engine, facts: DatabaseFacts, overdue_before: Mapping[Status, datetime]) -> DatabaseFacts:
    try:
        facts = replace(facts, rows=tuple(EventConfig(engine).read()))
    except PolicyMissing:
        pass  # no table: that is a finding about the schema
    except DatabaseUnreadable as error:
        facts = replace(facts, unreadable=error.why)
    if facts.version != facts.newest:
        return facts
    try:
        _, broken = Rules(engine).read()
    except DatabaseUnreadable:
        return facts  # a login that may read the events may lack the right to read rules
    facts = replace(facts, broken_rules=broken)
    try:
        with reading(engine) as connection:
            overdue = count_due(connection, overdue_before)
    except DatabaseUnreadable:
        return facts  # nor may it read the messages
    return replace(facts, overdue={status.value: number for status, number in overdue.items()})


def _skew(engine: Engine, clock: Callable[[], datetime]) -> float | None:
    """Seconds that its clock is ahead of ours; None for SQLite, which has no clock of its own."""
    if engine.url.get_backend_name() == "sqlite":
        return None
    with reading(engine) as connection:
        connection.scalar(text("SELECT 1"))  # connects, so that the next statement takes one round trip only
        before = clock()
        there: datetime = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
        after = clock()
    return (there - before - (after - before) / 2).total_seconds()


def _client(url: URL) -> str:
    """The shell command that takes a statement of SQL; psql asks for the password itself."""
    if url.get_backend_name() == "sqlite":
        return join(["sqlite3", str(url.database)])
    words = ["psql", "-d", url.database or "postgres"]
    for option, value in (("-h", url.host), ("-p", url.port), ("-U", url.username)):
        words += [option, str(value)] if value else []
    return join([*words, "-c"])
