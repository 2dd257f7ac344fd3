"""A second person agrees to a plan that is larger than one person may send alone (`dlqbatch.replay-approval`)."""

from __future__ import annotations

from dlqbatch.replay.job import store_for_person
from dlqbatch.replay.plan import PlanRefused, enter, find, locked
from dlqbatch.replay.plan_status import APPROVED, PlanStatus, status_of
from dlqbatch.replay.second_person import is_same
from dlqbatch.settings import Settings
from dlqbatch.store import action_log
from dlqbatch.store.access import StoreClock
from dlqbatch.store.action_log import Request
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.text import time_text


def approve_replay(settings: Settings, name: str, *, actor: str, reason: str, verified: bool = False) -> PlanStatus:
    """Its maker may send the plan from now on; the maker cannot approve it."""
    engine = store_for_person(actor, settings, reason)
    now = StoreClock(engine)()
    with writing(engine) as connection:
        plan_id = find(connection, name)
        plan = locked(connection, plan_id)
        if is_same(actor, plan.actor):
            raise PlanRefused(
                f"plan {plan.hash} was made by {plan.actor}: another person has to approve it. Nothing was changed"
            )
        if plan.state != "planned":
            raise PlanRefused(f"plan {plan.hash} is {plan.state}: there is nothing to approve. Nothing was changed")
        approved = {"by": actor, "at": time_text(now), "reason": reason, "verified": verified}
        enter(connection, plan, plan.state, now, {**(plan.progress or {}), APPROVED: approved})
        details = {"plan": plan.hash, "plan_id": plan.id}
        request = Request("approve", actor, reason, verified, filters=plan.filters, details=details)
        action_log.begin(connection, request, now, ended=True)
    with reading(engine) as connection:
        return status_of(connection, plan_id)
