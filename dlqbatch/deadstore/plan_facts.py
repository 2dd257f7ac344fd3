"""What is known of a plan's messages before any of them moves, counted in the transaction that froze them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import exists, func, literal_column, select

from dlqbatch.deadstore import breakers, edits
from dlqbatch.deadstore.as_json import as_json
from dlqbatch.deadstore.record import SUMMARY, Record
from dlqbatch.deadstore.tables import ATTEMPTS, MESSAGES, PLAN_ITEMS, TRANSITIONS
from dlqbatch.deadstore.text import time_text
from dlqbatch.message.envelope import Origin
from dlqbatch.policy.classify import UNKNOWN, classify
from dlqbatch.policy.replay import LARGEST_BODY, Facts
from dlqbatch.policy.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import Connection, Select

    from dlqbatch.policy.classify import Rule

_M: Final = MESSAGES.c
_A: Final = ATTEMPTS.c
_MOST_SHOWN: Final = 20
_MOST_GROUPS: Final = 1_000
_MOST_ATTEMPTS: Final = 50_000
_SAMPLE: Final = 5
_MOST_EDITS: Final = 1000
"""Messages of a plan that are looked at for what an edit connects them with; a person makes edits one by one."""
"""So begins the journal of a message that an edit made."""
OF_LATE: Final = timedelta(hours=1)
"""Attempts that ended within it say how an origin is doing."""


@dataclass(frozen=True, slots=True)
class GroupInPlan:
    """Equal failures of a plan."""

    fingerprint: str
    messages: int
    error_type: str | None
    error_message: str | None
    has_failed_before: bool
    """A retry of one of them from the store came back."""


@dataclass(frozen=True, slots=True)
class Frozen:
    plan_id: int
    hash: str
    size: int
    to_queue: str | None
    created_at: datetime
    left_out: Mapping[str, int]
    by_origin: Mapping[Origin, int]
    """Where they go; the key counts only where it is needed to find the place."""
    without_origin: int
    by_event: Mapping[str, int]
    by_error: Mapping[str, int]
    by_status: Mapping[str, int]
    groups: tuple[GroupInPlan, ...]
    """The largest."""
    recent: Mapping[str, tuple[int, int]]
    """By the name of an origin: attempts that failed within the last hour, and all that ended."""
    bodies: tuple[int, ...]
    """Sizes of those that a broker may refuse, the largest first."""
    sample: tuple[Record, ...]
    """The first to go."""
    replaced: int
    """Messages that do the same work as another one, by an edit."""
    replaced_by: tuple[int, int] | None
    """One of them, and that other one."""
    possible_duplicates: int
    """Messages that ingest could not tell from others."""

    def as_dict(self) -> dict[str, object]:
        """Without the places, which the broker knows more of."""
        by_origin: Counter[str] = Counter()
        for origin, number in self.by_origin.items():
            by_origin[origin.name] += number
        return {
            "size": self.size,
            "created_at": time_text(self.created_at),
            "to_queue": self.to_queue,
            "left_out": dict(self.left_out),
            "by_origin": dict(by_origin) | ({"unknown": self.without_origin} if self.without_origin else {}),
            "by_event": dict(self.by_event),
            "by_error": dict(self.by_error),
            "by_status": dict(self.by_status),
            "sample": as_json(self.sample),
        }

    def facts(self, rules: Sequence[Rule], largest: int) -> Facts:
        """What the risks follow from; `largest` in bytes is the body that the broker takes."""
        by_place: Counter[str] = Counter()
        for origin, number in self.by_origin.items():
            by_place[origin.name] += number
        said_manual: Counter[str] = Counter()
        for group in self.groups:
            # One for all: equal failures have one type, and messages that differ in numbers and names.
            strategy, rule = classify(group.error_type, group.error_message, rules)
            if strategy is Strategy.MANUAL and rule != UNKNOWN:
                said_manual[rule] += group.messages
        return Facts(
            by_place,
            self.without_origin,
            self.recent,
            sum(group.messages for group in self.groups if group.has_failed_before),
            said_manual,
            self.replaced,
            self.replaced_by,
            sum(size > largest for size in self.bodies),
            largest,
            self.possible_duplicates,
        )


def look(
    connection: Connection,
    plan_id: int,
    name: str,
    size: int,
    to_queue: str | None,
    left_out: Mapping[str, int],
    now: datetime,
    recent: Mapping[str, tuple[int, int]],
) -> Frozen:
    by_origin, without = _origins(connection, plan_id, to_queue)
    large = _of(plan_id, func.length(_M.body)).where(func.length(_M.body) > LARGEST_BODY)
    sample = _of(plan_id, *SUMMARY).order_by(PLAN_ITEMS.c.place).limit(_SAMPLE)
    return Frozen(
        plan_id,
        name,
        size,
        to_queue,
        now,
        left_out,
        by_origin,
        without,
        _counted(connection, plan_id, _M.event),
        _counted(connection, plan_id, _M.error_type),
        _counted(connection, plan_id, _M.status),
        _groups(connection, plan_id),
        recent,
        tuple(connection.scalars(large.order_by(func.length(_M.body).desc()).limit(_MOST_GROUPS))),
        tuple(Record(*row) for row in connection.execute(sample)),
        *_replaced(connection, plan_id),
        int(connection.scalar(_of(plan_id, func.count()).where(_M.possible_duplicate)) or 0),
    )


def origins_of(connection: Connection, plan_id: int, to_queue: str | None) -> dict[Origin, int]:
    """Where the plan's messages go, and how many; without those that nobody knows a place for."""
    return _origins(connection, plan_id, to_queue)[0]


def _of(plan_id: int, *columns: Any) -> Select[Any]:
    joined = PLAN_ITEMS.join(MESSAGES, _M.id == PLAN_ITEMS.c.message_id)
    # What has gone already needs no origin any more.
    return select(*columns).select_from(joined).where(PLAN_ITEMS.c.plan_id == plan_id, PLAN_ITEMS.c.state == "waiting")


def _origins(connection: Connection, plan_id: int, to_queue: str | None) -> tuple[dict[Origin, int], int]:
    """By where they go: the queue; where none is known the exchange, and behind the default exchange the key."""
    if to_queue is not None:
        return {Origin(to_queue, None, to_queue): int(connection.scalar(_of(plan_id, func.count())) or 0)}, 0
    places = _of(plan_id, _M.origin_queue, _M.origin_exchange, func.min(_M.origin_key), func.count())
    keyed = (_M.origin_queue.is_(None)) & (_M.origin_exchange == "")
    found: dict[Origin, int] = {}
    without = 0
    grouping = places.group_by(_M.origin_queue, _M.origin_exchange)
    for queue, exchange, key, number in connection.execute(
        grouping.where(~func.coalesce(keyed, literal_column("false")))
    ):
        if queue is None and exchange is None:
            without += number
        else:
            # Several exchanges may lead to one queue, which is one place.
            place = Origin(queue, None, queue) if queue is not None else Origin(None, exchange, key or "")
            found[place] = found.get(place, 0) + number
    by_key = _of(plan_id, _M.origin_key, func.count()).where(keyed).group_by(_M.origin_key)
    for key, number in connection.execute(by_key):
        if not key:
            without += number
        else:
            found[Origin(key, None, key)] = found.get(Origin(key, None, key), 0) + number
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0].name))), without


def _counted(connection: Connection, plan_id: int, column: Any) -> dict[str, int]:
    number = func.count()
    most = _of(plan_id, column, number).group_by(column).order_by(number.desc(), column).limit(_MOST_SHOWN)
    return {"unknown" if value is None else str(value): count for value, count in connection.execute(most)}


def _replaced(connection: Connection, plan_id: int) -> tuple[int, tuple[int, int] | None]:
    """How many are one piece of work with a message that may go as well, or went; and the first of them with that."""
    # A copy that came in under an id of its own has a parent too; that one takes nobody's place.
    touched = exists().where(TRANSITIONS.c.message_id == _M.id, edits.BY_EDIT)
    number, first = 0, None
    for row_id in connection.scalars(_of(plan_id, _M.id).where(touched).order_by(_M.id).limit(_MOST_EDITS)).all():
        other = next((one for one in edits.others(connection, row_id) if one.is_in_the_way), None)
        if other is not None:
            number += 1
            first = first or (row_id, other.row_id)
    return number, first


def _groups(connection: Connection, plan_id: int) -> tuple[GroupInPlan, ...]:
    number = func.count()
    largest = connection.execute(
        _of(plan_id, _M.fingerprint, number, func.max(_M.dlq_retry_count), func.min(_M.id))
        .group_by(_M.fingerprint)
        .order_by(number.desc(), _M.fingerprint)
        .limit(_MOST_GROUPS)
    ).all()
    samples = [sample for *_, sample in largest]
    failures = {
        row_id: (kind, text)
        for row_id, kind, text in connection.execute(
            select(_M.id, _M.error_type, _M.error_message).where(_M.id.in_(samples))
        )
    }
    return tuple(
        GroupInPlan(fingerprint, count, *failures[sample], failed > 0) for fingerprint, count, failed, sample in largest
    )


def recent(connection: Connection, now: datetime) -> dict[str, tuple[int, int]]:
    """By where they were sent: attempts that failed within the last hour, and all that ended."""
    ended = (
        select(_A.message_id, _A.outcome, breakers.named_queue().label("named"))
        .where(_A.closed_at.is_not(None), _A.closed_at > now - OF_LATE, _A.outcome != "abandoned")
        .order_by(_A.closed_at.desc())
        .limit(_MOST_ATTEMPTS)
        .subquery()
    )
    counted: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    place = func.coalesce(ended.c.named, _M.origin_queue, _M.origin_exchange)
    for name, outcome, number in connection.execute(
        select(place, ended.c.outcome, func.count())
        .select_from(ended.join(MESSAGES, _M.id == ended.c.message_id))
        .group_by(place, ended.c.outcome)
    ):
        if name is not None:
            counted[name][0] += number if outcome == "failed" else 0
            counted[name][1] += number
    return {name: (failed, all_) for name, (failed, all_) in counted.items()}
