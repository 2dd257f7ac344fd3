"""Which messages a replay plan holds: a selection is frozen, the oldest message first, under a hash."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from hashlib import sha256
from typing import Any, Final

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Engine,
    MetaData,
    Table,
    cast,
    delete,
    func,
    insert,
    literal,
    select,
    tuple_,
    update,
)

from dlqbatch.amqp.table import LONGEST_NAME
from dlqbatch.replay import risk_facts
from dlqbatch.replay.canary_and_rate import Kind, first_ones
from dlqbatch.replay.order import fill_keys
from dlqbatch.replay.plan_status import MENDED
from dlqbatch.replay.risk_facts import Frozen, Refuses
from dlqbatch.replay.risks import Risk, RiskName
from dlqbatch.store import filter_conditions
from dlqbatch.store.bulk import in_list, values_table
from dlqbatch.store.column_types import BIGINT, Time
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.filters import LARGEST_ID, Filters, NotUnderstood
from dlqbatch.store.holds import IS_ON_HOLD, is_any_held, not_on_hold
from dlqbatch.store.scopes import own, scope_of
from dlqbatch.store.states import Status
from dlqbatch.store.tables import MESSAGES, PLAN_ITEMS, PLANS
from dlqbatch.store.text import LONGEST_NOTE, visible

HASH_LENGTH: Final = 16
REPLAYED: Final = (Status.PENDING, Status.MANUAL, Status.FAILED)
"""The states that can be replayed; a selection without a state means all of them."""
_PAGE: Final = 10_000
_FIRST_PLACES: Final = 1_000
"""The places up to this one are for the messages of the first canary steps."""
_MOST_KINDS: Final = _FIRST_PLACES // 2 - 1
_SIZES: Final = 1 << 31
"""More than any place in a plan: a body's size times this, less a place, orders by size and then by place."""
_NAMED_AT_ONCE: Final = 500
FORM: Final = "form"
"""In `progress` of a plan: the form of the console that has made it."""
_NEWEST: Final = 50
_M: Final = MESSAGES.c
_I: Final = PLAN_ITEMS.c
_P: Final = PLANS.c
_SHADOW: Final = Table(
    PLAN_ITEMS.name, MetaData(), *(Column(each.name, each.type) for each in PLAN_ITEMS.columns), prefixes=["TEMPORARY"]
)


class PlanHash:
    """The hash of a plan over its items in their order; call `hash` when all are added."""

    def __init__(self, to_queue: str | None, created_at: datetime) -> None:
        self._digest = sha256(f"{to_queue!r} {created_at.isoformat()}".encode("utf-8", "surrogatepass"))

    def add(self, row_id: int, status: str, updated_at: datetime) -> None:
        self._digest.update(f"\n{row_id} {status} {updated_at.isoformat()}".encode())

    def hash(self) -> str:
        return self._digest.hexdigest()[:HASH_LENGTH]


@dataclass(frozen=True, slots=True)
class Selection:
    """The messages that a plan is to hold, by ids or by filters; NotUnderstood if it selects nothing sensible."""

    filters: Filters = field(default_factory=Filters)
    row_ids: tuple[int, ...] = ()
    everything: bool = False
    """Everything that can be replayed, without filters or ids."""
    limit: int | None = None
    """At most so many, the oldest first."""
    to_queue: str | None = None
    in_order: str | None = None
    """The field whose equal values go one after the other, as `place_of` of order.py names it."""
    mended: str | None = None
    """What was mended since the messages failed, such as a ticket; it answers some risks of the plan."""

    def __post_init__(self) -> None:
        filters = self.filters
        if self.mended is not None and not self.mended.strip():
            raise NotUnderstood("--mended wants a ticket, or words that say what was mended. Nothing was planned.")
        if self.row_ids and (filters != Filters() or self.everything):
            raise NotUnderstood("name messages by their ids or by a filter, not both. Nothing was planned.")
        if self.row_ids and self.limit is not None:
            raise NotUnderstood(
                "a limit takes the oldest of many; of messages named by their ids all are meant. Nothing was planned."
            )
        if not self.row_ids and filters == Filters() and not self.everything and self.limit is None:
            raise NotUnderstood(
                "nothing says which messages to replay: give ids or a filter, or --all for everything that is pending, "
                "manual or failed. Nothing was planned."
            )
        wrong = [status for status in filters.statuses if status not in REPLAYED]
        if wrong:
            raise NotUnderstood(
                f"what is {wrong[0]} cannot be replayed; only {', '.join(REPLAYED)}. Nothing was planned."
            )
        if self.to_queue == "":
            raise NotUnderstood("the queue to send to has no name. Nothing was planned.")
        if self.to_queue is not None and not _is_queue(self.to_queue):
            raise NotUnderstood(
                f"the queue to send to has to be UTF-8 of at most {LONGEST_NAME} bytes; no broker takes another name. "
                "Nothing was planned."
            )


def _is_queue(name: str) -> bool:
    try:
        return len(name.encode()) <= LONGEST_NAME
    except UnicodeEncodeError:
        return False


def freeze(
    engine: Engine,
    selection: Selection,
    *,
    actor: str,
    reason: str,
    now: datetime,
    dry_run: bool = False,
    form: str = "",
    refuses: Refuses = lambda _: 0,
) -> Frozen:
    """Make a plan; if no message is selected, or on a dry run, no plan is kept. `form` finds it again (`made_by`).

    `refuses` says how many of these messages an apply would leave to a person. A dry run is for somebody who may only
    read: nothing is locked, and nothing written but temporary items.
    """
    plan = {
        "hash": f"being made {secrets.token_hex(8)}",
        "state": "planned",
        "state_since": now,
        "created_at": now,
        "actor": actor,
        "reason": reason,
        "filters": _shown_filters(selection),
        "to_queue": selection.to_queue,
        "size": 0,
        "risks": [],
        "progress": {FORM: form} if form else {},
    }
    with (reading if dry_run else writing)(engine) as connection:
        plan_id = 0
        if not dry_run:
            kept = insert(PLANS).values(plan | {"scope_id": scope_of(connection)})
            plan_id = int(connection.execute(kept.returning(_P.id)).scalar_one())
        recent = risk_facts.recent(connection, now)  # it reads the items that a dry run hides
        if dry_run:
            # Of two tables with one name both databases take the temporary one; it ends with the transaction.
            _SHADOW.create(connection, checkfirst=False)
        left_out = _fill(connection, plan_id, selection)
        if selection.in_order is None:
            _put_first(connection, plan_id)
        else:
            # The canaries are the oldest: a younger one of the same key may not overtake them.
            without_key = fill_keys(connection, plan_id, selection.in_order)
            left_out |= {f"of the order: they have no {selection.in_order}": without_key} if without_key else {}
        name, size = _hash(connection, plan_id, selection.to_queue, now)
        frozen = risk_facts.describe(
            connection, plan_id, name, size, selection.to_queue, left_out, now, recent, refuses
        )
        if size and not dry_run:
            connection.execute(
                update(PLANS).where(_P.id == plan_id).values(hash=name, size=size, risks=[_not_examined(size)])
            )
        else:
            connection.rollback()
    return frozen


def made_by(engine: Engine, form: str) -> str | None:
    """The hash of the plan that this form has made already, if it is one of the newest."""
    newest = select(_P.hash, _P.progress).order_by(_P.id.desc()).limit(_NEWEST)
    with reading(engine) as connection:
        found = connection.execute(newest.where(own(connection, _P.scope_id))).all()
    return next((plan.hash for plan in found if form and plan.progress.get(FORM) == form), None)


def _not_examined(size: int) -> dict[str, object]:
    """What is said of a plan until its risks are known: the program may be killed before."""
    says = "the program ended before it could look for risks. Abort this plan, and plan again"
    return asdict(Risk(RiskName.NOT_EXAMINED, size, says))


def keep_risks(engine: Engine, plan_id: int, risks: Sequence[Risk]) -> None:
    with writing(engine) as connection:
        connection.execute(update(PLANS).where(_P.id == plan_id).values(risks=[asdict(risk) for risk in risks]))


def _shown_filters(selection: Selection) -> dict[str, object]:
    others = {
        "limit": selection.limit,
        "ids": len(selection.row_ids) or None,
        "all": selection.everything or None,
        "in_order": selection.in_order,
        MENDED: selection.mended and visible(selection.mended.strip(), LONGEST_NOTE),
    }
    return selection.filters.shown() | {name: value for name, value in others.items() if value}


def _fill(connection: Connection, plan_id: int, selection: Selection) -> dict[str, int]:
    """Add the items, the oldest message first; the number of selected messages that are left out, by reason."""
    if selection.row_ids:
        return _fill_named(connection, plan_id, selection)
    filters = selection.filters
    matching = filter_conditions.conditions(connection, filters)
    free = [*matching, _M.plan_id.is_(None), not_on_hold(connection)]
    if not filters.statuses:
        free.append(_M.status.in_(REPLAYED))
    text = filter_conditions.text_conditions(filters)
    last, filled = None, _FIRST_PLACES
    while True:
        page = free if last is None else [*free, _key() > last]
        edge = connection.execute(
            select(_M.created_at, _M.id).where(*page).order_by(_M.created_at, _M.id).offset(_PAGE - 1).limit(1)
        ).one_or_none()
        if edge is not None:
            last = tuple_(literal(edge[0], Time), literal(edge[1], BIGINT))
            page = [*page, _key() <= last]
        filled += _add(connection, plan_id, filled, [*page, *text])
        if edge is None or (selection.limit is not None and filled >= _FIRST_PLACES + selection.limit):
            break
    if selection.limit is not None:
        behind = _I.place > _FIRST_PLACES + selection.limit
        connection.execute(delete(PLAN_ITEMS).where(_I.plan_id == plan_id, behind))
    return _left_out(connection, [*matching, *text], filters)


def _fill_named(connection: Connection, plan_id: int, selection: Selection) -> dict[str, int]:
    ids = sorted({row_id for row_id in selection.row_ids if 0 < row_id <= LARGEST_ID})
    left_out: dict[str, int] = {}
    missing = len(set(selection.row_ids)) - len(ids)
    filled = _FIRST_PLACES
    for start in range(0, len(ids), _NAMED_AT_ONCE):
        some = ids[start : start + _NAMED_AT_ONCE]
        these = (own(connection), _M.id.in_(some))
        free = (_M.status.in_(REPLAYED), _M.plan_id.is_(None), not_on_hold(connection))
        filled += _add(connection, plan_id, filled, [*these, *free])
        states = connection.execute(select(_M.status, _M.plan_id, IS_ON_HOLD, _M.erased_at).where(*these)).all()
        missing += len(some) - len(states)
        for status, plan, is_held, erased_at in states:
            if status not in REPLAYED or plan is not None or is_held:
                why = (
                    status if status not in REPLAYED else "reserved by another plan" if plan is not None else "on hold"
                )
                why = why if erased_at is None else "erased: nothing is left of them that could be sent"
                left_out[why] = left_out.get(why, 0) + 1
    return {**left_out, **({"no such message": missing} if missing else {})}


def _add(connection: Connection, plan_id: int, filled: int, conditions: Sequence[ColumnElement[bool]]) -> int:
    order = (_M.created_at, _M.id)
    rows = select(
        literal(plan_id, BIGINT),
        literal(filled) + func.row_number().over(order_by=order),
        _M.id,
        _M.status,
        _M.updated_at,
        literal("waiting"),
    ).where(*conditions)
    names = ["plan_id", "place", "message_id", "seen_status", "seen_updated_at", "state"]
    adding = insert(PLAN_ITEMS).from_select(names, rows)
    return connection.execute(adding, execution_options={"preserve_rowcount": True}).rowcount


def _put_first(connection: Connection, plan_id: int) -> None:
    """Move the messages that the first canary steps send to the first places."""
    joined = PLAN_ITEMS.join(MESSAGES, _M.id == _I.message_id)
    queue = func.coalesce(_M.origin_queue, _M.origin_exchange, "")
    oldest, number = func.min(_I.place), func.count()
    largest = func.max(cast(func.length(_M.body), BIGINT) * _SIZES - _I.place)
    kinds = select(queue, number, oldest, largest).select_from(joined).where(_I.plan_id == plan_id)
    found = connection.execute(
        kinds.group_by(queue, _M.fingerprint).order_by(number.desc(), oldest).limit(_MOST_KINDS)
    ).all()
    if not found:
        return
    overall = [min(each[2] for each in found), -max(each[3] for each in found) % _SIZES]
    places = first_ones([Kind(name, many, old, -large % _SIZES) for name, many, old, large in found], overall)
    listed = values_table(connection, {_I.place: places, _I.attempt: list(range(1, len(places) + 1))})
    first = select(listed.c.attempt).where(listed.c.place == _I.place).scalar_subquery()
    these = (_I.plan_id == plan_id, in_list(connection, _I.place, places))
    connection.execute(update(PLAN_ITEMS).where(*these).values(place=first))


def _left_out(connection: Connection, conditions: Sequence[ColumnElement[bool]], filters: Filters) -> dict[str, int]:
    """Messages that the filters match, and that are processing or reserved by another plan."""
    reserved = [*conditions, _M.status.in_(filters.statuses or REPLAYED), _M.plan_id.is_not(None)]
    counts = {"reserved by another plan": _count(connection, reserved)}
    if is_any_held(connection):
        held = [*conditions, _M.status.in_(filters.statuses or REPLAYED), _M.plan_id.is_(None), IS_ON_HOLD]
        counts["on hold"] = _count(connection, held)
    if not filters.statuses:
        counts["processing"] = _count(connection, [*conditions, _M.status == Status.PROCESSING])
    return {why: number for why, number in counts.items() if number}


def _count(connection: Connection, conditions: Sequence[ColumnElement[bool]]) -> int:
    return int(connection.scalar(select(func.count()).select_from(MESSAGES).where(*conditions)) or 0)


def _hash(connection: Connection, plan_id: int, to_queue: str | None, now: datetime) -> tuple[str, int]:
    made, size = PlanHash(to_queue, now), 0
    items = select(_I.message_id, _I.seen_status, _I.seen_updated_at).where(_I.plan_id == plan_id).order_by(_I.place)
    for row_id, status, updated_at in connection.execute(items, execution_options={"yield_per": _PAGE}):
        made.add(row_id, status, updated_at)
        size += 1
    return made.hash(), size


def _key() -> ColumnElement[Any]:
    return tuple_(_M.created_at, _M.id)
