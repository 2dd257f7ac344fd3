"""Which messages of a plan may still be sent, and why the others are skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Engine, Row, Select, Update, and_, func, or_, select, update

from dlqbatch.lifecycle.attempts import Outgoing, without_bodies
from dlqbatch.replay.canary_and_rate import Outcomes
from dlqbatch.replay.plan_status import held_rows, outcomes_of
from dlqbatch.store.bulk import in_list
from dlqbatch.store.engine import reading
from dlqbatch.store.holds import IS_ON_HOLD, ON_HOLD
from dlqbatch.store.reservation import Items, items_of_rows
from dlqbatch.store.states import ITEM_MOVES, Status
from dlqbatch.store.tables import ATTEMPTS, MESSAGES, PLAN_ITEMS, PLANS

AnyRow = Row[*tuple[Any, ...]]
Rows = dict[int, AnyRow]
_AT_ONCE: Final = 1_000
_MOST_REASONS: Final = 20
_M: Final = MESSAGES.c
_A: Final = ATTEMPTS.c
_P: Final = PLANS.c
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
    IS_ON_HOLD.label("on_hold"),
)


@dataclass(frozen=True, slots=True)
class Preview:
    """What an apply would find."""

    ready: int
    held: int
    """Messages that another apply holds, or one that was cut."""
    held_until: datetime | None
    skipped: Mapping[str, int]
    """The number of skipped messages, by reason."""
    outcomes: Outcomes
    refused: tuple[int, ...] = ()
    """Which of those that are ready, counted from 0 in the plan's order, would be left to a person."""


def preview(
    engine: Engine,
    plan_id: int,
    to_queue: str | None,
    counted_from: datetime,
    refuses: Callable[[Outgoing], bool] = lambda _: False,
) -> Preview:
    """What an apply would send and skip now; nothing is locked or written.

    `refuses` says of a message that an apply would leave it to a person.
    """
    ready, place = 0, 0
    refused: list[int] = []
    skipped: Counter[str] = Counter()
    while True:
        with reading(engine) as connection:
            items = waiting_items(connection, plan_id, place, _AT_ONCE)
            if not items:
                break
            row_ids = [item.message_id for item in items]
            rows = current_rows(connection, row_ids)
            these = (_I.plan_id == plan_id, in_list(connection, _I.message_id, row_ids))
            sent = set(connection.scalars(confirmed_items(*these)).all())
            messages = without_bodies(connection, row_ids) if to_queue is None else ()
        to_person = {each.row_id for each in messages if refuses(each)}
        for item in items:
            row = rows.get(item.message_id)
            if item.message_id in sent or (row is not None and is_held(row, plan_id)):
                continue
            why = reason_to_skip(item, row, plan_id, to_queue)
            skipped.update([why] if why else ())
            refused += [ready] if not why and item.message_id in to_person else []
            ready += not why
        place = items[-1].place
    with reading(engine) as connection:
        held, until = held_rows(connection, plan_id)
        outcomes = outcomes_of(connection, plan_id, counted_from)
    return Preview(ready, held, until, dict(skipped), outcomes, tuple(refused))


def waiting_items(connection: Connection, plan_id: int, after: int, limit: int) -> Sequence[AnyRow]:
    """The plan's next items, in its order."""
    found = select(_I.place, _I.message_id, _I.seen_status, _I.seen_updated_at, _I.attempt).where(
        _I.plan_id == plan_id, _I.state == "waiting", _I.place > after
    )
    return connection.execute(found.order_by(_I.place).limit(limit)).all()


def current_rows(connection: Connection, row_ids: Sequence[int], *, locked: bool = False) -> Rows:
    rows = select(*_ROW).where(in_list(connection, _M.id, row_ids)).order_by(_M.id)
    # It waits for rows that others have locked: their transactions are short, and a skipped row would be left behind.
    return {row.id: row for row in connection.execute(rows.with_for_update(of=MESSAGES) if locked else rows)}


def confirmed_items(*these: ColumnElement[bool]) -> Select[Any]:
    """Messages of these items whose attempt the broker confirmed, or that came back, in whatever state they are."""
    this = and_(ATTEMPTS.c.message_id == _I.message_id, ATTEMPTS.c.number == _I.attempt)
    found = select(_I.message_id).select_from(PLAN_ITEMS.join(ATTEMPTS, this))
    return found.where(*these, or_(ATTEMPTS.c.sent_at.is_not(None), ATTEMPTS.c.outcome == "failed"))


def move_items(state: str, these: Items) -> Update:
    """An update to this state of the items that `ITEM_MOVES` allows to enter it."""
    starts = [start for start, ends in ITEM_MOVES.items() if state in ends]
    return update(PLAN_ITEMS).where(*these, _I.state.in_(starts)).values(state=state)


def skip_items(connection: Connection, plan_id: int, places: Mapping[int, int], why_not: Mapping[int, str]) -> None:
    """Mark the items as skipped, and end the reservation of their messages."""
    by_why: dict[str, list[int]] = {}
    for row_id, why in why_not.items():
        by_why.setdefault(why, []).append(row_id)
    if why_not:
        mine = (in_list(connection, _M.id, why_not), _M.plan_id == plan_id)
        connection.execute(update(MESSAGES).where(*mine).values(plan_id=None))
    for why, row_ids in by_why.items():
        connection.execute(
            move_items("skipped", items_of_rows(plan_id, places, row_ids, connection)).values(reason=why)
        )


def mark_items_sent(
    connection: Connection, plan_id: int, places: Mapping[int, int], items: Sequence[AnyRow]
) -> set[int]:
    """Mark items as sent whose attempt the broker confirmed, or that came back; the ids of their messages."""
    tried = [item.message_id for item in items if item.attempt is not None]
    if not tried:
        return set()
    found = connection.scalars(confirmed_items(*items_of_rows(plan_id, places, tried, connection))).all()
    connection.execute(move_items("sent", items_of_rows(plan_id, places, found, connection)))
    return set(found)


def is_held(row: AnyRow, plan_id: int) -> bool:
    """Whether another apply holds the row, or one that was killed; its lease decides who may take it over."""
    return bool(row.plan_id == plan_id and row.status == Status.PROCESSING)


def reason_to_skip(item: AnyRow, row: AnyRow | None, plan_id: int, to_queue: str | None) -> str:
    """Why the item is skipped; empty if it may be sent."""
    if row is None:
        return "it is no longer in the dead store"
    why = ""
    if is_held(row, plan_id):
        why = ""
    elif row.plan_id not in {None, plan_id}:
        why = "another plan has reserved it"
    elif row.status != item.seen_status:
        why = f"it changed since the plan: it is {row.status}"
    elif row.updated_at != item.seen_updated_at:
        why = "it changed since the plan"
    elif to_queue is None and row.origin_queue is None and row.origin_exchange is None:
        why = "origin-unknown"
    elif row.on_hold:
        why = ON_HOLD
    return why
