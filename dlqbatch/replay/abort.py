"""An abort stops a running apply: when `abort_replay` returns, nothing of the plan is published any more.

1. The plan becomes `aborted`. From that commit on no apply gets a permission to publish (`batches.py`), whatever
   process or machine it runs on: it marks what was confirmed, and gives its rows back.
2. The abort waits until no apply holds a row, or for longer than a permission lasts.
3. The plan's rows are released. What a killed apply held follows after its leases (`lifecycle/ended_replays.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Engine, select

from dlqbatch.lifecycle.ended_replays import return_expired
from dlqbatch.replay.control import await_applies
from dlqbatch.replay.items import LEASE
from dlqbatch.replay.job import store_for_person
from dlqbatch.replay.plan import PlanRefused, enter, find, locked
from dlqbatch.replay.plan_status import PlanStatus, status_of
from dlqbatch.replay.send_plan import worker_name
from dlqbatch.settings import Settings
from dlqbatch.store.access import StoreClock
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.reservation import release_reservations
from dlqbatch.store.tables import PLAN_ITEMS

_MOST_SENT_IDS: Final = 1_000


@dataclass(frozen=True, slots=True)
class Aborted:
    status: PlanStatus
    sent_ids: tuple[int, ...]
    """The first thousand of the messages that the plan has sent."""

    def as_dict(self) -> dict[str, Any]:
        return {**self.status.as_dict(), "sent_ids": list(self.sent_ids)}


def abort_replay(
    settings: Settings,
    name: str,
    *,
    actor: str,
    stopped: Callable[[], bool] = lambda: False,
    waiting: Callable[[int], None] = lambda _: None,
) -> Aborted:
    """`waiting` is called with the number of messages that an apply still holds, while the abort waits for it."""
    engine = store_for_person(actor, settings)
    clock = StoreClock(engine)
    plan_id = enter_aborted(engine, name, now=clock())
    await_applies(engine, plan_id, stopped, waiting)
    status = end_aborted(engine, plan_id, actor=actor, worker=worker_name(), lease=LEASE, now=clock(), is_over=stopped)
    return Aborted(status, _sent_ids(engine, plan_id))


def enter_aborted(engine: Engine, name: str, *, now: datetime) -> int:
    """The id of the plan, which nobody takes a message of from this commit on; PlanRefused if it is done."""
    with writing(engine) as connection:
        plan_id = find(connection, name)
        found = locked(connection, plan_id)
        if found.state == "done":
            raise PlanRefused(
                f"plan {found.hash} is done: there is nothing to abort. `dlqbatch replay status` shows it"
            )
        if found.state != "aborted":
            enter(connection, found, "aborted", now, found.progress or {})
    return plan_id


def end_aborted(
    engine: Engine,
    plan_id: int,
    *,
    actor: str,
    worker: str,
    lease: timedelta,
    now: datetime,
    is_over: Callable[[], bool] = lambda: False,
) -> PlanStatus:
    """Release the plan's rows, but for those that an apply still holds."""
    return_expired(engine, plan_id, actor=actor, worker=worker, lease=lease, now=now)
    release_reservations(engine, plan_id, is_over)
    with reading(engine) as connection:
        return status_of(connection, plan_id)


def _sent_ids(engine: Engine, plan_id: int) -> tuple[int, ...]:
    items = PLAN_ITEMS.c
    with reading(engine) as connection:
        sent = select(items.message_id).where(items.plan_id == plan_id, items.state == "sent")
        return tuple(connection.scalars(sent.order_by(items.place).limit(_MOST_SENT_IDS)))
