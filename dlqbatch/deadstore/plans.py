"""Replay plans: a set of dead messages frozen under a hash, reserved while it is applied, let go when it is over."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Column, MetaData, Table, delete, func, insert, literal, select, tuple_, update

from dlqbatch.deadstore import asking, plan_facts
from dlqbatch.deadstore.asking import LARGEST_ID, NotUnderstood
from dlqbatch.deadstore.column_types import BIGINT, Time
from dlqbatch.deadstore.engine import reading, writing
from dlqbatch.deadstore.messages import Filters, mentions
from dlqbatch.deadstore.plan_status import PlanStatus, status_of
from dlqbatch.deadstore.tables import MESSAGES, PLAN_ITEMS, PLANS
from dlqbatch.errors import DlqbatchError
from dlqbatch.message.table import LONGEST_NAME
from dlqbatch.policy.lifecycle import Status
from dlqbatch.policy.replay import SHORTEST_PREFIX, PlanHash, Risk

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from sqlalchemy import ColumnElement, Connection, Engine

    from dlqbatch.deadstore.plan_facts import Frozen

REPLAYED: Final = (Status.PENDING, Status.MANUAL, Status.FAILED)
"""What can be replayed, and is if nothing else is asked for."""
_PAGE: Final = 10_000
_NAMED_AT_ONCE: Final = 500
_M: Final = MESSAGES.c
_I: Final = PLAN_ITEMS.c
_P: Final = PLANS.c
_SHADOW: Final = Table(
    PLAN_ITEMS.name, MetaData(), *(Column(each.name, each.type) for each in PLAN_ITEMS.columns), prefixes=["TEMPORARY"]
)


class NoSuchPlan(DlqbatchError):
    """No plan has this hash, or several begin like it."""

    exit_code = 2


class PlanRefused(DlqbatchError):
    """The plan is not in a state in which that can be done to it."""

    exit_code = 2


_EVERYTHING: Final = Filters()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a plan is to hold: named messages, or all that a filter leaves."""

    filters: Filters = _EVERYTHING
    row_ids: tuple[int, ...] = ()
    everything: bool = False
    """Without a filter and without ids, everything that can be replayed."""
    limit: int | None = None
    """The oldest so many."""
    to_queue: str | None = None

    def checked(self) -> Wanted:
        filters = self.filters
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
        return self


def wanted(
    *,
    row_ids: Sequence[int] = (),
    statuses: Sequence[Status] = (),
    error_type: str | None = None,
    group: str | None = None,
    event: str | None = None,
    origin: str | None = None,
    start: str | None = None,
    end: str | None = None,
    text: str | None = None,
    limit: int | None = None,
    everything: bool = False,
    to_queue: str | None = None,
) -> Wanted:
    """From the words of a person; both ends of the time count, and a date is its whole day in UTC."""
    filters = asking.asked(
        statuses=statuses,
        error_type=error_type,
        group=group,
        event=event,
        origin=origin,
        since=start,
        until=end,
        text=text,
    )
    return Wanted(filters, tuple(row_ids), everything, limit, to_queue).checked()


def _is_queue(name: str) -> bool:
    try:
        return len(name.encode()) <= LONGEST_NAME
    except UnicodeEncodeError:
        return False


class Plans:
    """Each call is on its own; it holds no connection in between."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def freeze(self, wanted: Wanted, *, actor: str, reason: str, now: datetime, dry_run: bool = False) -> Frozen:
        """The oldest message first; with nothing found, or on a dry run, no plan is kept."""
        wanted.checked()
        if dry_run:
            return self._look(wanted, now)
        with writing(self.engine) as connection:
            plan_id = connection.execute(
                insert(PLANS)
                .values(
                    hash=f"being made {secrets.token_hex(8)}",
                    state="planned",
                    state_since=now,
                    created_at=now,
                    actor=actor,
                    reason=reason,
                    filters=_told(wanted),
                    to_queue=wanted.to_queue,
                    size=0,
                    risks=[],
                )
                .returning(_P.id)
            ).scalar_one()
            recent = plan_facts.recent(connection, now)
            left_out = _fill(connection, plan_id, wanted)
            name, size = _hash(connection, plan_id, wanted.to_queue, now)
            frozen = plan_facts.look(connection, plan_id, name, size, wanted.to_queue, left_out, now, recent)
            if size:
                connection.execute(update(PLANS).where(_P.id == plan_id).values(hash=name, size=size))
            else:
                connection.rollback()
        return frozen

    def _look(self, wanted: Wanted, now: datetime) -> Frozen:
        """As `freeze`, for somebody who may only read: nothing is locked, and nothing written but temporary items."""
        with reading(self.engine) as connection:
            # Of two tables with one name both databases take the temporary one; it ends with the transaction.
            recent = plan_facts.recent(connection, now)  # of the items that it hides
            _SHADOW.create(connection, checkfirst=False)
            left_out = _fill(connection, 0, wanted)
            name, size = _hash(connection, 0, wanted.to_queue, now)
            frozen = plan_facts.look(connection, 0, name, size, wanted.to_queue, left_out, now, recent)
            connection.rollback()
        return frozen

    def keep_risks(self, plan_id: int, risks: Sequence[Risk]) -> None:
        told = [{"name": risk.name, "messages": risk.messages, "says": risk.says} for risk in risks]
        with writing(self.engine) as connection:
            connection.execute(update(PLANS).where(_P.id == plan_id).values(risks=told))

    def recent(self, limit: int = 50) -> tuple[PlanStatus, ...]:
        """The newest first."""
        with reading(self.engine) as connection:
            newest = select(_P.id).order_by(_P.created_at.desc(), _P.id.desc()).limit(limit)
            return tuple(status_of(connection, plan_id) for plan_id in connection.scalars(newest).all())

    def status(self, name: str) -> PlanStatus:
        with reading(self.engine) as connection:
            return status_of(connection, find(connection, name))


def find(connection: Connection, name: str) -> int:
    """The plan with this hash, or with the only one that begins so."""
    wanted = name.strip().lower()
    if len(wanted) < SHORTEST_PREFIX or not wanted.isalnum():
        raise NoSuchPlan(f"'{name}' is no plan's hash; give at least its first {SHORTEST_PREFIX} characters. {_LOOK}")
    found = connection.scalars(select(_P.id).where(_P.hash.startswith(wanted, autoescape=True)).limit(2)).all()
    if len(found) > 1:
        raise NoSuchPlan(f"more than one plan begins with '{name}'; give more of its hash. {_LOOK}")
    if not found:
        raise NoSuchPlan(f"there is no plan '{name}': nothing was moved. {_LOOK}")
    return int(found[0])


_LOOK: Final = "`dlqbatch replay status` lists the plans, `dlqbatch replay plan` makes a new one"


def _told(wanted: Wanted) -> dict[str, object]:
    filters = wanted.filters
    told: dict[str, object] = {
        "error_type": filters.error_type,
        "group": filters.group,
        "event": filters.event,
        "origin": filters.origin,
        "statuses": list(filters.statuses),
        "since": filters.since and filters.since.isoformat(),
        "until": filters.until and filters.until.isoformat(),
        "text": filters.text,
        "limit": wanted.limit,
        "ids": len(wanted.row_ids) or None,
        "all": wanted.everything or None,
    }
    return {name: value for name, value in told.items() if value}


def _fill(connection: Connection, plan_id: int, wanted: Wanted) -> dict[str, int]:
    """Items in the order of their messages' age; says how many were asked for and are left out, by why."""
    if wanted.row_ids:
        return _fill_named(connection, plan_id, wanted)
    filters = wanted.filters
    free = [*filters.conditions(), _M.plan_id.is_(None)]
    if not filters.statuses:
        free.append(_M.status.in_(REPLAYED))
    text = [mentions(filters.text)] if filters.text is not None else []
    last, filled = None, 0
    while True:
        page = free if last is None else [*free, _key() > last]
        edge = connection.execute(
            select(_M.created_at, _M.id).where(*page).order_by(_M.created_at, _M.id).offset(_PAGE - 1).limit(1)
        ).one_or_none()
        if edge is not None:
            last = tuple_(literal(edge[0], Time), literal(edge[1], BIGINT))
            page = [*page, _key() <= last]
        filled += _add(connection, plan_id, filled, [*page, *text])
        if edge is None or (wanted.limit is not None and filled >= wanted.limit):
            break
    if wanted.limit is not None:
        connection.execute(delete(PLAN_ITEMS).where(_I.plan_id == plan_id, _I.place > wanted.limit))
    return _left_out(connection, [*filters.conditions(), *text], filters)


def _fill_named(connection: Connection, plan_id: int, wanted: Wanted) -> dict[str, int]:
    ids = sorted({row_id for row_id in wanted.row_ids if 0 < row_id <= LARGEST_ID})
    left_out: dict[str, int] = {}
    missing = len(set(wanted.row_ids)) - len(ids)
    filled = 0
    for start in range(0, len(ids), _NAMED_AT_ONCE):
        some = ids[start : start + _NAMED_AT_ONCE]
        filled += _add(connection, plan_id, filled, [_M.id.in_(some), _M.status.in_(REPLAYED), _M.plan_id.is_(None)])
        states = connection.execute(select(_M.status, _M.plan_id).where(_M.id.in_(some))).all()
        missing += len(some) - len(states)
        for status, plan in states:
            if status not in REPLAYED or plan is not None:
                why = status if status not in REPLAYED else "reserved by another plan"
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


def _left_out(connection: Connection, conditions: Sequence[ColumnElement[bool]], filters: Filters) -> dict[str, int]:
    """What the filter matches too: it is being worked on, or another plan has it. No more are counted than matter."""
    reserved = [*conditions, _M.status.in_(filters.statuses or REPLAYED), _M.plan_id.is_not(None)]
    counts = {"reserved by another plan": _count(connection, reserved)}
    if not filters.statuses:
        counts["processing"] = _count(connection, [*conditions, _M.status == Status.PROCESSING])
    return {why: number for why, number in counts.items() if number}


def _count(connection: Connection, conditions: Sequence[ColumnElement[bool]]) -> int:
    some = select(_M.id).where(*conditions).limit(_PAGE).subquery()
    return int(connection.scalar(select(func.count()).select_from(some)) or 0)


def _hash(connection: Connection, plan_id: int, to_queue: str | None, now: datetime) -> tuple[str, int]:
    made, size = PlanHash(to_queue, now), 0
    items = select(_I.message_id, _I.seen_status, _I.seen_updated_at).where(_I.plan_id == plan_id).order_by(_I.place)
    for row_id, status, updated_at in connection.execute(items, execution_options={"yield_per": _PAGE}):
        made.add(row_id, status, updated_at)
        size += 1
    return made.hash(), size


def _key() -> ColumnElement[Any]:
    return tuple_(_M.created_at, _M.id)
