"""In which state a replay plan is, what may follow, and how far it is.

`PLAN_MOVES` in `dlqbatch.store.states` draws the states and their moves. An abort is in `dlqbatch.replay.abort`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Engine, Row, and_, exists, func, or_, select, text, update

from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.errors import DlqbatchError
from dlqbatch.lifecycle import breaker_rows as breakers
from dlqbatch.lifecycle.outcome_rows import unproven
from dlqbatch.lifecycle.proof import UnprovenRetries
from dlqbatch.replay.canary_and_rate import CANARY_STEPS, Outcomes
from dlqbatch.replay.risk_facts import origins_of
from dlqbatch.store.bulk import in_list
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.reservation import OVER, begun, release_reservations
from dlqbatch.store.states import PLAN_MOVES, Status
from dlqbatch.store.tables import ATTEMPTS, MESSAGES, OBSERVED, PLAN_ITEMS, PLANS
from dlqbatch.store.text import json_ready, time_text

# In `progress` of a plan: the place up to which its rows are reserved.
RESERVED_TO: Final = "reserved_to"
_LIST_OR_MAKE: Final = "`dlqbatch replay status` lists the plans, `dlqbatch replay plan` makes a new one"
_SHORTEST_PREFIX: Final = 8  # characters of a hash
_MOST_REASONS: Final = 20
_M: Final = MESSAGES.c
_A: Final = ATTEMPTS.c
_P: Final = PLANS.c
_I: Final = PLAN_ITEMS.c


class NoSuchPlan(DlqbatchError):
    """No plan has this hash, or several begin like it."""

    exit_code = 2


class PlanRefused(DlqbatchError):
    """The plan is not in a state in which that can be done to it."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Applied:
    """A plan that may be applied, or is being applied."""

    plan_id: int
    hash: str
    size: int
    to_queue: str | None
    origins: Mapping[Origin, int]
    counted_from: datetime | None = None
    """Attempts from before do not count for its failure rate."""
    is_first: bool = False
    """It was never applied before."""


def find(connection: Connection, name: str) -> int:
    """The plan with this hash, or with the only one that begins so."""
    wanted = name.strip().lower()
    if len(wanted) < _SHORTEST_PREFIX or not wanted.isalnum():
        raise NoSuchPlan(
            f"'{name}' is no plan's hash; give at least its first {_SHORTEST_PREFIX} characters. {_LIST_OR_MAKE}"
        )
    found = connection.scalars(select(_P.id).where(_P.hash.startswith(wanted, autoescape=True)).limit(2)).all()
    if len(found) > 1:
        raise NoSuchPlan(f"more than one plan begins with '{name}'; give more of its hash. {_LIST_OR_MAKE}")
    if not found:
        raise NoSuchPlan(f"there is no plan '{name}': nothing was moved. {_LIST_OR_MAKE}")
    return int(found[0])


def status(engine: Engine, name: str) -> PlanStatus:
    with reading(engine) as connection:
        return status_of(connection, find(connection, name))


def recent(engine: Engine, limit: int = 50) -> tuple[PlanStatus, ...]:
    """The newest first."""
    with reading(engine) as connection:
        newest = select(_P.id).order_by(_P.created_at.desc(), _P.id.desc()).limit(limit)
        return tuple(status_of(connection, plan_id) for plan_id in connection.scalars(newest).all())


def check(engine: Engine, name: str, *, resume_stopped: bool) -> Applied:
    """NoSuchPlan or PlanRefused unless it may be applied; nothing is changed."""
    with reading(engine) as connection:
        plan_id = find(connection, name)
        plan = connection.execute(select(PLANS).where(_P.id == plan_id)).one()
        _may_apply(plan, resume_stopped=resume_stopped)
        origins, _ = origins_of(connection, plan_id, plan.to_queue)
    return Applied(plan_id, plan.hash, plan.size, plan.to_queue, origins, _counted_from(plan))


def start(
    engine: Engine, plan: Applied, *, canary: bool, max_failure_rate: float, resume_stopped: bool, now: datetime
) -> Applied:
    """The plan is being applied from this commit on, until it is done, stopped or aborted."""
    with writing(engine) as connection:
        found = locked(connection, plan.plan_id)
        _may_apply(found, resume_stopped=resume_stopped)
        counted_from = _counted_from(found) or now
        progress = {
            **{name: value for name, value in (found.progress or {}).items() if name == RESERVED_TO},
            "canary": canary,
            "max_failure_rate": max_failure_rate,
            "counted_from": time_text(counted_from),
        }
        enter(connection, found, "applying", now, progress)
    return replace(plan, counted_from=counted_from, is_first=found.state == "planned")


def take_back(engine: Engine, plan: Applied, now: datetime) -> None:
    """After a first apply that failed before it did anything, the plan is `planned` again."""
    with writing(engine) as connection:
        found = locked(connection, plan.plan_id)
        touched = or_(_I.state != "waiting", _I.attempt.is_not(None))
        has_begun = connection.scalar(select(exists().where(_I.plan_id == plan.plan_id, touched)))
        has_rows = connection.scalar(select(exists().where(_M.plan_id == plan.plan_id)))
        if plan.is_first and found.state == "applying" and not has_begun and not has_rows:
            enter(connection, found, "planned", now, {})


def stop(engine: Engine, plan_id: int, why: str, now: datetime) -> None:
    """Too much of the plan failed; its rows stay reserved until a person decides."""
    with writing(engine) as connection:
        found = locked(connection, plan_id)
        if found.state == "applying":
            enter(connection, found, "stopped", now, {**(found.progress or {}), "stopped_why": why})


def finish(engine: Engine, plan_id: int, now: datetime) -> PlanStatus:
    """The plan is done if no message waits any more; then its rows are released."""
    with reading(engine) as connection:
        state = connection.scalar(select(_P.state).where(_P.id == plan_id))
        waits = connection.scalar(select(exists().where(_I.plan_id == plan_id, _I.state == "waiting")))
    if state == "applying" and not waits:
        with writing(engine) as connection:
            found = locked(connection, plan_id)
            if found.state == "applying":
                enter(connection, found, "done", now, found.progress or {})
    if not waits:
        # Only now: rows that leave processing after this keep no reservation. An abort releases its rows itself.
        release_reservations(engine, plan_id)
    with reading(engine) as connection:
        return status_of(connection, plan_id)


def locked(connection: Connection, plan_id: int) -> Row[*tuple[Any, ...]]:
    return connection.execute(select(PLANS).where(_P.id == plan_id).with_for_update()).one()


def enter(
    connection: Connection, plan: Row[*tuple[Any, ...]], state: str, now: datetime, progress: Mapping[str, object]
) -> None:
    if state != plan.state and state not in PLAN_MOVES[plan.state]:
        raise PlanRefused(f"plan {plan.hash} is {plan.state}, and cannot become {state}")
    since = plan.state_since if plan.state == state else now
    changing = update(PLANS).where(_P.id == plan.id)
    connection.execute(changing.values(state=state, state_since=since, progress=dict(progress)))


def _counted_from(plan: Row[*tuple[Any, ...]]) -> datetime | None:
    """A further apply goes on counting; after a stop it counts anew."""
    since = plan.progress.get("counted_from") if plan.state == "applying" else None
    return datetime.fromisoformat(since) if since else None


def _may_apply(plan: Row[*tuple[Any, ...]], *, resume_stopped: bool) -> None:
    if plan.state in OVER:
        raise PlanRefused(
            f"plan {plan.hash} is {plan.state}, and was so since {plan.state_since:%Y-%m-%d %H:%M:%S} UTC: nothing was "
            "moved. Make a new one with `dlqbatch replay plan`, which holds what there is now."
        )
    if plan.state == "stopped" and not resume_stopped:
        raise PlanRefused(
            f"plan {plan.hash} was stopped: {(plan.progress or {}).get('stopped_why')}. Nothing was moved. When the "
            f"cause is gone, `dlqbatch replay apply {plan.hash} --resume-stopped` goes on; "
            f"`dlqbatch replay abort {plan.hash}` lets its messages go."
        )


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
    """Where its open retries went, and what is missing there by the newest look."""

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
        shown = {name: json_ready(getattr(self, name)) for name in names}
        outcomes = self.outcomes
        return shown | {
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
    """The outcomes of the items that were sent at `since` or later."""
    this = and_(_A.message_id == _I.message_id, _A.number == _I.attempt)
    outcome: ColumnElement[Any] = _A.outcome
    if since is None:
        # A message that is deleted by now took its attempts with it, and left in the item what became of this one.
        outcome = func.coalesce(_A.outcome, _I.reason)
        query = select(outcome, func.count()).select_from(PLAN_ITEMS.outerjoin(ATTEMPTS, this))
    else:
        query = select(outcome, func.count()).select_from(PLAN_ITEMS.join(ATTEMPTS, this))
        # A message that came back before it was marked as sent has no `sent_at`.
        query = query.where(func.coalesce(_A.sent_at, _A.closed_at) >= since)
    query = query.where(_I.plan_id == plan_id, _I.state == "sent").group_by(outcome)
    found = {outcome: int(number) for outcome, number in connection.execute(query)}
    # Given up, because its origin is gone or a person has discarded it: no success, and nothing to wait for.
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
