"""How many messages of each group and queue are in each state, without a look at the messages.

Triggers of the database keep it, whichever program writes the messages. In PostgreSQL each statement appends what it
changes to `dlq_count_changes`, so that no job waits for another one, and the monitor adds it to `dlq_counts`. Whoever
reads adds up both, so that the numbers are right at any moment. In SQLite, which has one writer at a time, each row
goes into `dlq_counts` at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    FromClause,
    Integer,
    ScalarSelect,
    Select,
    Subquery,
    Table,
    Text,
    and_,
    case,
    cast,
    func,
    literal,
    not_,
    or_,
    select,
    text,
    union_all,
)
from sqlalchemy.sql import ColumnCollection

from dlqbatch.store.bulk import in_list
from dlqbatch.store.column_types import Name
from dlqbatch.store.scope_name import EVERY
from dlqbatch.store.scopes import is_every, own, scope_of
from dlqbatch.store.states import Status
from dlqbatch.store.tables import MESSAGES, SCOPES, metadata

COUNTS: Final = Table(
    "dlq_counts",
    metadata,
    Column("scope_id", Integer, primary_key=True, autoincrement=False),
    Column("fingerprint", Name, primary_key=True),
    Column("origin_queue", Name, primary_key=True),
    *(Column(status.value, Integer, nullable=False, server_default=text("0")) for status in Status),
)
"""The sums. A message without a queue has the queue ''. A row of the scope 0 says that all messages are in them."""
CHANGES: Final = Table(
    "dlq_count_changes",
    metadata,
    Column("scope_id", Integer, nullable=False),
    Column("fingerprint", Name, nullable=False),
    Column("origin_queue", Name, nullable=False),
    *(Column(status.value, Integer) for status in Status),
    *(Column(name, Name) for name in ("error_type", "event", "source")),
)
"""What was added to each state, or less than zero where messages left it, since the last time that it was added up."""
FACETS: Final = ("error_type", "event", "source")
FACET_COUNTS: Final = Table(
    "dlq_facet_counts",
    metadata,
    Column("scope_id", Integer, primary_key=True, autoincrement=False),
    *(Column(name, Name, primary_key=True) for name in ("fingerprint", "origin_queue", *FACETS)),
    *(Column(status.value, Integer, nullable=False, server_default=text("0")) for status in Status),
)
"""The same sums by error type, event and publisher too; '' where there is none, and the beginning of a long one."""
LONGEST_FACET: Final = 150
_MOST_FACETS: Final = 50_000
"""With more sums than these, of an event that is another one for each message, say, indexes find messages faster."""

NO_SCOPE: Final = 0
IS_COUNTED: Final = select(COUNTS.c.scope_id).where(COUNTS.c.scope_id == NO_SCOPE)
"""Finds a row once all messages are in the counts, also those that were there before the triggers."""
IS_COUNTED_BY_FACET: Final = select(FACET_COUNTS.c.scope_id).where(FACET_COUNTS.c.scope_id == NO_SCOPE)
_M: Final = MESSAGES.c


class Since(NamedTuple):
    recent: datetime
    before: datetime


Columns = ColumnCollection[str, Any]


class Where(NamedTuple):
    """What filters say about the counts: their conditions, and whether these need the counts by facet."""

    conditions: Callable[[Columns], list[ColumnElement[bool]]]
    needs_facets: bool = False


class Whose(NamedTuple):
    """Whose messages are counted."""

    scope: str | None
    """The broker and virtual host; `all` of every one; None where no run has named any."""
    elsewhere: int
    """How many messages of other deployments the database holds."""


class Figures(NamedTuple):
    """Of the messages of a group in one state."""

    status: Status
    messages: int
    first: datetime
    last: datetime
    recent: int
    """How many arrived since that time."""
    before: int
    """How many arrived since that time, and not recently."""


def whose(connection: Connection) -> Whose:
    if is_every(connection):
        return Whose(EVERY, 0)
    mine = scope_of(connection)
    names = dict(connection.execute(select(SCOPES.c.id, SCOPES.c.name)).all())
    if not names.keys() - {mine}:
        return Whose(names.get(mine), 0)
    if connection.scalar(IS_COUNTED) is None:
        rest = connection.scalar(select(func.count()).select_from(MESSAGES).where(_M.scope_id != mine))
        return Whose(names.get(mine), int(rest or 0))
    others = (
        select(*(table.c[status] for status in Status)).where(table.c.scope_id.not_in((mine, NO_SCOPE)))
        for table in (COUNTS, CHANGES)
    )
    source = union_all(*others).subquery("others")
    number = sum((_sum(source, status) for status in Status), start=cast(0, Integer))
    return Whose(names.get(mine), int(connection.scalar(select(number)) or 0))


def states_and_groups(connection: Connection, together: Iterable[Status]) -> tuple[dict[Status, int], int]:
    """How many messages are in each state, and how many groups have messages in one of these."""
    source = _source(connection)
    of_group = [_sum(source, status).label(status.value) for status in Status]
    groups = select(*of_group).group_by(source.c.fingerprint).subquery()
    has_some = case((sum((groups.c[status] for status in together), start=cast(0, Integer)) > 0, 1))
    *numbers, some = connection.execute(
        select(*(_sum(groups, status) for status in Status), func.count(has_some))
    ).one()
    return {status: int(number) for status, number in zip(Status, numbers, strict=True)}, int(some)


def sizes(connection: Connection, statuses: Iterable[Status], where: Where | None = None) -> Select[Any]:
    """The fingerprint and the `size` of each group with messages in these states: how many it has there."""
    source = _source(connection, by_facet=where is not None and where.needs_facets)
    size = sum((_sum(source, status) for status in statuses), start=cast(0, Integer))
    found = select(source.c.fingerprint, size.label("size")).group_by(source.c.fingerprint).having(size > 0)
    return found if where is None else found.where(*where.conditions(source.c))


def groups_of_queue(connection: Connection, queue: str, limit: int) -> list[str]:
    """The fingerprints of the groups with messages in this queue, the largest group first."""
    source = _source(connection)
    size = sum((_sum(source, status) for status in Status), start=cast(0, Integer))
    query = select(source.c.fingerprint).where(source.c.origin_queue == queue).group_by(source.c.fingerprint)
    return list(connection.scalars(query.having(size > 0).order_by(size.desc(), source.c.fingerprint).limit(limit)))


def queues_of_group(connection: Connection, fingerprint: str, limit: int) -> list[str]:
    """The queues in which messages of a group failed, in the order of their names."""
    source = _source(connection)
    size = sum((_sum(source, status) for status in Status), start=cast(0, Integer))
    query = select(source.c.origin_queue).where(source.c.fingerprint == fingerprint).group_by(source.c.origin_queue)
    return list(connection.scalars(query.having(size > 0).order_by(source.c.origin_queue).limit(limit)))


def largest(
    connection: Connection,
    statuses: Sequence[Status],
    limit: int,
    where: Where,
    *,
    by_queue: bool,
    since: Since | None,
) -> tuple[dict[tuple[str, ...], list[Figures]], int] | None:
    """The groups with most messages in these states, or the groups and queues: each by state. And how many there are.

    None where only a part of the messages of a group in a queue meets the conditions: their times are not known here.
    """
    source = _source(connection, by_facet=where.needs_facets)
    has_some = or_(*(source.c[status] != 0 for status in statuses))
    conditions = where.conditions(source.c)
    wanted = (*conditions, has_some)
    sums = [_sum(source, status).label(status.value) for status in statuses]
    size = sum(sums, start=cast(0, Integer))
    divided = (source.c.fingerprint, source.c.origin_queue)[: 1 + by_queue]
    groups = select(*divided, func.count().over()).where(*wanted).group_by(*divided).having(size > 0)
    top = connection.execute(groups.order_by(size.desc(), *divided).limit(limit)).all()
    found: dict[tuple[str, ...], list[Figures]] = {tuple(row[:-1]): [] for row in top}
    if not found:
        return found, 0
    shown = in_list(connection, source.c.fingerprint, {group[0] for group in found})
    key = (source.c.scope_id, source.c.fingerprint, source.c.origin_queue)
    if where.needs_facets:
        others = select(*key[1:]).where(shown, has_some, not_(and_(*conditions))).group_by(*key).having(size > 0)
        if {tuple(other)[: 1 + by_queue] for other in connection.execute(others)} & found.keys():
            return None
    kept = select(*key, *sums).where(*wanted, shown).group_by(*key).cte("kept")
    of_states = (
        select(
            *(kept.c[each.name] for each in key),
            literal(status, Text).label("status"),
            kept.c[status].label("messages"),
        ).where(kept.c[status] != 0)
        for status in statuses
    )
    keys = union_all(*of_states).subquery("keys")
    seen = union_all(*(_looks(keys, since, no_queue=no_queue) for no_queue in (False, True))).subquery("seen").c
    figures = (
        func.sum(seen.messages),
        func.min(seen.first),
        func.max(seen.last),
        func.sum(seen.recent),
        func.sum(seen.before),
    )
    by = (seen.fingerprint, seen.origin_queue, seen.status) if by_queue else (seen.fingerprint, seen.status)
    for *group, status, messages, first, last, recent, before in connection.execute(
        select(*by, *figures).group_by(*by)
    ):
        if (lines := found.get(tuple(group))) is not None and first is not None:
            lines.append(Figures(Status(status), int(messages), first, last, int(recent), int(before)))
    return found, top[0][-1]


def _looks(keys: Subquery, since: Since | None, *, no_queue: bool) -> Select[Any]:
    """For each key when its first and its last message arrived, and how many lately: looks at one index.

    With `no_queue` for the keys without one alone, whose messages were counted already: no index finds at once what
    may be NULL or not.
    """
    in_queue = _M.origin_queue.is_(None) if no_queue else _M.origin_queue == keys.c.origin_queue
    these = [*(_M[name] == keys.c[name] for name in ("scope_id", "fingerprint", "status")), in_queue]

    def end(*order: ColumnElement[Any]) -> ScalarSelect[Any]:
        # By the queue too, as the index is: that it is NULL does not tell PostgreSQL that it is always the same.
        return select(_M.created_at).where(*these).order_by(*order).limit(1).correlate(keys).scalar_subquery()

    def number(*conditions: ColumnElement[bool]) -> ScalarSelect[Any]:
        return select(func.count()).select_from(MESSAGES).where(*these, *conditions).correlate(keys).scalar_subquery()

    lately: tuple[ColumnElement[int], ...] = (literal(0), literal(0))
    if since is not None:
        is_before = and_(_M.created_at >= since.before, _M.created_at < since.recent)
        lately = number(_M.created_at >= since.recent), number(is_before)
    seen = select(
        *(keys.c.fingerprint, keys.c.origin_queue, keys.c.status),
        (literal(0) if no_queue else keys.c.messages).label("messages"),
        end(_M.origin_queue, _M.created_at).label("first"),
        end(_M.origin_queue.desc(), _M.created_at.desc()).label("last"),
        *(number.label(name) for name, number in zip(("recent", "before"), lately, strict=True)),
    )
    return seen.where(keys.c.origin_queue == "") if no_queue else seen


def number(connection: Connection, statuses: Sequence[Status], where: Where) -> int:
    """How many messages are in these states."""
    source = _source(connection, by_facet=where.needs_facets)
    size = sum((_sum(source, status) for status in statuses), start=cast(0, Integer))
    return int(connection.scalar(select(size).select_from(source).where(*where.conditions(source.c))) or 0)


def has_facets(connection: Connection) -> bool:
    """Whether all messages are counted by facet, and the sums are so few that it is cheap to read them."""
    many = select(literal(1)).select_from(FACET_COUNTS).offset(_MOST_FACETS).limit(1).scalar_subquery()
    return connection.execute(select(many).where(IS_COUNTED_BY_FACET.exists())).all() == [(None,)]


def _source(connection: Connection, *, by_facet: bool = False) -> Subquery:
    """All that adds up to the counts of the scope; until they are there, the messages themselves."""
    if by_facet:
        names = ("scope_id", "fingerprint", "origin_queue", *Status)
        of_facets = [
            select(*(table.c[name] for name in names), *facets)
            for table, facets in (
                (FACET_COUNTS, [FACET_COUNTS.c[name] for name in FACETS]),
                (CHANGES, [func.coalesce(CHANGES.c[name], "").label(name) for name in FACETS]),
            )
        ]
        tables = (FACET_COUNTS, CHANGES)
        mine = (each.where(own(connection, table.c.scope_id)) for each, table in zip(of_facets, tables, strict=True))
        return union_all(*mine).subquery("counts")
    if connection.scalar(IS_COUNTED) is None:
        number = (cast(func.sum(case((_M.status == status, 1), else_=0)), Integer).label(status) for status in Status)
        queue = func.coalesce(_M.origin_queue, "").label("origin_queue")
        rows = select(_M.scope_id, _M.fingerprint, queue, *number).where(own(connection))
        return rows.group_by(_M.scope_id, _M.fingerprint, queue).subquery("counts")
    parts = (
        select(*(table.c[column.name] for column in COUNTS.c)).where(own(connection, table.c.scope_id))
        for table in (COUNTS, CHANGES)
    )
    return union_all(*parts).subquery("counts")


def _sum(source: FromClause, status: Status) -> ColumnElement[int]:
    return func.coalesce(func.sum(source.c[status]), 0)
