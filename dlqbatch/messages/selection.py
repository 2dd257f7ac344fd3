"""Which messages a person means by a filter, and how they are divided: this is shown before many of them change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sqlalchemy import Connection, Engine, select

from dlqbatch.errors import DlqbatchError
from dlqbatch.messages.queries import page_of
from dlqbatch.store.bulk import in_list
from dlqbatch.store.engine import keeping, reading
from dlqbatch.store.filter_conditions import IS_EDIT, near, values_not_found
from dlqbatch.store.filters import Filters
from dlqbatch.store.scopes import own
from dlqbatch.store.states import Status
from dlqbatch.store.tables import MESSAGES

UNEXPECTED: Final = 100
"""More messages than these are changed only by somebody who says how many there are."""
_PAGE: Final = 1_000
_M: Final = MESSAGES.c
_COLUMNS: Final = (
    *(_M.id, _M.fingerprint, _M.origin_queue, _M.origin_exchange, _M.event, _M.status, _M.plan_id),
    IS_EDIT.label("is_edit"),
)


@dataclass(slots=True)
class Split:
    """How many messages of which kind a selection holds."""

    total: int = 0
    groups: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    """The messages of each group that failed in each queue or exchange."""
    events: Counter[str | None] = field(default_factory=Counter)
    states: Counter[Status] = field(default_factory=Counter)
    edits: int = 0
    """Messages that an edit made."""
    under_way: int = 0
    """Messages that are being retried at this moment."""
    reserved: int = 0
    """Messages that a replay plan has reserved."""

    def as_dict(self) -> dict[str, object]:
        return {
            "total": self.total,
            "groups": [
                {"group": group, "queue": queue, "messages": number}
                for (group, queue), number in self.groups.most_common()
            ],
            "events": [{"event": event, "messages": number} for event, number in self.events.most_common()],
            "states": dict(self.states.most_common()),
            "edits": self.edits,
            "under_way": self.under_way,
            "reserved": self.reserved,
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Split:
        """The split that `as_dict` has written."""
        return cls(
            found["total"],
            Counter({(each["group"], each["queue"]): each["messages"] for each in found["groups"]}),
            Counter({each["event"]: each["messages"] for each in found["events"]}),
            Counter({Status(status): number for status, number in found["states"].items()}),
            found["edits"],
            found["under_way"],
            found["reserved"],
        )


@dataclass(frozen=True, slots=True)
class Chosen:
    row_ids: Sequence[int]
    """The newest message first."""
    split: Split


class NumberUnexpected(DlqbatchError):
    """A filter matches other messages than somebody thought, or so many that they have to be counted first."""

    def __init__(self, split: Split, expected: int | None) -> None:
        self.split, self.expected = split, expected
        number = split.total
        if expected is None:
            why = f"{number:,} messages match. To change more than {UNEXPECTED} of them say how many: --expect {number}"
        else:
            why = f"{expected:,} messages were expected, and {number:,} match"
        super().__init__(f"{why}. Nothing was changed.")


def choose(engine: Engine, filters: Filters, statuses: Sequence[Status]) -> Chosen:
    """The messages that match, but no later ones; of these states where the filters name none."""
    if not filters.statuses:
        filters = replace(filters, statuses=tuple(statuses))
    ids: list[int] = []
    split = Split()
    place = None
    with keeping(engine) as kept:
        while True:
            with reading(kept) as connection:
                rows, place = page_of(connection, _COLUMNS, filters, _PAGE, place)
            for row in rows:
                ids.append(row.id)
                _count(split, row)
            if place is None:
                break
    return Chosen(ids, split)


def named(engine: Engine, row_ids: Sequence[int]) -> Chosen:
    """The messages with these ids, as far as they are there."""
    split = Split()
    with reading(engine) as connection:
        rows = connection.execute(
            select(*_COLUMNS).where(own(connection), in_list(connection, _M.id, list(row_ids)))
        ).all()
    for row in rows:
        _count(split, row)
    return Chosen([row.id for row in rows], split)


def _count(split: Split, row: Any) -> None:
    split.total += 1
    split.groups[row.fingerprint, row.origin_queue or row.origin_exchange] += 1
    split.events[row.event] += 1
    split.states[row.status] += 1
    split.edits += row.is_edit
    split.under_way += row.status == Status.PROCESSING
    split.reserved += row.plan_id is not None


def check_number(split: Split, expected: int | None) -> None:
    """NumberUnexpected if nobody has said that there are so many, or if there is another number."""
    if expected != split.total and (expected is not None or split.total > UNEXPECTED):
        raise NumberUnexpected(split, expected)


def not_left_out(connection: Connection, filters: Filters) -> list[str]:
    """A sentence for each unwanted value that no message has: misspelt, it leaves out nothing, and more is selected."""
    values: dict[str, list[str]] = {}
    for name, value in filters.unwanted:
        values.setdefault(name, []).append(value)
    wanted = Filters.parse(
        ids=values.get("id"),
        error_type=values.get("error type"),
        group=values.get("group"),
        event=values.get("event"),
        origin=values.get("origin"),
        source=values.get("source"),
        tag=values.get("tag"),
        field=values.get("field"),
    )
    missing = [*near(connection, wanted), *values_not_found(connection, wanted)]
    return [f"--not leaves out less than it says: {sentence}" for sentence in missing]
