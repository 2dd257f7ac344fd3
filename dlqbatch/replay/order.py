"""In-order plans: of the messages with one key the next goes only when the one before is acknowledged.

A message that came back, or that could not be sent, holds its key: what is behind it waits until a person has discarded
it, or it was resolved in another way. Messages of other keys go on beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, func, or_, select, update

from dlqbatch.amqp.fields import CORRELATION_ID, TASK_ID, Fields, check_place
from dlqbatch.store.bulk import in_list, values_table
from dlqbatch.store.filters import NotUnderstood
from dlqbatch.store.states import Status
from dlqbatch.store.tables import ATTEMPTS, MESSAGES, PLAN_ITEMS

_KEY: Final = "key"
_AT_ONCE: Final = 500
_LONGEST_KEY: Final = 500
_MOST_SHOWN: Final = 20
_A: Final = ATTEMPTS.c
_I: Final = PLAN_ITEMS.c
_M: Final = MESSAGES.c


class HeldKey(NamedTuple):
    """A key whose messages wait for a person."""

    key: str
    message_id: int
    status: str
    behind: int
    """Messages of the key that wait."""


def place_of(field: str, named: Mapping[str, str]) -> str:
    """Where a field is in a message: `named` are those of the settings; NotUnderstood if nothing is called so."""
    if field in named:
        return named[field]
    if field in {CORRELATION_ID, TASK_ID}:
        return field
    try:
        return check_place(field)
    except ValueError as error:
        known = ", ".join(sorted({*named, CORRELATION_ID, TASK_ID}))
        raise NotUnderstood(
            f"--in-order '{field}' {error}. Fields with a name are: {known}. Nothing was planned."
        ) from error


def key_of(place: str, body: bytes, properties: bytes) -> str | None:
    """The key of a message; None: it has no such field, and goes in any order."""
    is_named = place in {CORRELATION_ID, TASK_ID}
    found = Fields({} if is_named else {_KEY: place}).read(body, properties)
    values = [value for name, value in found if name == (place if is_named else _KEY)]
    return ", ".join(values)[:_LONGEST_KEY] or None


def fill_keys(connection: Connection, plan_id: int, in_order: str) -> int:
    """Keep the key of each message of the plan; the number of messages without one."""
    place, without = 0, 0
    joined = PLAN_ITEMS.join(MESSAGES, _M.id == _I.message_id)
    columns = select(_I.place, _M.body, _M.properties).select_from(joined).order_by(_I.place).limit(_AT_ONCE)
    while page := connection.execute(columns.where(_I.plan_id == plan_id, _I.place > place)).all():
        keys = [key_of(in_order, bytes(row.body), bytes(row.properties)) for row in page]
        without += keys.count(None)
        places = [row.place for row in page]
        given = values_table(connection, {_I.place: places, _I.order_key: keys})
        key = select(given.c.order_key).where(given.c.place == _I.place).scalar_subquery()
        these = (_I.plan_id == plan_id, in_list(connection, _I.place, places))
        connection.execute(update(PLAN_ITEMS).where(*these).values(order_key=key))
        place = places[-1]
    return without


def next_in_order(
    connection: Connection, plan_id: int, limit: int, without: Collection[int] = ()
) -> Sequence[Row[*tuple[Any, ...]]]:
    """The plan's next items: the first that waits of each key that nothing holds, and those without a key.

    Messages that an apply has taken are left out, and those of `without`.
    """
    is_waiting = (_I.plan_id == plan_id, _I.state == "waiting")
    first = select(func.min(_I.place)).where(*is_waiting, _I.order_key.is_not(None)).group_by(_I.order_key)
    first = first.having(_I.order_key.not_in(_unsettled(plan_id).with_only_columns(_I.order_key)))
    found = select(_I.place, _I.message_id, _I.seen_status, _I.seen_updated_at, _I.attempt).select_from(
        PLAN_ITEMS.outerjoin(MESSAGES, _M.id == _I.message_id)
    )
    is_free = or_(_M.id.is_(None), _M.status != Status.PROCESSING)
    found = found.where(*is_waiting, is_free, or_(_I.order_key.is_(None), _I.place.in_(first)))
    if without:
        found = found.where(~in_list(connection, _I.message_id, without))
    return connection.execute(found.order_by(_I.place).limit(limit)).all()


def _unsettled(plan_id: int) -> Select[Any]:
    """Messages of the plan that are no longer waiting, and that nobody knows to be acknowledged, or that are held."""
    this = and_(_A.message_id == _I.message_id, _A.number == _I.attempt)
    joined = PLAN_ITEMS.join(MESSAGES, _M.id == _I.message_id).outerjoin(ATTEMPTS, this)
    is_acknowledged: ColumnElement[bool] = and_(
        _I.state == "sent", _A.id.is_not(None), _A.acknowledged_at.is_not(None), _A.outcome.is_(None)
    )
    return (
        select(_I.order_key, _I.message_id, _M.status, _A.outcome, _I.state)
        .select_from(joined)
        .where(
            _I.plan_id == plan_id,
            _I.order_key.is_not(None),
            _I.state.in_(("sent", "skipped")),
            _M.status.not_in((Status.RESOLVED, Status.ARCHIVED)),
            ~is_acknowledged,
        )
    )


def held_keys(connection: Connection, plan_id: int) -> tuple[list[HeldKey], int]:
    """The first keys that only a person can let go on, and how many messages under way others wait for."""
    held: dict[str, Row[*tuple[Any, ...]]] = {}
    under_way = 0
    for row in connection.execute(_unsettled(plan_id).order_by(_I.place)):
        if row.state == "sent" and row.outcome is None:
            under_way += 1
        else:
            held.setdefault(row.order_key, row)
    waiting = select(_I.order_key, func.count()).where(
        _I.plan_id == plan_id, _I.state == "waiting", in_list(connection, _I.order_key, held)
    )
    behind: dict[str, int] = dict(connection.execute(waiting.group_by(_I.order_key)).all()) if held else {}
    shown = [HeldKey(key, row.message_id, row.status, behind[key]) for key, row in held.items() if key in behind]
    return shown, under_way


def says(held: Sequence[HeldKey]) -> str:
    """Which keys are held, by what, and what to do."""
    waiting = sum(each.behind for each in held)
    named = "; ".join(f"'{each.key}' by message {each.message_id} ({each.status})" for each in held[:_MOST_SHOWN])
    more = f"; and {len(held) - _MOST_SHOWN} more" if len(held) > _MOST_SHOWN else ""
    return (
        f"{len(held):,} key(s) with {waiting:,} waiting message(s) are held by one that came back or could not be "
        f"sent: {named}{more}. Abort this plan, mend or discard those, and plan again with --in-order"
    )
