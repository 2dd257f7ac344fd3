"""How far a plan is, counted from its items and their attempts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import and_, func, select

from dlqbatch.deadstore.as_json import as_json
from dlqbatch.deadstore.given import among
from dlqbatch.deadstore.tables import ATTEMPTS, MESSAGES, PLAN_ITEMS, PLANS
from dlqbatch.policy.lifecycle import Status
from dlqbatch.policy.replay import CANARY_STEPS, Outcomes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import ColumnElement, Connection

REPLAYED_AS: Final = "replay "
"""What stands before a plan's hash in the journal of each message that it has sent."""
_MOST_REASONS: Final = 20
_P: Final = PLANS.c
_I: Final = PLAN_ITEMS.c
_M: Final = MESSAGES.c
_A: Final = ATTEMPTS.c


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
    """Of all that was sent."""
    canary: bool | None
    """Whether it is applied in canary steps; None: it was not applied yet."""
    max_failure_rate: float | None
    stopped_why: str | None
    held: int
    """Waiting, but an apply is sending them now, or was cut while it did."""
    held_until: datetime | None
    """When the last of their leases ends."""
    counted: Outcomes
    """Of what was sent since it was first applied, or taken up again after a stop: what canary and failure rate see."""

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
                    f"aborted, but {self.held} are held until {self.held_until:%Y-%m-%d %H:%M:%S} UTC; "
                    f"`dlqbatch replay abort {self.hash}` then lets them go too"
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
        names = [field.name for field in fields(self) if field.name not in {"outcomes", "counted"}]
        told = {name: as_json(getattr(self, name)) for name in names}
        outcomes = self.outcomes
        return told | {
            "outcomes": {"failed": outcomes.failed, "succeeded": outcomes.succeeded, "open": outcomes.open},
            "failure_rate": round(self.counted.failure_rate, 4),
            "step": self.step,
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
        outcomes_of(connection, plan_id),
        progress.get("canary"),
        progress.get("max_failure_rate"),
        progress.get("stopped_why"),
        held,
        until,
        outcomes_of(connection, plan_id, datetime.fromisoformat(since) if since else None),
    )


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


def begun(connection: Connection, plan_id: int) -> Sequence[int]:
    """Rows of the plan with an attempt that is not known to be sent: never more than a few applies hold.

    Asked for by themselves: of a plan that has moved since PostgreSQL's last statistics it would join the rows that are
    sent with the items that wait, one by one.
    """
    waiting = select(_I.message_id).where(_I.plan_id == plan_id, _I.state == "waiting", _I.attempt.is_not(None))
    return connection.scalars(waiting).all()


def held_rows(connection: Connection, plan_id: int, now: datetime | None = None) -> tuple[int, datetime | None]:
    """Rows that some apply holds unsent, and when the last lease ends; with a time those whose lease is not over."""
    row_ids = begun(connection, plan_id)
    held = select(func.count(), func.max(_M.lease_until)).where(among(connection, _M.id, row_ids))
    held = held.where(_M.plan_id == plan_id, _M.status == Status.PROCESSING, _M.lease_until.is_not(None))
    if now is not None:
        held = held.where(_M.lease_until >= now)
    number, until = connection.execute(held).one()
    return int(number), until
