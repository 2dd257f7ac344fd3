"""The groups as an inbox: for each failure and queue what it is doing, and what people decided about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Column, Connection, Engine, Subquery, func, select

from dlqbatch.groups.decisions import the_group
from dlqbatch.groups.state import BEFORE, RECENT, Acknowledged, Arrivals, GroupState, state_of
from dlqbatch.ingest.same_failure import description, groups_alike
from dlqbatch.messages.queries import CountedGroup, LargestGroups, Record, largest_groups, newest_of
from dlqbatch.messages.shown import masked_record
from dlqbatch.store import holds
from dlqbatch.store.access import StoreClock
from dlqbatch.store.action_tables import GROUPS
from dlqbatch.store.bulk import in_list, values_table
from dlqbatch.store.counts import Since
from dlqbatch.store.engine import reading
from dlqbatch.store.filters import Filters
from dlqbatch.store.scopes import own
from dlqbatch.store.states import Status
from dlqbatch.store.tables import MESSAGES
from dlqbatch.store.text import json_ready

_M: Final = MESSAGES.c
_G: Final = GROUPS.c
_Key = tuple[str, str]
_OLDEST_RESOLVED: Final = 100
"""An index knows when messages arrived, but not when they were resolved: so many rows of a group are read for that."""


@dataclass(frozen=True, slots=True)
class Decisions:
    """What people decided about the failure in this queue, or in all queues."""

    held_at: datetime | None = None
    held_by: str | None = None
    held_why: str | None = None
    note: str | None = None
    owner: str | None = None
    tags: tuple[str, ...] = ()
    acknowledged_by: str | None = None


@dataclass(frozen=True, slots=True)
class Line:
    group: str
    also: tuple[str, ...]
    """Other fingerprints of the same failure, as other programs describe it."""
    queue: str | None
    """None: only an exchange is known, which the sample names."""
    state: GroupState
    counts: Mapping[Status, int]
    first: datetime
    last: datetime
    recent: int
    """Messages of the last hour."""
    before: int
    """Messages of the 24 hours before that."""
    decisions: Decisions
    sample: Record
    """The newest message."""

    @property
    def size(self) -> int:
        return sum(self.counts.values())

    @property
    def trend(self) -> str:
        """The last hour beside an hour of the day before it."""
        usual = self.before / (BEFORE / RECENT)
        return "up" if self.recent > usual else "down" if self.recent < usual else "level"

    def as_dict(self) -> dict[str, object]:
        found = json_ready(self)
        assert isinstance(found, dict)  # noqa: S101  (of a dataclass)
        return found | {"size": self.size, "trend": self.trend}


@dataclass(frozen=True, slots=True)
class _Counted:
    """What a line is made of; the state of a line that is put together of several follows from all of them."""

    group: str
    queue: str | None
    counts: Mapping[Status, int]
    arrivals: Arrivals
    acknowledged: Acknowledged | None
    decisions: Decisions
    sample: Record
    also: tuple[str, ...] = ()

    def with_other(self, other: _Counted) -> _Counted:
        """This line with the messages of another description of the same failure."""
        mine, its = self.arrivals, other.arrivals
        statuses = dict.fromkeys((*self.counts, *other.counts))
        resolved = [each for each in (mine.resolved, its.resolved) if each is not None]
        acknowledged = self.acknowledged
        if acknowledged is not None and other.acknowledged is not None:
            arrived_since = acknowledged.arrived_since + other.acknowledged.arrived_since
            acknowledged = replace(acknowledged, arrived_since=arrived_since)
        return replace(
            self,
            counts={status: self.counts.get(status, 0) + other.counts.get(status, 0) for status in statuses},
            arrivals=Arrivals(
                min(mine.first, its.first),
                max(mine.last, its.last),
                mine.recent + its.recent,
                mine.before + its.before,
                min(resolved, default=None),
            ),
            acknowledged=acknowledged,
            also=(*self.also, other.group),
        )

    def line(self, now: datetime) -> Line:
        seen = self.arrivals
        return Line(
            self.group,
            self.also,
            self.queue,
            state_of(seen, self.acknowledged, now),
            self.counts,
            seen.first,
            seen.last,
            seen.recent,
            seen.before,
            self.decisions,
            self.sample,
        )


@dataclass(frozen=True, slots=True)
class Inbox:
    lines: tuple[Line, ...]
    """The largest group first."""
    is_complete: bool
    """False: only the newest messages were counted."""
    total: int
    """How many lines there are, shown or not."""

    def as_dict(self) -> dict[str, object]:
        lines = [line.as_dict() for line in self.lines]
        return {"groups": lines, "is_complete": self.is_complete, "total": self.total}


def inbox(engine: Engine, filters: Filters, limit: int = 50, now: datetime | None = None) -> Inbox:
    """Equal failures together, by queue; without a status, those that are not over yet."""
    now = StoreClock(engine)() if now is None else now
    since = Since(now - RECENT, now - RECENT - BEFORE)
    with reading(engine, is_snapshot=True) as connection:
        largest = largest_groups(connection, filters, limit, by_queue=True, since=since)
        decided = _decisions(connection, {group.fingerprint for group in largest.groups})
        samples = _newest(connection, largest)
        resolved = _first_resolved(connection, largest.groups)
        lines = []
        for group in largest.groups:
            key = group.fingerprint, group.queue
            sample = samples[key]
            name = group.queue or sample.origin_exchange or ""
            mine = [row for row in decided.get(group.fingerprint, ()) if row.queue in {"", name}]
            lines.append(
                _Counted(
                    group.fingerprint,
                    group.queue or None,
                    group.counts,
                    Arrivals(group.first, group.last, group.recent, group.before, resolved.get(key)),
                    _acknowledged(connection, mine, group.fingerprint),
                    _together(mine),
                    sample,
                )
            )
    merged = merge(lines)
    shown = tuple(each.line(now) for each in merged)
    return Inbox(shown, largest.is_complete, largest.total - len(lines) + len(merged))


def of_group(engine: Engine, word: str, now: datetime | None = None) -> Inbox:
    """The lines of one group, with those of the same failure in other descriptions, whatever state its messages are in.

    Beside a line of the group itself another group has none.
    """
    with reading(engine) as connection:
        fingerprint = the_group(connection, word)
        groups = (fingerprint, *groups_alike(connection, fingerprint))
    found = inbox(engine, Filters(groups=groups, statuses=tuple(Status)), now=now)
    lines = tuple(line for line in found.lines if fingerprint in {line.group, *line.also})
    return replace(found, lines=lines, total=len(lines))


def merge(lines: Sequence[_Counted]) -> list[_Counted]:
    """Put the lines of one failure together that programs describe in different ways; the largest line leads."""
    found: dict[tuple[object, ...], _Counted] = {}
    for line in lines:
        told = description(line.sample.error_type, line.sample.error_message)
        key = (line.group, line.queue) if told is None else (told, line.queue or line.sample.origin_exchange)
        lead = found.get(key)
        if lead is None or lead.decisions != line.decisions:
            found[key if lead is None else (line.group, line.queue)] = line
        else:
            found[key] = lead.with_other(line)
    return list(found.values())


def _newest(connection: Connection, largest: LargestGroups) -> dict[_Key, Record]:
    """The newest message of each group and queue, masked."""
    given = _keys(connection, largest.groups)
    keys = given.c
    in_queue = func.coalesce(_M.origin_queue, "") == func.coalesce(keys.origin_queue, "")
    these = (_M.fingerprint == keys.fingerprint, in_queue, _M.created_at == keys.created_at)
    rows = newest_of(connection, given, largest.conditions, these)
    return {(row.fingerprint, row.origin_queue or ""): masked_record(row) for row in rows}


def _first_resolved(connection: Connection, groups: Sequence[CountedGroup]) -> dict[_Key, datetime]:
    """When a message of each group and queue was first resolved, of the oldest that are."""
    found: dict[_Key, datetime] = {}
    for has_queue in (True, False):  # no index finds at once what may be NULL or not
        given = _keys(connection, [each for each in groups if bool(each.queue) is has_queue])
        keys = given.c
        in_queue = _M.origin_queue == keys.origin_queue if has_queue else _M.origin_queue.is_(None)
        these = (own(connection), _M.status == Status.RESOLVED, _M.fingerprint == keys.fingerprint, in_queue)
        oldest = select(_M.status_since).where(*these).order_by(_M.origin_queue, _M.created_at).limit(_OLDEST_RESOLVED)
        each = oldest.correlate(given).subquery()
        first = select(func.min(each.c.status_since)).scalar_subquery()
        for fingerprint, queue, at in connection.execute(select(keys.fingerprint, keys.origin_queue, first)):
            if at is not None:
                found[fingerprint, queue or ""] = at
    return found


def _keys(connection: Connection, groups: Sequence[CountedGroup]) -> Subquery:
    columns: dict[Column[Any], list[Any]] = {
        _M.fingerprint: [each.fingerprint for each in groups],
        _M.origin_queue: [each.queue or None for each in groups],
        _M.created_at: [each.last for each in groups],
    }
    return values_table(connection, columns)


def _decisions(connection: Connection, fingerprints: set[str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    these = (own(connection, _G.scope_id), in_list(connection, _G.fingerprint, fingerprints))
    for row in connection.execute(select(GROUPS).where(*these)):
        found.setdefault(row.fingerprint, []).append(row)
    return found


def _together(rows: Sequence[Any]) -> Decisions:
    """A decision about the failure in this queue before one about it in all queues."""
    nearest = sorted(rows, key=lambda row: row.queue == "")
    held = next((row for row in nearest if row.held_at is not None), None)
    noted = next((row for row in nearest if row.note is not None or row.owner is not None or row.tags), None)
    known = next((row for row in nearest if row.acknowledged_at is not None), None)
    return Decisions(
        held_at=held and held.held_at,
        held_by=held and held.held_by,
        held_why=held and held.held_why,
        note=noted and noted.note,
        owner=noted and noted.owner,
        tags=tuple(noted.tags) if noted is not None else (),
        acknowledged_by=known and known.acknowledged_by,
    )


def _acknowledged(connection: Connection, rows: Sequence[Any], fingerprint: str) -> Acknowledged | None:
    for row in sorted(rows, key=lambda row: row.queue == ""):
        if row.acknowledged_at is not None:
            since = select(func.count()).select_from(MESSAGES)
            since = since.where(own(connection), _M.fingerprint == fingerprint, _M.created_at > row.acknowledged_at)
            if row.queue:
                since = since.where(row.queue == holds.QUEUE)
            number = int(connection.scalar(since) or 0)
            return Acknowledged(row.acknowledged_at, row.acknowledged_until, row.acknowledged_more, number)
    return None
