"""How far a replay plan is, what became of the messages that it has sent, and what a person can do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, Row, and_, func, select, text

from dlqbatch.lifecycle import breaker_rows as breakers
from dlqbatch.lifecycle.outcome_rows import unproven
from dlqbatch.lifecycle.return_checks import UnprovenRetries
from dlqbatch.logs import masked, masking
from dlqbatch.replay.canary_and_rate import Outcomes, Step
from dlqbatch.store.bulk import in_list
from dlqbatch.store.reservation import begun
from dlqbatch.store.states import Status
from dlqbatch.store.tables import ATTEMPTS, MESSAGES, OBSERVED, PLAN_ITEMS, PLANS
from dlqbatch.store.text import json_ready

HARMED: Final = "harmed_queue"
"""In `progress` of a plan that the guard has stopped: the queue in which it saw harm."""
MENDED: Final = "mended"
"""In `filters` of a plan: what was mended since its messages failed, by the word of who made the plan."""
STEP: Final = "step"
"""In `progress` of a plan: the canary step that is out, or under way."""
PAUSED: Final = "paused"
"""In `progress` of a stopped plan: who has paused it, and when."""
RATE: Final = "per_second"
"""In `progress` of a plan: how many messages a second it may send; none: as many as can be."""
RELEASED: Final = "released"
"""In `progress` of a plan: who has handed it to the job `replay`, when and why, and how its runs are going."""
APPROVED: Final = "approved"
"""In `progress` of a plan: which second person has agreed to it, when and why."""
NEEDS_APPLY: Final = "needs_apply"
"""In `progress` of a plan that was resumed after its apply had ended: nobody sends it until the next apply."""
COUNTED_FROM: Final = "counted_from"
"""In `progress` of a plan: attempts from before do not count for its canary and its failure rate."""
_MOST_REASONS: Final = 20
_M: Final = MESSAGES.c
_A: Final = ATTEMPTS.c
_P: Final = PLANS.c
_I: Final = PLAN_ITEMS.c


def without_mended(filters: Mapping[str, Any] | None) -> tuple[dict[str, Any], str | None]:
    """What a plan has selected, and what was mended."""
    found = dict(filters or {})
    mended = found.pop(MENDED, None)
    return found, mended


def step_of(plan: Row[*tuple[Any, ...]]) -> Step | None:
    known = (plan.progress or {}).get(STEP) if goes_on_counting(plan) else None
    return Step(*known) if known else None


def goes_on_counting(plan: Row[*tuple[Any, ...]]) -> bool:
    """Whether canary and failure rate go on as they are: after a stop that no person has asked for they begin anew."""
    return plan.state == "applying" or PAUSED in (plan.progress or {})


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
    step: int | None = None
    """Where the canary step ends that is out, or under way, as a total of sent messages; None: all may go."""
    is_paused: bool = False
    """A person has paused it."""
    per_second: float | None = None
    """At most so many messages a second."""
    unproven: Sequence[UnprovenRetries] = ()
    """Where its open retries went, and what is missing there by the newest look."""
    released: Mapping[str, Any] | None = None
    """Who has handed it to the job `replay`, when and why; `problem` is what its newest run met."""
    approved: Mapping[str, Any] | None = None
    """Which second person has agreed to it, when and why."""
    needs_apply: bool = False
    """It was resumed, but the apply that sent it has ended when it stopped."""
    mended: str | None = None
    """What was mended since the messages failed, which answers some risks."""
    harmed_queue: str | None = None
    """The queue in which the guard saw harm, and so stopped the plan."""

    @property
    def do_next(self) -> str:
        """What a person can do about it now."""
        apply = f"dlqbatch replay apply {self.hash}"
        match self.state:
            case "planned":
                release = f"dlqbatch replay release {self.hash}"
                return f"`{apply}` sends it, `{release}` lets the job `replay` send it; nothing has moved yet"
            case "stopped":
                return self._stopped(apply)
            case "applying":
                return self._goes_on()
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

    def _stopped(self, apply: str) -> str:
        stopped = self.stopped_why if self.is_paused else f"stopped: {self.stopped_why}"
        resume = f"`dlqbatch replay resume {self.hash}`"
        if self.is_paused:
            goes_on = f"{resume} lets it go on"
        elif self.released:
            goes_on = f"Look at what came back; then {resume} lets it go on with a new canary"
        else:
            goes_on = f"Look at what came back; then `{apply} --resume-stopped` goes on"
        return f"{stopped}. {goes_on}, or `dlqbatch replay abort {self.hash}` lets the rest go"

    def _nothing_sent(self) -> str:
        return (
            f"nothing was sent: {self.skipped} were skipped, {self.waiting} given up. "
            "`dlqbatch replay plan` makes a plan of what there is now"
        )

    def _goes_on(self) -> str:
        apply = f"`dlqbatch replay apply {self.hash}`"
        if self.needs_apply:
            return (
                f"its apply ended with the stop, so nobody sends it: {apply} goes on with the {self.waiting} that wait"
            )
        goes_on = "the job `replay` goes on" if self.released else f"{apply} goes on"
        if self.released and (problem := self.released.get("problem")):
            return f"{problem}; {goes_on} when that is put right"
        if self.held and self.held_until is not None:
            return (
                f"{self.held} are held by an apply that runs, or that was cut, until {self.held_until:%H:%M:%S} UTC; "
                f"{goes_on}"
            )
        if self.step == self.counted.sent and self.counted.open:
            return (
                f"the first {self.counted.sent} are out, and what became of {self.counted.open} is not known yet; "
                f"{goes_on} when it is, `{apply[1:-1]} --no-canary` without knowing"
            )
        return f"{goes_on} with the {self.waiting} that wait"

    def as_dict(self) -> dict[str, Any]:
        names = [field.name for field in fields(self) if field.name not in {"outcomes", "counted", "unproven"}]
        shown = {name: json_ready(getattr(self, name)) for name in names}
        outcomes = self.outcomes
        return shown | {
            "outcomes": {"failed": outcomes.failed, "succeeded": outcomes.succeeded, "open": outcomes.open},
            "failure_rate": round(self.counted.failure_rate, 4),
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
    filters, mended = without_mended(plan.filters)
    progress = plan.progress or {}
    since = progress.get(COUNTED_FROM)
    step = step_of(plan) if progress.get("canary") else None
    return PlanStatus(
        plan.id,
        plan.hash,
        plan.state,
        plan.state_since,
        plan.created_at,
        plan.actor,
        masked(plan.reason),
        masking().value(filters),
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
        progress.get("stopped_why") and masked(progress["stopped_why"]),
        held,
        until,
        outcomes_of(connection, plan_id, datetime.fromisoformat(since)) if since else outcomes,
        None if step is None else step.to,
        PAUSED in progress,
        progress.get(RATE),
        _unproven(connection, plan_id, plan.to_queue) if outcomes.open else (),
        progress.get(RELEASED),
        progress.get(APPROVED),
        NEEDS_APPLY in progress,
        mended and masked(mended),
        progress.get(HARMED),
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
    if since is None:
        # A message that is deleted by now took its attempts with it, and left in the item what became of this one.
        # Attempt by attempt: PostgreSQL would read all attempts of all messages for a join.
        outcome = func.coalesce(select(_A.outcome).where(this).scalar_subquery(), _I.reason).label("outcome")
        query = select(outcome)
    else:
        outcome = _A.outcome.label("outcome")
        query = select(outcome).select_from(PLAN_ITEMS.join(ATTEMPTS, this))
        # A message that came back before it was marked as sent has no `sent_at`.
        query = query.where(func.coalesce(_A.sent_at, _A.closed_at) >= since)
    each = query.where(_I.plan_id == plan_id, _I.state == "sent").subquery()
    counted = select(each.c.outcome, func.count()).group_by(each.c.outcome)
    found = {outcome: int(number) for outcome, number in connection.execute(counted)}
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
