"""A replay plan is started, stopped, finished and aborted, and its rows are let go when it is over.

`PLAN_MOVES` in `dlqbatch.store.states` says which state may follow which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, Engine, Row, exists, or_, select, update

from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.errors import DlqbatchError
from dlqbatch.replay.items import RESERVED_TO
from dlqbatch.replay.progress import PlanStatus, status_of
from dlqbatch.replay.risk_facts import origins_of
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.reservation import OVER, let_go
from dlqbatch.store.states import PLAN_MOVES
from dlqbatch.store.tables import MESSAGES, PLAN_ITEMS, PLANS
from dlqbatch.store.text import time_text

_LIST_OR_MAKE: Final = "`dlqbatch replay status` lists the plans, `dlqbatch replay plan` makes a new one"
_SHORTEST_PREFIX: Final = 8  # characters of a hash
_M: Final = MESSAGES.c
_P: Final = PLANS.c


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
        origins = origins_of(connection, plan_id, plan.to_queue)
    since = _counted_from(plan)
    counted_from = datetime.fromisoformat(since) if since else None
    return Applied(plan_id, plan.hash, plan.size, plan.to_queue, origins, counted_from)


def start(
    engine: Engine, plan: Applied, *, canary: bool, max_failure_rate: float, resume_stopped: bool, now: datetime
) -> Applied:
    """From here on it is being applied, until it is done, stopped or aborted."""
    with writing(engine) as connection:
        found = locked(connection, plan.plan_id)
        _may_apply(found, resume_stopped=resume_stopped)
        progress = {
            **{name: value for name, value in (found.progress or {}).items() if name == RESERVED_TO},
            "canary": canary,
            "max_failure_rate": max_failure_rate,
            "counted_from": _counted_from(found) or time_text(now),
        }
        enter(connection, found, "applying", now, progress)
    counted_from = datetime.fromisoformat(str(progress["counted_from"]))
    return replace(plan, counted_from=counted_from, is_first=found.state == "planned")


def take_back(engine: Engine, plan: Applied, now: datetime) -> None:
    """A first apply that was refused before it could do anything: the plan is only planned, as it was."""
    with writing(engine) as connection:
        found = locked(connection, plan.plan_id)
        touched = or_(PLAN_ITEMS.c.state != "waiting", PLAN_ITEMS.c.attempt.is_not(None))
        has_begun = connection.scalar(select(exists().where(PLAN_ITEMS.c.plan_id == plan.plan_id, touched)))
        has_rows = connection.scalar(select(exists().where(_M.plan_id == plan.plan_id)))
        if plan.is_first and found.state == "applying" and not has_begun and not has_rows:
            enter(connection, found, "planned", now, {})


def stop(engine: Engine, plan_id: int, why: str, now: datetime) -> None:
    """Too much of it failed; its rows stay reserved until a person has decided."""
    with writing(engine) as connection:
        found = locked(connection, plan_id)
        if found.state == "applying":
            enter(connection, found, "stopped", now, {**(found.progress or {}), "stopped_why": why})


def finish(engine: Engine, plan_id: int, now: datetime) -> PlanStatus:
    """Done if nothing waits any more; the rows of a plan that is over are let go."""
    with reading(engine) as connection:
        state = connection.scalar(select(_P.state).where(_P.id == plan_id))
        waits = connection.scalar(
            select(exists().where(PLAN_ITEMS.c.plan_id == plan_id, PLAN_ITEMS.c.state == "waiting"))
        )
    if state == "applying" and not waits:
        with writing(engine) as connection:
            found = locked(connection, plan_id)
            if found.state == "applying":
                enter(connection, found, "done", now, found.progress or {})
    if not waits:
        # Only now: what comes to rest from here on is nobody's by itself. Of an aborted plan the abort lets go.
        let_go(engine, plan_id)
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


def _counted_from(plan: Row[*tuple[Any, ...]]) -> str | None:
    """An apply that goes on with another one goes on counting; after a stop it counts anew."""
    return (plan.progress or {}).get("counted_from") if plan.state == "applying" else None


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
