"""The rows of a plan as they are by now: which of its messages may still go, and why others may not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import and_, func, or_, select, update

from dlqbatch.deadstore.engine import reading
from dlqbatch.deadstore.given import among
from dlqbatch.deadstore.plan_status import held_rows, outcomes_of
from dlqbatch.deadstore.tables import ATTEMPTS, MESSAGES, PLAN_ITEMS
from dlqbatch.policy.lifecycle import Status

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import ColumnElement, Connection, Engine, Row, Select

    from dlqbatch.policy.replay import Outcomes

Rows = dict[int, "Row[*tuple[Any, ...]]"]
Items = tuple["ColumnElement[bool]", ...]

_NO_ORIGIN: Final = "origin-unknown"
_AT_ONCE: Final = 1_000
_M: Final = MESSAGES.c
_I: Final = PLAN_ITEMS.c
_ROW: Final = (
    _M.id,
    _M.status,
    _M.updated_at,
    _M.plan_id,
    _M.origin_queue,
    _M.origin_exchange,
    _M.origin_key,
    func.length(_M.body).label("body_size"),
)


@dataclass(frozen=True, slots=True)
class Standing:
    """What an apply would find."""

    ready: int
    held: int
    """By another apply, or by one that was cut."""
    held_until: datetime | None
    skipped: Mapping[str, int]
    """By why."""
    outcomes: Outcomes


def look(engine: Engine, plan_id: int, to_queue: str | None, counted_from: datetime) -> Standing:
    """Nothing is locked and nothing written; all of it is as it was at one moment of each thousand."""
    ready, place = 0, 0
    skipped: Counter[str] = Counter()
    while items := _page(engine, plan_id, place):
        with reading(engine) as connection:
            row_ids = [item.message_id for item in items]
            rows = as_they_are(connection, row_ids)
            these = (_I.plan_id == plan_id, among(connection, _I.message_id, row_ids))
            sent = set(connection.scalars(known_as_sent(*these)).all())
        for item in items:
            row = rows.get(item.message_id)
            if item.message_id in sent or (row is not None and is_held(row, plan_id)):
                continue
            why = why_not(item, row, plan_id, to_queue)
            skipped.update([why] if why else ())
            ready += not why
        place = items[-1].place
    with reading(engine) as connection:
        held, until = held_rows(connection, plan_id)
        return Standing(ready, held, until, dict(skipped), outcomes_of(connection, plan_id, counted_from))


def _page(engine: Engine, plan_id: int, after: int) -> Sequence[Row[*tuple[Any, ...]]]:
    with reading(engine) as connection:
        return waiting(connection, plan_id, after, _AT_ONCE)


def waiting(connection: Connection, plan_id: int, after: int, limit: int) -> Sequence[Row[*tuple[Any, ...]]]:
    """The plan's next items, in its order."""
    found = select(_I.place, _I.message_id, _I.seen_status, _I.seen_updated_at, _I.attempt).where(
        _I.plan_id == plan_id, _I.state == "waiting", _I.place > after
    )
    return connection.execute(found.order_by(_I.place).limit(limit)).all()


def as_they_are(connection: Connection, row_ids: Sequence[int], *, locked: bool = False) -> Rows:
    rows = select(*_ROW).where(among(connection, _M.id, row_ids)).order_by(_M.id)
    # Waits for whoever holds one of them: transactions are short, and what is passed over would be left behind.
    return {row.id: row for row in connection.execute(rows.with_for_update() if locked else rows)}


def known_as_sent(*these: ColumnElement[bool]) -> Select[Any]:
    """Messages of these items whose attempt the broker confirmed, or that came back; whatever the row is by now."""
    this = and_(ATTEMPTS.c.message_id == _I.message_id, ATTEMPTS.c.number == _I.attempt)
    found = select(_I.message_id).select_from(PLAN_ITEMS.join(ATTEMPTS, this))
    return found.where(*these, or_(ATTEMPTS.c.sent_at.is_not(None), ATTEMPTS.c.outcome == "failed"))


def these(plan_id: int, places: Mapping[int, int], row_ids: Collection[int], connection: Connection) -> Items:
    """The items of these rows, whose places in the plan are known.

    Of a plan that was made just now PostgreSQL has no statistics, and by the ids of messages alone it would read all
    items of the plan for each batch; their places lie close together.
    """
    near = [places[row_id] for row_id in row_ids] or [0]
    return _I.plan_id == plan_id, _I.place.between(min(near), max(near)), among(connection, _I.message_id, row_ids)


def skip(connection: Connection, plan_id: int, places: Mapping[int, int], why_not: Mapping[int, str]) -> None:
    """They go to nobody by this plan."""
    by_why: dict[str, list[int]] = {}
    for row_id, why in why_not.items():
        by_why.setdefault(why, []).append(row_id)
    if why_not:
        mine = (among(connection, _M.id, why_not), _M.plan_id == plan_id)
        connection.execute(update(MESSAGES).where(*mine).values(plan_id=None))
    for why, row_ids in by_why.items():
        skipped = update(PLAN_ITEMS).where(*these(plan_id, places, row_ids, connection))
        connection.execute(skipped.values(state="skipped", reason=why))


def mark_known(
    connection: Connection, plan_id: int, places: Mapping[int, int], items: Sequence[Row[*tuple[Any, ...]]]
) -> set[int]:
    """Those whose attempt the broker confirmed, or that came back, are sent; whatever the row is by now."""
    tried = [item.message_id for item in items if item.attempt is not None]
    if not tried:
        return set()
    found = connection.scalars(known_as_sent(*these(plan_id, places, tried, connection))).all()
    still_waiting = (*these(plan_id, places, found, connection), _I.state == "waiting")
    connection.execute(update(PLAN_ITEMS).where(*still_waiting).values(state="sent"))
    return set(found)


def is_held(row: Row[*tuple[Any, ...]], plan_id: int) -> bool:
    """By another apply, or by one that was cut: its lease tells who may go on with it."""
    return bool(row.plan_id == plan_id and row.status == Status.PROCESSING)


def why_not(item: Row[*tuple[Any, ...]], row: Row[*tuple[Any, ...]] | None, plan_id: int, to_queue: str | None) -> str:
    """Empty if it may go."""
    why = ""
    if row is None:
        why = "it is no longer in the dead store"
    elif is_held(row, plan_id):
        why = ""
    elif row.plan_id not in {None, plan_id}:
        why = "another plan has reserved it"
    elif row.status != item.seen_status:
        why = f"it changed since the plan: it is {row.status}"
    elif row.updated_at != item.seen_updated_at:
        why = "it changed since the plan"
    elif to_queue is None and row.origin_queue is None and row.origin_exchange is None:
        why = _NO_ORIGIN
    return why
