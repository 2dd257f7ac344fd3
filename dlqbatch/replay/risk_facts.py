"""What the risks of a plan follow from, counted in the transaction that froze its messages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Connection, Select, and_, case, func, literal_column, or_, select

from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.broker.access import management_api
from dlqbatch.broker.connection import Connection as BrokerConnection
from dlqbatch.broker.connection import NoAnswer
from dlqbatch.broker.readings import Readings
from dlqbatch.errors import ChannelRefused
from dlqbatch.lifecycle import breaker_rows as breakers
from dlqbatch.lifecycle.attempts import Outgoing, without_bodies
from dlqbatch.lifecycle.rules import UNKNOWN, Rule, classify
from dlqbatch.logs import masked
from dlqbatch.messages.queries import BY_EDIT, SUMMARY, Record, linked_by_edits
from dlqbatch.messages.shown import masked_record
from dlqbatch.replay.risks import LARGEST_BODY, Facts, Place
from dlqbatch.settings import Settings
from dlqbatch.store.journal import JOBS
from dlqbatch.store.scopes import own
from dlqbatch.store.states import Status, Strategy
from dlqbatch.store.tables import ATTEMPTS, MESSAGES, PLAN_ITEMS, TRANSITIONS
from dlqbatch.store.text import json_ready, time_text

Refuses = Callable[[Sequence[Outgoing]], int]
_M: Final = MESSAGES.c
_A: Final = ATTEMPTS.c
_MOST_SHOWN: Final = 20
_MOST_GROUPS: Final = 1_000
_MOST_ATTEMPTS: Final = 50_000
_SAMPLE: Final = 5
_MOST_ASKED: Final = 10_000
_ASKED_FOR: Final = 5.0
"""Seconds that the management API has to say which queues stand behind exchanges; without it a risk says less."""
_MOST_EDITS: Final = 1000
"""Messages of a plan that are looked at for what an edit connects them with; a person makes edits one by one."""
OF_LATE: Final = timedelta(hours=1)
"""Attempts that ended within it say how an origin is doing."""


@dataclass(frozen=True, slots=True)
class GroupInPlan:
    """A group of equal failures in a plan."""

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
    """Messages by where they go; a routing key counts only where no queue and no named exchange is known."""
    by_event: Mapping[str, int]
    by_error: Mapping[str, int]
    by_status: Mapping[str, int]
    groups: tuple[GroupInPlan, ...]
    """The largest groups."""
    bodies: tuple[int, ...]
    """Sizes of those that a broker may refuse, the largest first."""
    sample: tuple[Record, ...]
    """The first messages that are sent."""
    known: Facts
    """What is known of the messages without the rules and the broker."""

    def as_dict(self) -> dict[str, object]:
        """Without the state of the origins, which only the broker knows."""
        without = self.known.without_origin
        return {
            "size": self.size,
            "created_at": time_text(self.created_at),
            "to_queue": self.to_queue,
            "left_out": dict(self.left_out),
            "by_origin": dict(self.known.by_place) | ({"unknown": without} if without else {}),
            "by_event": dict(self.by_event),
            "by_error": {masked(error): number for error, number in self.by_error.items()},
            "by_status": dict(self.by_status),
            "sample": json_ready(tuple(map(masked_record, self.sample))),
        }

    def facts(self, rules: Sequence[Rule], largest: int) -> Facts:
        """The facts for `risks`; `largest` is the largest body, in bytes, that the broker takes."""
        said_manual: Counter[str] = Counter()
        for group in self.groups:
            # Classified once: equal failures have one type, and texts that differ only in numbers and names.
            strategy, rule = classify(group.error_type, group.error_message, rules)
            if strategy is Strategy.MANUAL and rule != UNKNOWN:
                said_manual[rule] += group.messages
        large = sum(size > largest for size in self.bodies)
        return replace(self.known, said_manual=said_manual, large_bodies=large, largest_body=largest)


def describe(
    connection: Connection,
    plan_id: int,
    name: str,
    size: int,
    to_queue: str | None,
    left_out: Mapping[str, int],
    now: datetime,
    recent: Mapping[str, tuple[int, int]],
    refuses: Refuses,
) -> Frozen:
    by_origin, without = origins_of(connection, plan_id, to_queue)
    by_place: Counter[str] = Counter()
    for origin, number in by_origin.items():
        by_place[origin.name] += number
    large = _waiting(plan_id, func.length(_M.body)).where(func.length(_M.body) > LARGEST_BODY)
    sample = _waiting(plan_id, *SUMMARY).order_by(PLAN_ITEMS.c.place).limit(_SAMPLE)
    not_allowed = 0
    if to_queue is None:
        # Messages without any origin are counted apart.
        has_origin = or_(_M.origin_queue.is_not(None), _M.origin_exchange.is_not(None))
        first = _waiting(plan_id, _M.id).where(has_origin).order_by(PLAN_ITEMS.c.place).limit(_MOST_ASKED)
        not_allowed = refuses(without_bodies(connection, connection.scalars(first).all()))
    groups = _groups(connection, plan_id)
    edited, resolved_before = _touched(connection, plan_id)
    replaced, replaced_by = _replaced(connection, edited)
    return Frozen(
        plan_id,
        name,
        size,
        to_queue,
        now,
        left_out,
        by_origin,
        _counted(connection, plan_id, _M.event),
        _counted(connection, plan_id, _M.error_type),
        _counted(connection, plan_id, _M.status),
        groups,
        tuple(connection.scalars(large.order_by(func.length(_M.body).desc()).limit(_MOST_GROUPS))),
        tuple(Record(*row) for row in connection.execute(sample)),
        Facts(
            by_place,
            without,
            recent,
            failed_before=sum(group.messages for group in groups if group.has_failed_before),
            replaced=replaced,
            replaced_by=replaced_by,
            possible_duplicates=int(
                connection.scalar(_waiting(plan_id, func.count()).where(_M.possible_duplicate)) or 0
            ),
            not_allowed=not_allowed,
            resolved_before=resolved_before,
        ),
    )


def _touched(connection: Connection, plan_id: int) -> tuple[list[int], int]:
    """The first messages that an edit made or replaced; and how many a person has taken back after they were resolved.

    The journal is large, and is read once.
    """
    steps = TRANSITIONS.c
    by_person = and_(steps.from_status == Status.RESOLVED, steps.actor.not_in(JOBS))
    flags = [func.max(case((each, 1), else_=0)) for each in (BY_EDIT, by_person)]
    query = select(PLAN_ITEMS.c.message_id, *flags).select_from(
        PLAN_ITEMS.join(TRANSITIONS, steps.message_id == PLAN_ITEMS.c.message_id)
    )
    query = query.where(PLAN_ITEMS.c.plan_id == plan_id, PLAN_ITEMS.c.state == "waiting", or_(BY_EDIT, by_person))
    found = connection.execute(query.group_by(PLAN_ITEMS.c.message_id).order_by(PLAN_ITEMS.c.message_id)).all()
    edited = [row_id for row_id, by_edit, _ in found if by_edit]
    return edited[:_MOST_EDITS], sum(taken_back for *_, taken_back in found)


def _waiting(plan_id: int, *columns: Any) -> Select[Any]:
    joined = PLAN_ITEMS.join(MESSAGES, _M.id == PLAN_ITEMS.c.message_id)
    # Sent and skipped messages need no origin any more.
    return select(*columns).select_from(joined).where(PLAN_ITEMS.c.plan_id == plan_id, PLAN_ITEMS.c.state == "waiting")


def origins_of(connection: Connection, plan_id: int, to_queue: str | None) -> tuple[dict[Origin, int], int]:
    """The number of messages by where they go, and the number of those whose origin is unknown.

    That is a queue; an exchange where no queue is known; a routing key behind the default exchange.
    """
    if to_queue is not None:
        return {Origin(to_queue, None, to_queue): int(connection.scalar(_waiting(plan_id, func.count())) or 0)}, 0
    places = _waiting(plan_id, _M.origin_queue, _M.origin_exchange, func.min(_M.origin_key), func.count())
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
    by_key = _waiting(plan_id, _M.origin_key, func.count()).where(keyed).group_by(_M.origin_key)
    for key, number in connection.execute(by_key):
        if not key:
            without += number
        else:
            found[Origin(key, None, key)] = found.get(Origin(key, None, key), 0) + number
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0].name))), without


def _counted(connection: Connection, plan_id: int, column: Any) -> dict[str, int]:
    number = func.count()
    most = _waiting(plan_id, column, number).group_by(column).order_by(number.desc(), column).limit(_MOST_SHOWN)
    found = {"unknown" if value is None else str(value): int(count) for value, count in connection.execute(most)}
    if len(found) == _MOST_SHOWN:
        every = int(connection.scalar(_waiting(plan_id, number)) or 0)
        if rest := every - sum(found.values()):
            found["other"] = found.get("other", 0) + rest
    return found


def _replaced(connection: Connection, edited: Sequence[int]) -> tuple[int, tuple[int, int] | None]:
    """How many do the same work as another message that may be sent too, or was; and the first pair of both."""
    # A copy that came in under an id of its own has a parent too, and replaces nothing.
    number, first = 0, None
    for row_id in edited:
        other = next((each for each in linked_by_edits(connection, row_id) if each.is_in_the_way), None)
        if other is not None:
            number += 1
            first = first or (row_id, other.row_id)
    return number, first


def _groups(connection: Connection, plan_id: int) -> tuple[GroupInPlan, ...]:
    number = func.count()
    largest = connection.execute(
        _waiting(plan_id, _M.fingerprint, number, func.max(_M.dlq_retry_count), func.min(_M.id))
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
    """By where they were sent: the attempts of the last hour that failed, and all that ended."""
    ended = (
        select(_A.message_id, _A.outcome, breakers.named_queue().label("named"))
        .where(own(connection, _A.scope_id), _A.closed_at.is_not(None), _A.closed_at > now - OF_LATE)
        .where(_A.outcome != "abandoned")
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


def look_at_origins(settings: Settings, connection: BrokerConnection, origins: Iterable[Origin]) -> Iterator[Place]:
    readings: Readings | None = None
    for origin in origins:
        place = _place(connection, origin)
        if place.is_exchange and place.is_there:
            readings = readings or Readings(management_api(settings), connection, seconds=_ASKED_FOR)
            place = replace(place, queues=readings.target(origin).queues)
        yield place


def _place(connection: BrokerConnection, origin: Origin) -> Place:
    name = origin.name
    try:
        with connection.scratch_for(name) as scratch:
            if origin.queue is None:
                scratch.call("exchange_declare", exchange=name, passive=True)
                return Place(name, is_there=True, is_exchange=True)
            found = scratch.call("queue_declare", queue=name, passive=True)
            return Place(name, is_there=True, messages=int(found.message_count), consumers=int(found.consumer_count))
    except ChannelRefused as refused:
        return Place(name, is_there=False if refused.is_gone else None, why=refused.text)
    except (NoAnswer, UnicodeEncodeError) as error:
        return Place(name, is_there=None, why=str(error))
