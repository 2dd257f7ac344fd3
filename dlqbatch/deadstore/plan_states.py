"""What state a plan is in, and what can be done to it there.

planned ──apply──▶ applying ──every item sent or skipped──▶ done
   │                │   ▲
   │                │   └─apply --resume-stopped─ stopped ◀─too many came back─ applying
   └────────────────┴───────────abort──────────▶ aborted
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import exists, select, update

from dlqbatch.deadstore.engine import reading, writing
from dlqbatch.deadstore.plan_facts import origins_of
from dlqbatch.deadstore.plan_items import PlanItems
from dlqbatch.deadstore.plan_status import PlanStatus, status_of
from dlqbatch.deadstore.plans import PlanRefused, find
from dlqbatch.deadstore.reservation import forgotten, let_go
from dlqbatch.deadstore.tables import MESSAGES, PLAN_ITEMS, PLANS
from dlqbatch.deadstore.text import time_text
from dlqbatch.policy.lifecycle import Status

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

    from sqlalchemy import Connection, Engine, Row

    from dlqbatch.message.envelope import Origin

_P: Final = PLANS.c


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


def check(engine: Engine, name: str, *, resume_stopped: bool) -> Applied:
    """NoSuchPlan or PlanRefused unless it may be applied; nothing is changed."""
    with reading(engine) as connection:
        plan_id = find(connection, name)
        plan = connection.execute(select(PLANS).where(_P.id == plan_id)).one()
        _may_apply(plan, resume_stopped=resume_stopped)
        origins = origins_of(connection, plan_id, plan.to_queue)
    since = _counted_from(plan)
    return Applied(
        plan_id, plan.hash, plan.size, plan.to_queue, origins, datetime.fromisoformat(since) if since else None
    )


def start(
    engine: Engine, plan: Applied, *, canary: bool, max_failure_rate: float, resume_stopped: bool, now: datetime
) -> Applied:
    """From here on it is being applied, until it is done, stopped or aborted."""
    with writing(engine) as connection:
        found = connection.execute(select(PLANS).where(_P.id == plan.plan_id).with_for_update()).one()
        _may_apply(found, resume_stopped=resume_stopped)
        progress = {
            "canary": canary,
            "max_failure_rate": max_failure_rate,
            "counted_from": _counted_from(found) or time_text(now),
        }
        _enter(connection, found, "applying", now, progress)
    counted_from = datetime.fromisoformat(str(progress["counted_from"]))
    return Applied(plan.plan_id, plan.hash, plan.size, plan.to_queue, plan.origins, counted_from)


def stop(engine: Engine, plan_id: int, why: str, now: datetime) -> None:
    """Too much of it failed; its rows stay reserved until a person has decided."""
    with writing(engine) as connection:
        found = connection.execute(select(PLANS).where(_P.id == plan_id).with_for_update()).one()
        if found.state == "applying":
            _enter(connection, found, "stopped", now, {**(found.progress or {}), "stopped_why": why})


def finish(engine: Engine, plan_id: int, now: datetime) -> PlanStatus:
    """Done if nothing waits any more; the rows of a plan that is over are let go."""
    with reading(engine) as connection:
        state = connection.scalar(select(_P.state).where(_P.id == plan_id))
        waits = connection.scalar(
            select(exists().where(PLAN_ITEMS.c.plan_id == plan_id, PLAN_ITEMS.c.state == "waiting"))
        )
    if state == "applying" and not waits:
        with writing(engine) as connection:
            found = connection.execute(select(PLANS).where(_P.id == plan_id).with_for_update()).one()
            if found.state == "applying":
                _enter(connection, found, "done", now, found.progress or {})
    if state == "aborted" or not waits:
        # Only now: what comes to rest from here on is nobody's by itself.
        let_go(engine, plan_id)
    with reading(engine) as connection:
        return status_of(connection, plan_id)


def abort(engine: Engine, name: str, *, actor: str, worker: str, lease: timedelta, now: datetime) -> PlanStatus:
    """Its rows are everybody's again, as they are; what an apply sends at this moment it lets go itself.

    An apply that was cut cannot: what it held is given back by an abort after its leases are over, or by the next
    plan or apply of whatever plan.
    """
    with writing(engine) as connection:
        plan_id = find(connection, name)
        found = connection.execute(select(PLANS).where(_P.id == plan_id).with_for_update()).one()
        if found.state == "done":
            raise PlanRefused(
                f"plan {found.hash} is done: there is nothing to abort. `dlqbatch replay status` shows it"
            )
        if found.state != "aborted":
            _enter(connection, found, "aborted", now, found.progress or {})
    PlanItems(engine, plan_id, actor=actor, worker=worker, lease=lease, reason="abort").return_expired(now)
    let_go(engine, plan_id)
    with reading(engine) as connection:
        return status_of(connection, plan_id)


def release_over(engine: Engine, *, actor: str, worker: str, lease: timedelta, now: datetime) -> None:
    """Let go of what plans that are over still have: whoever was cut there, or whatever came to rest as they ended.

    What an apply of an aborted plan held goes back when its leases are over.
    """
    with reading(engine) as connection:
        # Held, or sent: to tell them apart here would be to look at all that are sent.
        held = exists().where(MESSAGES.c.plan_id == _P.id, MESSAGES.c.status == Status.PROCESSING)
        aborted = connection.scalars(select(_P.id).where(_P.state == "aborted", held)).all()
    for plan_id in aborted:
        PlanItems(engine, plan_id, actor=actor, worker=worker, lease=lease, reason="abort").return_expired(now)
    for plan_id in forgotten(engine):
        let_go(engine, plan_id)


def _enter(
    connection: Connection, plan: Row[*tuple[Any, ...]], state: str, now: datetime, progress: Mapping[str, object]
) -> None:
    since = plan.state_since if plan.state == state else now
    changing = update(PLANS).where(_P.id == plan.id)
    connection.execute(changing.values(state=state, state_since=since, progress=dict(progress)))


def _counted_from(plan: Row[*tuple[Any, ...]]) -> str | None:
    """An apply that goes on with another one goes on counting; after a stop it counts anew."""
    return (plan.progress or {}).get("counted_from") if plan.state == "applying" else None


def _may_apply(plan: Row[*tuple[Any, ...]], *, resume_stopped: bool) -> None:
    if plan.state in {"done", "aborted"}:
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
