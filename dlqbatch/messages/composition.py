"""What the messages of a group are: their errors, queues, events and sizes, and whether they were tried before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final

from sqlalchemy import ColumnElement, Connection, and_, func, select

from dlqbatch.store.bulk import in_list
from dlqbatch.store.counts import Columns, Where, largest
from dlqbatch.store.scopes import own
from dlqbatch.store.states import Status
from dlqbatch.store.tables import ATTEMPTS, MESSAGES

_M: Final = MESSAGES.c
LOOKED_AT: Final = 2_000
"""The newest messages of a group that are looked at; its counts by state are exact."""
_NAMED: Final = 8


@dataclass(frozen=True, slots=True)
class Composition:
    by_status: Mapping[Status, int]
    first: datetime | None
    last: datetime | None
    parts: Mapping[str, Mapping[str, int]]
    """The most frequent values of error type, queue, event and publisher."""
    samples: Mapping[str, int]
    """The ids of the newest, the smallest and the largest."""
    sizes: tuple[int, int]
    """The sizes of the smallest and the largest body, in bytes."""
    hours: Sequence[int]
    """Arrivals in each of the last 24 hours, the oldest hour first."""
    tried: Mapping[str, int]
    """The outcomes of retries of the newest messages; `open` while one is not known."""
    is_complete: bool
    """False: the parts, samples and hours are of the newest messages only."""

    @property
    def total(self) -> int:
        return sum(self.by_status.values())


def composition(connection: Connection, fingerprint: str, now: datetime) -> Composition:
    """The transaction has to be one snapshot."""
    of_group = and_(_M.fingerprint == fingerprint, own(connection))
    these = partial(_is_this, fingerprint)
    counted = largest(connection, tuple(Status), 1, Where(these), by_queue=False, since=None)
    states = [figures for each in counted[0].values() for figures in each] if counted else []
    columns = (_M.id, _M.error_type, _M.origin_queue, _M.event, _M.source, _M.created_at)
    newest = connection.execute(
        select(*columns, func.length(_M.body).label("size"))
        .where(of_group)
        .order_by(_M.created_at.desc(), _M.id.desc())
        .limit(LOOKED_AT)
    ).all()
    parts = {
        name: _most(row[column] for row in newest)
        for name, column in (("error type", 1), ("queue", 2), ("event", 3), ("published by", 4))
    }
    by_size = sorted(newest, key=lambda row: (row.size, row.id))
    hours = [0] * 24
    for row in newest:
        age = int((now - row.created_at).total_seconds() // 3600)
        if age < len(hours):
            hours[min(len(hours) - 1 - age, len(hours) - 1)] += 1
    return Composition(
        {each.status: each.messages for each in states},
        min((each.first for each in states), default=None),
        max((each.last for each in states), default=None),
        parts,
        {"newest": newest[0].id, "smallest": by_size[0].id, "largest": by_size[-1].id} if newest else {},
        (by_size[0].size, by_size[-1].size) if newest else (0, 0),
        hours,
        _tried(connection, [row.id for row in newest]),
        len(newest) < LOOKED_AT,
    )


def _is_this(fingerprint: str, columns: Columns) -> list[ColumnElement[bool]]:
    return [columns.fingerprint == fingerprint]


def _most(values: Iterable[str | None]) -> dict[str, int]:
    return dict(Counter(value for value in values if value is not None).most_common(_NAMED))


def _tried(connection: Connection, row_ids: Sequence[int]) -> dict[str, int]:
    found = (
        select(ATTEMPTS.c.outcome, func.count())
        .where(in_list(connection, ATTEMPTS.c.message_id, list(row_ids)))
        .group_by(ATTEMPTS.c.outcome)
    )
    return {outcome or "open": int(number) for outcome, number in connection.execute(found)}
