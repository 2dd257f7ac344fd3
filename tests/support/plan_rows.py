"""Replay plans as a test makes them: of dead messages of one origin, applied by one worker or by several."""

from __future__ import annotations

import itertools
import secrets
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dead_rows import NOW, row
from dead_rows import add as arrive
from sqlalchemy import insert, select, update

from dlqbatch.lifecycle.outcome_rows import SentAttempts
from dlqbatch.replay import plan as plan_states
from dlqbatch.replay.abort import end_aborted, enter_aborted
from dlqbatch.replay.freeze import Selection
from dlqbatch.replay.freeze import freeze as freeze_plan
from dlqbatch.replay.items import PlanItems
from dlqbatch.store import journal as states
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.states import Status
from dlqbatch.store.tables import MESSAGES, PLAN_ITEMS, PLANS

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Engine

    from dlqbatch.replay.plan_status import PlanStatus
    from dlqbatch.replay.risk_facts import Frozen

LEASE = timedelta(seconds=60)
LATER = NOW + timedelta(seconds=1)
AFTER_LEASE = LATER + LEASE + timedelta(seconds=1)


def dead(**columns: Any) -> dict[str, Any]:
    return row(origin_queue="work", origin_exchange="", origin_key="work", event="work", **columns)


def add(engine: Engine, *rows: dict[str, Any], at: datetime = NOW) -> list[int]:
    """One after the other, so that the order of their ids is the order they are given in."""
    return [arrive(engine, each, at=at)[0] for each in rows]


def freeze(engine: Engine, what: Selection | None = None, *, dry_run: bool = False) -> Frozen:
    everything = Selection(everything=True) if what is None else what
    # Of the same moment two plans of the same messages would be one.
    now = NOW + timedelta(microseconds=next(_plans))
    return freeze_plan(engine, everything, actor="ann", reason="why", now=now, dry_run=dry_run)


_plans = itertools.count()


def applying(
    engine: Engine, frozen: Frozen, worker: str = "one", *, again: bool = False, now: datetime = LATER
) -> PlanItems:
    plan = plan_states.check(engine, frozen.hash, resume_stopped=again)
    plan = plan_states.start(engine, plan, canary=False, max_failure_rate=0.1, resume_stopped=again, now=now)
    return PlanItems(
        engine,
        plan.plan_id,
        actor="ann",
        worker=worker,
        lease=LEASE,
        reason="replay",
        to_queue=plan.to_queue,
        counted_from=plan.counted_from,
        is_in_order=plan.is_in_order,
    )


def reserve(engine: Engine, *row_ids: int, state: str = "applying") -> int:
    """Rows of a plan in this state, which somebody else applies."""
    plan = {"hash": secrets.token_hex(8), "state": state, "state_since": NOW, "created_at": NOW, "actor": "ann"}
    told = {"reason": "why", "filters": {}, "size": len(row_ids), "risks": []}
    with writing(engine) as connection:
        plan_id = connection.execute(insert(PLANS).values(plan | told).returning(PLANS.c.id)).scalar_one()
        connection.execute(update(MESSAGES).where(MESSAGES.c.id.in_(row_ids)).values(plan_id=plan_id))
    return int(plan_id)


def send(items: PlanItems, number: int = 100, ceiling: int | None = None, now: datetime = LATER) -> list[int]:
    numbers = items.take(number, ceiling, now).numbers
    items.sent(numbers, now)
    return list(numbers)


def rest(engine: Engine, *row_ids: int) -> None:
    """What was sent is under observation no longer."""
    done = SentAttempts(engine).leave_to_person(dict.fromkeys(row_ids, (1, "nobody can tell")), LATER)
    assert done == set(row_ids)


def items_of(engine: Engine, frozen: Frozen) -> list[tuple[int, str]]:
    with reading(engine) as connection:
        asked = select(PLAN_ITEMS.c.message_id, PLAN_ITEMS.c.state).where(PLAN_ITEMS.c.plan_id == frozen.plan_id)
        return [(row_id, state) for row_id, state in connection.execute(asked.order_by(PLAN_ITEMS.c.place))]


def column(engine: Engine, name: str, *row_ids: int) -> list[Any]:
    with reading(engine) as connection:
        asked = select(MESSAGES.c[name]).where(MESSAGES.c.id.in_(row_ids)).order_by(MESSAGES.c.id)
        return list(connection.scalars(asked))


def status(engine: Engine, frozen: Frozen) -> PlanStatus:
    return plan_states.status(engine, frozen.hash)


def go_to(engine: Engine, row_id: int, *way: Status) -> None:
    with writing(engine) as connection:
        for start, end in itertools.pairwise(way):
            lock = {"lock_token": "t", "lock_owner": "w"} if end is Status.PROCESSING else {}
            token = "t" if start is Status.PROCESSING else None
            assert states.move(connection, row_id, start, end, token, LATER, "somebody", "test", **lock)


def abort(engine: Engine, frozen: Frozen, now: datetime = LATER) -> PlanStatus:
    """As a person's abort, which waits for nobody."""
    plan_id = enter_aborted(engine, frozen.hash, now=now)
    return end_aborted(engine, plan_id, actor="bob", worker="b", lease=LEASE, now=now)
