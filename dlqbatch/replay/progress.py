"""How far a plan is, and which of its messages may still go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Engine, Row, Select, Update, and_, func, or_, select, text, update

from dlqbatch.lifecycle import breaker_rows as breakers
from dlqbatch.lifecycle.attempts import Outgoing, without_bodies
from dlqbatch.lifecycle.outcome_rows import unproven
from dlqbatch.lifecycle.proof import UnprovenRetries
from dlqbatch.replay.canary_and_rate import CANARY_STEPS, Outcomes
from dlqbatch.store.bulk import in_list
from dlqbatch.store.engine import reading
from dlqbatch.store.reservation import Items, begun, items_of_rows
from dlqbatch.store.states import ITEM_MOVES, Status
from dlqbatch.store.tables import ATTEMPTS, MESSAGES, OBSERVED, PLAN_ITEMS, PLANS
from dlqbatch.store.text import json_ready

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
)


@dataclass(frozen=True, slots=True)
class Standing:
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


def standing(
    engine: Engine,
    plan_id: int,
    to_queue: str | None,
    counted_from: datetime,
    refuses: Callable[[Outgoing], bool] = lambda _: False,
) -> Standing:
    """Nothing is locked and nothing written; all of it is as it was at one moment of each thousand.

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
    return Standing(ready, held, until, dict(skipped), outcomes, tuple(refused))


def waiting_items(connection: Connection, plan_id: int, after: int, limit: int) -> Sequence[AnyRow]:
    """The plan's next items, in its order."""
    found = select(_I.place, _I.message_id, _I.seen_status, _I.seen_updated_at, _I.attempt).where(
        _I.plan_id == plan_id, _I.state == "waiting", _I.place > after
    )
    return connection.execute(found.order_by(_I.place).limit(limit)).all()


def current_rows(connection: Connection, row_ids: Sequence[int], *, locked: bool = False) -> Rows:
    rows = select(*_ROW).where(in_list(connection, _M.id, row_ids)).order_by(_M.id)
    # Waits for whoever holds one of them: transactions are short, and what is passed over would be left behind.
    return {row.id: row for row in connection.execute(rows.with_for_update() if locked else rows)}


def confirmed_items(*these: ColumnElement[bool]) -> Select[Any]:
    """Messages of these items whose attempt the broker confirmed, or that came back; whatever the row is by now."""
    this = and_(ATTEMPTS.c.message_id == _I.message_id, ATTEMPTS.c.number == _I.attempt)
    found = select(_I.message_id).select_from(PLAN_ITEMS.join(ATTEMPTS, this))
    return found.where(*these, or_(ATTEMPTS.c.sent_at.is_not(None), ATTEMPTS.c.outcome == "failed"))


def move_items(state: str, these: Items) -> Update:
    """A statement that moves those of these items to a state that may go there."""
    starts = [start for start, ends in ITEM_MOVES.items() if state in ends]
    return update(PLAN_ITEMS).where(*these, _I.state.in_(starts)).values(state=state)


def skip_items(connection: Connection, plan_id: int, places: Mapping[int, int], why_not: Mapping[int, str]) -> None:
    """They go to nobody by this plan."""
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
    """Those whose attempt the broker confirmed, or that came back, are sent; whatever the row is by now."""
    tried = [item.message_id for item in items if item.attempt is not None]
    if not tried:
        return set()
    found = connection.scalars(confirmed_items(*items_of_rows(plan_id, places, tried, connection))).all()
    connection.execute(move_items("sent", items_of_rows(plan_id, places, found, connection)))
    return set(found)


def is_held(row: AnyRow, plan_id: int) -> bool:
    """By another apply, or by one that was cut: its lease tells who may go on with it."""
    return bool(row.plan_id == plan_id and row.status == Status.PROCESSING)


def reason_to_skip(item: AnyRow, row: AnyRow | None, plan_id: int, to_queue: str | None) -> str:
    """Empty if it may go."""
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
    return why


@dataclass(frozen=True, slots=True)
class PlanStatus:
    id: int
    hash: str
    state: str
    """planned, applying, done, stopped or aborted."""
    state_since: datetime
    created_at: datetime
    actor: str
    reason: str
    filters: Mapping[str, Any]
    to_queue: str | None
    size: int
    risks: Sequence[Mapping[str, Any]]
    waiting: int
    sent: int
    skipped: int
    skipped_why: Mapping[str, int]
    outcomes: Outcomes
    """The outcomes of all that was sent."""
    canary: bool | None
    """Whether it is applied in canary steps; None: it was not applied yet."""
    max_failure_rate: float | None
    stopped_why: str | None
    held: int
    """Waiting, but an apply is sending them now, or was cut while it did."""
    held_until: datetime | None
    """When the last of their leases ends."""
    counted: Outcomes
    """The outcomes of what was sent since the first apply, or since a stop: canary and failure rate see these."""
    unproven: Sequence[UnprovenRetries] = ()
    """Where its open retries went, and what is missing there, as the newest look found it."""

    @property
    def step(self) -> int | None:
        """The canary step that is out, or under way; None: all may go, or none has gone."""
        if not self.canary or self.state != "applying":
            return None
        return next((step for step in CANARY_STEPS if step >= self.counted.sent), None)

    @property
    def do_next(self) -> str:
        """What a person can do about it now."""
        apply = f"dlqbatch replay apply {self.hash}"
        match self.state:
            case "planned":
                return f"`{apply}` sends it; nothing has moved yet"
            case "stopped":
                return (
                    f"stopped: {self.stopped_why}. Look at what came back; then `{apply} --resume-stopped` goes on, or "
                    f"`dlqbatch replay abort {self.hash}` lets the rest go"
                )
            case "applying":
                return self._goes_on(apply)
            case "done" if self.outcomes.open:
                return "every message is out; drain, ingest and lifecycle find out which of them come back"
            case "aborted" if self.held:
                return (
                    f"a run that was killed, or that hears nothing from the database or the broker, had begun to send "
                    f"{self.held} of them: the broker may have some. Nothing more is sent. After "
                    f"{self.held_until:%Y-%m-%d %H:%M:%S} UTC the next run of the lifecycle, or "
                    f"`dlqbatch replay abort {self.hash}`, makes them what they were before"
                )
            case _:
                return "nothing: it is over" if self.sent else self._nothing_sent()

    def _nothing_sent(self) -> str:
        return (
            f"nothing was sent: {self.skipped} were skipped, {self.waiting} given up. "
            "`dlqbatch replay plan` makes a plan of what there is now"
        )

    def _goes_on(self, apply: str) -> str:
        if self.held and self.held_until is not None:
            return (
                f"{self.held} are held by an apply that runs, or that was cut, until {self.held_until:%H:%M:%S} UTC; "
                f"`{apply}` goes on"
            )
        if self.step == self.counted.sent and self.counted.open:
            return (
                f"the first {self.counted.sent} are out, and what became of {self.counted.open} is not known yet; "
                f"`{apply}` goes on when it is, `{apply} --no-canary` without knowing"
            )
        return f"`{apply}` goes on with the {self.waiting} that wait"

    def as_dict(self) -> dict[str, object]:
        names = [field.name for field in fields(self) if field.name not in {"outcomes", "counted", "unproven"}]
        told = {name: json_ready(getattr(self, name)) for name in names}
        outcomes = self.outcomes
        return told | {
            "outcomes": {"failed": outcomes.failed, "succeeded": outcomes.succeeded, "open": outcomes.open},
            "failure_rate": round(self.counted.failure_rate, 4),
            "step": self.step,
            "unproven": [each.as_dict() for each in self.unproven],
            "do_next": self.do_next,
        }


def status_of(connection: Connection, plan_id: int) -> PlanStatus:
    plan = connection.execute(select(PLANS).where(_P.id == plan_id)).one()
    numbers = {
        state: int(number)
        for state, number in connection.execute(
            select(_I.state, func.count()).where(_I.plan_id == plan_id).group_by(_I.state)
        )
    }
    why = connection.execute(
        select(_I.reason, func.count())
        .where(_I.plan_id == plan_id, _I.state == "skipped")
        .group_by(_I.reason)
        .order_by(func.count().desc(), _I.reason)
        .limit(_MOST_REASONS)
    )
    held, until = held_rows(connection, plan_id)
    outcomes = outcomes_of(connection, plan_id)
    progress = plan.progress or {}
    since = progress.get("counted_from")
    return PlanStatus(
        plan.id,
        plan.hash,
        plan.state,
        plan.state_since,
        plan.created_at,
        plan.actor,
        plan.reason,
        plan.filters,
        plan.to_queue,
        plan.size,
        plan.risks,
        numbers.get("waiting", 0),
        numbers.get("sent", 0),
        numbers.get("skipped", 0),
        {reason or "": number for reason, number in why},
        outcomes,
        progress.get("canary"),
        progress.get("max_failure_rate"),
        progress.get("stopped_why"),
        held,
        until,
        outcomes_of(connection, plan_id, datetime.fromisoformat(since) if since else None),
        _unproven(connection, plan_id, plan.to_queue) if outcomes.open else (),
    )


def _unproven(connection: Connection, plan_id: int, to_queue: str | None) -> Sequence[UnprovenRetries]:
    known = unproven(connection)
    if not known:
        return ()
    this = (_A.message_id == _I.message_id, _A.number == _I.attempt, text(OBSERVED))
    origins = (
        select(_M.origin_queue, _M.origin_exchange, _M.origin_key)
        .distinct()
        .select_from(PLAN_ITEMS.join(ATTEMPTS, and_(*this)).join(MESSAGES, _M.id == _I.message_id))
    )
    found = connection.execute(origins.where(_I.plan_id == plan_id, _I.state == "sent"))
    places = {to_queue or breakers.place(*origin) for origin in found}
    return tuple(each for each in known if each.place in places)


def outcomes_of(connection: Connection, plan_id: int, since: datetime | None = None) -> Outcomes:
    """Of the items sent at `since` or later."""
    this = and_(_A.message_id == _I.message_id, _A.number == _I.attempt)
    outcome: ColumnElement[Any] = _A.outcome
    if since is None:
        # A message that is deleted by now took its attempts with it, and left in the item what became of this one.
        outcome = func.coalesce(_A.outcome, _I.reason)
        asked = select(outcome, func.count()).select_from(PLAN_ITEMS.outerjoin(ATTEMPTS, this))
    else:
        asked = select(outcome, func.count()).select_from(PLAN_ITEMS.join(ATTEMPTS, this))
        # What came back before it was marked has no time of its sending.
        asked = asked.where(func.coalesce(_A.sent_at, _A.closed_at) >= since)
    asked = asked.where(_I.plan_id == plan_id, _I.state == "sent").group_by(outcome)
    found = {outcome: int(number) for outcome, number in connection.execute(asked)}
    # Given up, for its origin is gone or a person has discarded it: nobody waits for it, and it is no success.
    failed = found.get("failed", 0) + found.get("abandoned", 0)
    return Outcomes(sum(found.values()), failed, found.get("succeeded", 0))


def held_rows(connection: Connection, plan_id: int, now: datetime | None = None) -> tuple[int, datetime | None]:
    """Rows that some apply holds unsent, and when the last lease ends; with a time those whose lease is not over."""
    row_ids = begun(connection, plan_id)
    held = select(func.count(), func.max(_M.lease_until)).where(in_list(connection, _M.id, row_ids))
    held = held.where(_M.plan_id == plan_id, _M.status == Status.PROCESSING, _M.lease_until.is_not(None))
    if now is not None:
        held = held.where(_M.lease_until >= now)
    number, until = connection.execute(held).one()
    return int(number), until
