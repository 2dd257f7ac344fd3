"""Looking at dead messages: page by page, by group, one in full. No query walks the whole table.

What no index can answer (a text anywhere, a count of what a filter leaves) looks at a bounded number of rows, the
newest first, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import ColumnElement, func, literal, or_, select, tuple_

from dlqbatch.deadstore.column_types import BIGINT, Time
from dlqbatch.deadstore.record import SUMMARY, Attempt, Content, Detail, Record, Transition
from dlqbatch.deadstore.tables import ATTEMPTS, MESSAGES, TRANSITIONS
from dlqbatch.deadstore.text import visible
from dlqbatch.policy.lifecycle import Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from sqlalchemy import Connection

WAITING: Final = (Status.PENDING, Status.PROCESSING, Status.MANUAL, Status.FAILED)
"""What is not over yet."""
LOOKED_THROUGH: Final = 50_000
COUNTED: Final = 200_000
_ESCAPE: Final = "\\"
_M: Final = MESSAGES.c
_SEARCHED: Final = (_M.error_type, _M.error_message, _M.error_stack, _M.identity, _M.message_id, _M.reason)


@dataclass(frozen=True, slots=True)
class Filters:
    """What all must hold; an empty field asks for nothing."""

    error_type: str | None = None
    group: str | None = None
    """A fingerprint."""
    event: str | None = None
    origin: str | None = None
    """The queue it failed in."""
    statuses: tuple[Status, ...] = ()
    since: datetime | None = None
    """Of `created_at`, inclusive."""
    until: datetime | None = None
    """Exclusive."""
    text: str | None = None
    """Somewhere in the failure, the reason or an id; upper and lower case are the same, in SQLite for ASCII."""

    def conditions(self) -> list[ColumnElement[bool]]:
        """All but the text."""
        equal = {
            _M.error_type: self.error_type,
            _M.fingerprint: self.group,
            _M.event: self.event,
            _M.origin_queue: self.origin,
        }
        found: list[ColumnElement[bool]] = [column == value for column, value in equal.items() if value is not None]
        if self.statuses:
            found.append(_M.status.in_(self.statuses))
        if self.since is not None:
            found.append(_M.created_at >= self.since)
        if self.until is not None:
            found.append(_M.created_at < self.until)
        return found


class Place(NamedTuple):
    """Where a page ended; the next one begins behind it."""

    created_at: datetime
    id: int


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


def find(connection: Connection, filters: Filters, limit: int = 50, after: Place | None = None) -> Page:
    """The newest first."""
    conditions = filters.conditions()
    if after is not None:
        conditions.append(_key() < _at(after))
    last = None
    if filters.text is not None:
        last = _nth(connection, conditions, LOOKED_THROUGH)
        if last is not None:
            conditions.append(_key() >= _at(last))
        conditions.append(mentions(filters.text))
    found = connection.execute(select(*SUMMARY).where(*conditions).order_by(*_newest()).limit(limit + 1))
    records = [Record(*row) for row in found]
    if len(records) > limit:
        records.pop()
        last = Place(records[-1].created_at, records[-1].id)
    return Page(tuple(records), last)


def groups(connection: Connection, filters: Filters, limit: int = 50) -> Groups:
    """Equal failures together; without a status, those that are not over yet."""
    statuses = filters.statuses or WAITING
    conditions = [*filters.conditions(), _M.status.in_(statuses)]
    edge = None
    if filters != Filters(statuses=filters.statuses):
        # An index holds status and fingerprint of every row, and nothing else: other filters must look at the rows.
        most = COUNTED if filters.text is None else LOOKED_THROUGH
        edge = _nth(connection, conditions, most)
        if edge is not None:
            conditions.append(_key() >= _at(edge))
        if filters.text is not None:
            conditions.append(mentions(filters.text))
    counted: dict[str, list[Any]] = {}
    for fingerprint, *numbers in connection.execute(
        select(_M.fingerprint, _M.status, func.count(), func.min(_M.created_at), func.max(_M.created_at))
        .where(*conditions)
        .group_by(_M.status, _M.fingerprint)
    ):
        counted.setdefault(fingerprint, []).append(numbers)
    largest = sorted(counted.items(), key=lambda item: (-sum(row[1] for row in item[1]), item[0]))[:limit]
    found = []
    for fingerprint, rows in largest:
        last = max(row[3] for row in rows)
        ours = select(*SUMMARY).where(*conditions, _M.fingerprint == fingerprint, _M.created_at == last)
        sample = Record(*connection.execute(ours.order_by(*_newest()).limit(1)).one())
        found.append(Group(fingerprint, {row[0]: row[1] for row in rows}, min(row[2] for row in rows), last, sample))
    return Groups(tuple(found), edge is None)


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
    """Where so many rows end, or None if there are not as many."""
    found = connection.execute(
        select(_M.created_at, _M.id).where(*conditions).order_by(*_newest()).offset(number - 1).limit(1)
    ).one_or_none()
    return found and Place(*found)


def mentions(text: str) -> ColumnElement[bool]:
    sought = visible(text).replace(_ESCAPE, _ESCAPE * 2).replace("%", _ESCAPE + "%").replace("_", _ESCAPE + "_")
    return or_(*(column.ilike(f"%{sought}%", escape=_ESCAPE) for column in _SEARCHED))
