"""Looking at a database without changing it: what can be told of it, and why the rest cannot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING

from sqlalchemy import text

from dlqbatch.deadstore.engine import create_engine_for, parse, reading, where
from dlqbatch.deadstore.event_config import EventConfig
from dlqbatch.deadstore.migrate import current, latest, planned
from dlqbatch.deadstore.rules import Rules
from dlqbatch.errors import DatabaseUnreadable, PolicyMissing
from dlqbatch.policy.doctor.facts import DatabaseFacts, RuleFacts

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from sqlalchemy import URL, Engine


def survey(url: str, *, is_default: bool, connect_timeout: float, clock: Callable[[], datetime]) -> DatabaseFacts:
    """A default file that is not there is no fault: nobody needs it before the first `db upgrade`."""
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
    return _tables(engine, facts)


def _tables(engine: Engine, facts: DatabaseFacts) -> DatabaseFacts:
    try:
        facts = replace(facts, rows=tuple(EventConfig(engine).read()))
    except PolicyMissing:
        pass  # no table: the schema says so
    except DatabaseUnreadable as error:
        facts = replace(facts, unreadable=error.why)
    if facts.version != facts.newest:
        return facts
    try:
        _, broken = Rules(engine).read()
    except DatabaseUnreadable:
        return facts  # a role that may read the policy only has no use for the rules
    return replace(facts, broken_rules=tuple(RuleFacts(one.name, one.problem) for one in broken))


def _skew(engine: Engine, clock: Callable[[], datetime]) -> float | None:
    """Seconds that its clock is ahead; a file has the clock of whoever asks."""
    if engine.url.get_backend_name() == "sqlite":
        return None
    with reading(engine) as connection:
        connection.scalar(text("SELECT 1"))  # what follows takes one round trip, and no connecting
        before = clock()
        there: datetime = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
        after = clock()
    return (there - before - (after - before) / 2).total_seconds()


def _client(url: URL) -> str:
    """The command that takes a statement; it asks for the password itself."""
    if url.get_backend_name() == "sqlite":
        return join(["sqlite3", str(url.database)])
    words = ["psql", "-d", url.database or "postgres"]
    for option, value in (("-h", url.host), ("-p", url.port), ("-U", url.username)):
        words += [option, str(value)] if value else []
    return join([*words, "-c"])
