"""The database: reached, of this version, and its rows in order."""

from __future__ import annotations

from collections import defaultdict
from shlex import quote
from typing import TYPE_CHECKING

from dlqbatch.policy.doctor import commands
from dlqbatch.policy.doctor.broker import SKEW, SYNCHRONISE, ahead
from dlqbatch.policy.doctor.finding import Code, Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dlqbatch.policy.doctor.facts import DatabaseFacts
    from dlqbatch.policy.events import EventRow

_TABLE = "dlq_event_config"
_UPGRADE = "dlqbatch db upgrade"


def examine(stored: DatabaseFacts) -> Iterator[Finding]:
    if not stored.is_there:
        return
    if stored.unreachable is not None:
        fix = "dlqbatch db current"
        yield Finding(Code.DATABASE_UNREACHABLE, stored.where, f"{stored.unreachable}. Without it no job runs", fix)
        return
    if stored.skew is not None and abs(stored.skew) > SKEW:
        what = f"its clock is {ahead(stored.skew)} ours; the dead store counts by its own, headers and logs by ours"
        yield Finding(Code.CLOCK_SKEW_DATABASE, stored.where, what, SYNCHRONISE)
    yield from _schema(stored)
    if stored.unreadable is not None:
        what = f"the policy cannot be read, so a drain moves nothing: {stored.unreadable}"
        yield Finding(Code.POLICY_UNREADABLE, stored.where, what, "dlqbatch events list")
    yield from _rows(stored, stored.rows or ())
    for rule in stored.broken_rules:
        what = f"no run asks this rule: {rule.problem}"
        yield Finding(Code.RULE_BROKEN, rule.name, what, f"dlqbatch rules remove -- {quote(rule.name)}")


def _schema(stored: DatabaseFacts) -> Iterator[Finding]:
    if stored.version is None:
        what = "there is no dead store: a drain needs none, ingest and the jobs after it do"
        yield Finding(Code.SCHEMA_MISSING, stored.where, what, _UPGRADE)
    elif not stored.is_known:
        what = f"its schema is {stored.version}, which this program does not know: it is older than the database"
        yield Finding(Code.SCHEMA_UNKNOWN, stored.where, what, "pip install --upgrade dlqbatch")
    elif stored.version != stored.newest:
        what = f"its schema is {stored.version}, this program works with {stored.newest}"
        yield Finding(Code.SCHEMA_OLD, stored.where, what, _UPGRADE)


def _rows(stored: DatabaseFacts, rows: Iterable[EventRow]) -> Iterator[Finding]:
    named: defaultdict[str, list[EventRow]] = defaultdict(list)
    nameless = []
    for row in rows:
        if row.name is None:
            nameless.append(row.id)
        else:
            named[row.name].append(row)
    if nameless:
        what = f"{len(nameless)} rows have no name and are ignored: {', '.join(map(str, nameless[:10]))}"
        fix = commands.sql(stored.client, f"DELETE FROM {_TABLE} WHERE name IS NULL")  # noqa: S608  (its own name)
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
