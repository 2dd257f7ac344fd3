"""Looking at dead messages: page by page, by group, one in full. No query walks the whole table.

What no index can answer (a text anywhere, a count of what a filter leaves) looks at a bounded number of rows, the
newest first, and says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Final, NamedTuple

from sqlalchemy import Column, ColumnElement, Connection, Row, Subquery, and_, case, func, literal, or_, select, tuple_

from dlqbatch.store import counts, filter_conditions
from dlqbatch.store.bulk import in_list, values_table
from dlqbatch.store.column_types import BIGINT, Time
from dlqbatch.store.counts import Figures, Since
from dlqbatch.store.filters import Filters, Place
from dlqbatch.store.filters_on_counts import conditions_on_counts, seldom_together, states_of
from dlqbatch.store.journal import EDIT_OF, EDITED
from dlqbatch.store.states import Outcome, Status, Strategy
from dlqbatch.store.tables import ATTEMPTS, MESSAGES, TRANSITIONS

_M: Final = MESSAGES.c
WAITING: Final = (Status.PENDING, Status.PROCESSING, Status.MANUAL, Status.FAILED)
"""The states of messages that are not over yet."""
LOOKED_THROUGH: Final = 50_000
COUNTED: Final = 20_000


@dataclass(frozen=True, slots=True)
class Page:
    records: tuple[Record, ...]
    next: Place | None
    """None: there is nothing behind. A page with a text may be short, even empty, and still have a next one."""


@dataclass(frozen=True, slots=True)
class Group:
    fingerprint: str
    counts: Mapping[Status, int]
    first: datetime
    last: datetime
    sample: Record
    """The newest."""

    @property
    def size(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class Groups:
    groups: tuple[Group, ...]
    """The largest first."""
    is_complete: bool
    """False: only the newest rows were counted."""
    total: int
    """How many groups there are, shown or not."""


def find(connection: Connection, filters: Filters, limit: int = 50, after: Place | None = None) -> Page:
    """The newest first."""
    rows, place = page_of(connection, SUMMARY, filters, limit, after)
    return Page(tuple(Record(*row[: len(SUMMARY)]) for row in rows), place)


def page_of(
    connection: Connection,
    columns: Sequence[ColumnElement[Any]],
    filters: Filters,
    limit: int,
    after: Place | None = None,
) -> tuple[list[Row[*tuple[Any, ...]]], Place | None]:
    """These columns of the messages, the newest first, and the place where the page ended."""
    if (few := seldom_together(connection, filters)) == set():
        return [], None
    conditions = filter_conditions.conditions(connection, filters)
    conditions += [] if few is None else [in_list(connection, _M.fingerprint, few)]
    if after is not None:
        conditions.append(_key() < _at(after))
    last = None
    if texts := filter_conditions.text_conditions(filters):
        last = _nth(connection, conditions, LOOKED_THROUGH)
        if last is not None:
            conditions.append(_key() >= _at(last))
        conditions += texts
    place = (_M.created_at.label("place_at"), _M.id.label("place_id"))
    query = select(*columns, *place).where(*conditions).order_by(*_newest()).limit(limit + 1)
    rows = list(connection.execute(query))
    if len(rows) > limit:
        rows.pop()
        last = Place(rows[-1].place_at, rows[-1].place_id)
    return rows, last


def groups(connection: Connection, filters: Filters, limit: int = 50) -> Groups:
    """Equal failures together; without a status, those that are not over yet."""
    largest = largest_groups(connection, filters, limit)
    columns: dict[Column[Any], list[Any]] = {
        _M.fingerprint: [each.fingerprint for each in largest.groups],
        _M.created_at: [each.last for each in largest.groups],
    }
    given = values_table(connection, columns)
    these = (_M.fingerprint == given.c.fingerprint, _M.created_at == given.c.created_at)
    samples = {each.fingerprint: each for each in newest_of(connection, given, largest.conditions, these)}
    found = (
        Group(each.fingerprint, each.counts, each.first, each.last, samples[each.fingerprint])
        for each in largest.groups
    )
    return Groups(tuple(found), largest.is_complete, largest.total)


def newest_of(
    connection: Connection,
    given: Subquery,
    conditions: Sequence[ColumnElement[bool]],
    these: Sequence[ColumnElement[bool]],
) -> list[Record]:
    """The newest message for each row of a table of values, which `these` conditions compare with the messages."""
    newest = select(_M.id).where(*conditions, *these).order_by(_M.id.desc()).limit(1)
    ids = list(connection.scalars(select(newest.correlate(given).scalar_subquery()).select_from(given)))
    return [Record(*row) for row in connection.execute(select(*SUMMARY).where(in_list(connection, _M.id, ids)))]


class CountedGroup(NamedTuple):
    """A group, or its messages in one queue; the numbers of those in the states that are asked for."""

    fingerprint: str
    queue: str
    """'': none is known, or all of them."""
    counts: dict[Status, int]
    first: datetime
    last: datetime
    recent: int
    before: int


class LargestGroups(NamedTuple):
    groups: list[CountedGroup]
    conditions: list[ColumnElement[bool]]
    """The conditions that the counted messages meet."""
    is_complete: bool
    total: int
    """How many there are."""


def largest_groups(
    connection: Connection, filters: Filters, limit: int, *, by_queue: bool = False, since: Since | None = None
) -> LargestGroups:
    """The groups with most messages. The transaction has to be one snapshot."""
    statuses = states_of(filters, WAITING)
    conditions = [*filter_conditions.conditions(connection, filters), _M.status.in_(statuses)]
    if not statuses:
        return LargestGroups([], conditions, is_complete=True, total=0)
    where = conditions_on_counts(connection, filters)
    counted = where and counts.largest(connection, statuses, limit, where, by_queue=by_queue, since=since)
    if counted is not None:
        groups = [_counted_group(key, figures) for key, figures in counted[0].items() if figures]
        return LargestGroups(groups, conditions, is_complete=True, total=counted[1])
    # An index holds status, fingerprint and queue of every row: other filters must look at the rows.
    texts = filter_conditions.text_conditions(filters)
    edge = _nth(connection, conditions, COUNTED)
    if edge is not None:
        conditions.append(_key() >= _at(edge))
    conditions += texts
    key = (_M.fingerprint, func.coalesce(_M.origin_queue, ""))[: 1 + by_queue]
    numbers = (_M.status, func.count(), func.min(_M.created_at), func.max(_M.created_at), *_lately(since))
    rows: dict[tuple[str, ...], list[Figures]] = {}
    for row in connection.execute(select(*key, *numbers).where(*conditions).group_by(*key, _M.status)):
        rows.setdefault(tuple(row[: len(key)]), []).append(Figures(*row[len(key) :]))
    top = sorted(rows.items(), key=lambda each: (-sum(figures.messages for figures in each[1]), *each[0]))[:limit]
    return LargestGroups([_counted_group(*each) for each in top], conditions, edge is None, len(rows))


def _lately(since: Since | None) -> tuple[ColumnElement[int], ColumnElement[int]]:
    if since is None:
        return literal(0), literal(0)
    is_recent = _M.created_at >= since.recent
    is_before = and_(_M.created_at >= since.before, _M.created_at < since.recent)
    return func.sum(case((is_recent, 1), else_=0)), func.sum(case((is_before, 1), else_=0))


def _counted_group(key: tuple[str, ...], figures: Sequence[Figures]) -> CountedGroup:
    numbers = {each.status: each.messages for each in figures}
    return CountedGroup(
        key[0],
        key[1] if len(key) > 1 else "",
        {status: numbers[status] for status in Status if status in numbers},
        min(each.first for each in figures),
        max(each.last for each in figures),
        sum(each.recent for each in figures),
        sum(each.before for each in figures),
    )


def get(connection: Connection, row_id: int) -> Detail | None:
    row = connection.execute(select(*SUMMARY, _M.body, _M.properties).where(_M.id == row_id)).one_or_none()
    if row is None:
        return None
    *summary, body, properties = row
    attempts = connection.execute(
        select(*(ATTEMPTS.c[name] for name in Attempt.__slots__))
        .where(ATTEMPTS.c.message_id == row_id)
        .order_by(ATTEMPTS.c.number)
    )
    transitions = connection.execute(
        select(*(TRANSITIONS.c[name] for name in Transition.__slots__))
        .where(TRANSITIONS.c.message_id == row_id)
        .order_by(TRANSITIONS.c.id)
    )
    return Detail(
        Record(*summary),
        Content(body, properties),
        tuple(Attempt(*attempt) for attempt in attempts),
        tuple(Transition(*transition) for transition in transitions),
    )


def content(connection: Connection, row_ids: Iterable[int]) -> dict[int, Content]:
    """Bodies and properties by row id; the caller, who knows each `body_size`, asks for what fits in memory."""
    found = connection.execute(select(_M.id, _M.body, _M.properties).where(_M.id.in_(list(row_ids))))
    return {row_id: Content(body, properties) for row_id, body, properties in found}


def _key() -> ColumnElement[Any]:
    return tuple_(_M.created_at, _M.id)


def _at(place: Place) -> ColumnElement[Any]:
    return tuple_(literal(place.created_at, Time), literal(place.id, BIGINT))


def _newest() -> tuple[ColumnElement[Any], ColumnElement[Any]]:
    return _M.created_at.desc(), _M.id.desc()


def _nth(connection: Connection, conditions: list[ColumnElement[bool]], number: int) -> Place | None:
    """The place where so many rows end, or None if there are not as many."""
    found = connection.execute(
        select(_M.created_at, _M.id).where(*conditions).order_by(*_newest()).offset(number - 1).limit(1)
    ).one_or_none()
    return found and Place(*found)


@dataclass(frozen=True, slots=True)
class Record:
    """A dead message without its body and properties, which may be large: `messages.content` has those."""

    id: int
    identity: str
    digest: bytes
    had_id: bool
    parent: str | None
    source_queue: str
    exchange: str
    routing_key: str
    message_id: str | None
    origin_queue: str | None
    origin_exchange: str | None
    origin_key: str | None
    event: str | None
    reason: str | None
    error_type: str | None
    error_message: str | None
    error_stack: str | None
    fingerprint: str
    retry_count: int
    dlq_retry_count: int
    first_failed_at: datetime
    last_failed_at: datetime
    status: Status
    status_since: datetime
    strategy: Strategy | None
    lock_owner: str | None
    lock_token: str | None
    locked_at: datetime | None
    lease_until: datetime | None
    next_retry_at: datetime | None
    priority: int
    tags: list[str]
    source: str | None
    system_state: Mapping[str, Any]
    plan_id: int | None
    possible_duplicate: bool
    created_at: datetime
    updated_at: datetime
    body_size: int


SUMMARY: Final[tuple[ColumnElement[Any], ...]] = tuple(
    func.length(MESSAGES.c.body) if field.name == "body_size" else MESSAGES.c[field.name] for field in fields(Record)
)
"""What a query selects to make a Record of each row."""


@dataclass(frozen=True, slots=True)
class Attempt:
    number: int
    strategy: Strategy | None
    worker: str
    created_at: datetime
    sent_at: datetime | None
    closed_at: datetime | None
    outcome: Outcome | None
    acknowledged_at: datetime | None = None
    """The time by which a consumer had acknowledged it."""
    proof: str | None = None
    """How that is known."""


@dataclass(frozen=True, slots=True)
class Transition:
    from_status: Status | None
    to_status: Status
    at: datetime
    actor: str
    reason: str


@dataclass(frozen=True, slots=True)
class Content:
    """The exact bytes as delivered."""

    body: bytes
    properties: bytes


@dataclass(frozen=True, slots=True)
class Detail:
    record: Record
    content: Content
    attempts: tuple[Attempt, ...]
    transitions: tuple[Transition, ...]


# --- Messages that are one piece of work: an edit, what it took the place of, and what took its place in turn

# The journal names them by id, also after the row is deleted. The column `parent` names them by identity, which stays
# the same when a message comes back from cold storage with another id.

_LINK: Final = re.compile(f"(?:{EDIT_OF}|{EDITED})(\\d{{1,18}}) ")
# Messages of one piece of work that are looked at.
_MOST: Final = 100
_T: Final = TRANSITIONS.c
# The condition that a step of the journal was written by an edit.
BY_EDIT: Final[ColumnElement[bool]] = or_(
    _T.reason.startswith(EDIT_OF, autoescape=True), _T.reason.startswith(EDITED, autoescape=True)
)


class LinkedMessage(NamedTuple):
    row_id: int
    status: Status | None
    """None: it is deleted."""

    @property
    def is_in_the_way(self) -> bool:
        """It may go out too, or it was handled: only what is resolved, or was archived for long, is ever deleted."""
        return self.status is not Status.ARCHIVED


def with_edits(connection: Connection, row_ids: Iterable[int]) -> set[int]:
    """Messages that an edit made or replaced."""
    return set(connection.scalars(select(_T.message_id).where(in_list(connection, _T.message_id, row_ids), BY_EDIT)))


def was_edited(connection: Connection, row_id: int) -> bool:
    """Whether an edit took the place of this message."""
    lines = select(_T.id).where(_T.message_id == row_id, _T.reason.startswith(EDITED, autoescape=True))
    return connection.scalar(lines.limit(1)) is not None


def linked_by_edits(connection: Connection, row_id: int) -> list[LinkedMessage]:
    """The messages that stand for the same work as this one; first those that may go out as well, newest first."""
    found: dict[int, Status | None] = {}
    ahead = [row_id]
    while ahead and len(found) < _MOST:
        this = ahead.pop()
        if this not in found:
            row = connection.execute(select(_M.identity, _M.parent, _M.status).where(_M.id == this)).one_or_none()
            found[this] = None if row is None else row.status
            ahead += [] if row is None else _linked_directly(connection, this, row.identity, row.parent)
    del found[row_id]
    linked = [LinkedMessage(*one) for one in found.items()]
    return sorted(linked, key=lambda one: (not one.is_in_the_way, one.status is None, -one.row_id))


def _linked_directly(connection: Connection, row_id: int, identity: str, parent: str | None) -> Iterator[int]:
    """The ids of messages that an edit connects with this one directly."""
    reasons = connection.scalars(select(_T.reason).where(_T.message_id == row_id, BY_EDIT)).all()
    yield from (int(found[1]) for reason in reasons if (found := _LINK.match(reason)))
    arrived_by_edit = select(_T.id).where(_T.message_id == _M.id, _T.from_status.is_(None), BY_EDIT).exists()
    yield from connection.scalars(select(_M.id).where(_M.parent == identity, arrived_by_edit).limit(_MOST))
    if parent is not None and any(reason.startswith(EDIT_OF) for reason in reasons):
        yield from connection.scalars(select(_M.id).where(_M.identity == parent))
