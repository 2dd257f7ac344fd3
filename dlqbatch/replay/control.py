"""A person pauses, resumes, or changes the rate of a plan that is being applied, from anywhere.

What they ask is kept with the plan. An apply reads it before it takes messages, and every half a second while it
publishes; so a pause holds like an abort does (`abort.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import Final

from sqlalchemy import Engine

from dlqbatch.errors import SettingsError
from dlqbatch.replay.batches import PERMISSION
from dlqbatch.replay.canary_and_rate import rate_of
from dlqbatch.replay.job import store_for_person
from dlqbatch.replay.plan import PlanRefused, enter, find, locked
from dlqbatch.replay.plan_status import (
    COUNTED_FROM,
    HARMED,
    NEEDS_APPLY,
    PAUSED,
    RATE,
    RELEASED,
    STEP,
    PlanStatus,
    held_rows,
    status_of,
)
from dlqbatch.settings import Settings
from dlqbatch.store.access import StoreClock
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.text import time_text

# Seconds for the applies that are under way to say what they have sent. A permission to publish is over by then.
_WAITS: Final = 2 * PERMISSION
_LOOKS_EVERY: Final = 0.05
NO_RATE: Final = "none"
FASTER: Final = "faster"
SLOWER: Final = "slower"
_TIMES: Final = {FASTER: 2.0, SLOWER: 0.5}


def pause_replay(
    settings: Settings,
    name: str,
    *,
    actor: str,
    reason: str = "",
    stopped: Callable[[], bool] = lambda: False,
    waiting: Callable[[int], None] = lambda _: None,
) -> PlanStatus:
    """When it returns, nothing of the plan is published any more until somebody resumes it.

    `waiting` is called with the number of messages that an apply still holds, while the pause waits for it.
    """
    engine = store_for_person(actor, settings)
    plan_id = enter_paused(engine, name, actor=actor, reason=reason, now=StoreClock(engine)())
    await_applies(engine, plan_id, stopped, waiting)
    with reading(engine) as connection:
        return status_of(connection, plan_id)


def await_applies(engine: Engine, plan_id: int, stopped: Callable[[], bool], waiting: Callable[[int], None]) -> None:
    """Wait until no apply holds a row of the plan, or for longer than a permission to publish lasts."""
    until = time.monotonic() + _WAITS
    while time.monotonic() < until and not stopped():
        with reading(engine) as connection:
            held, _ = held_rows(connection, plan_id)
        if not held:
            return
        waiting(held)
        time.sleep(_LOOKS_EVERY)


def enter_paused(engine: Engine, name: str, *, actor: str, reason: str, now: datetime) -> int:
    """The id of the plan; from this commit on no apply gets a permission to publish."""
    with writing(engine) as connection:
        plan_id = find(connection, name)
        plan = locked(connection, plan_id)
        if plan.state not in {"applying", "stopped"}:
            raise PlanRefused(f"plan {plan.hash} is {plan.state}: nothing of it is being sent, and nothing was changed")
        if plan.state == "applying":
            why = f"paused by {actor}" + (f": {reason}" if reason else "")
            paused = {"stopped_why": why, PAUSED: {"by": actor, "at": time_text(now)}}
            enter(connection, plan, "stopped", now, {**plan.progress, **paused})
    return plan_id


def resume_replay(settings: Settings, name: str, *, actor: str) -> PlanStatus:
    """The plan may be sent again. After a stop that no person has asked for it begins with a new canary."""
    engine = store_for_person(actor, settings)
    now = StoreClock(engine)()
    with writing(engine) as connection:
        plan_id = find(connection, name)
        plan = locked(connection, plan_id)
        if plan.state == "stopped":
            enter(connection, plan, "applying", now, resumed(plan.progress, now))
        elif plan.state != "applying":
            raise PlanRefused(f"plan {plan.hash} is {plan.state}, and was not paused: nothing was changed")
    with reading(engine) as connection:
        return status_of(connection, plan_id)


def resumed(progress: dict[str, object], now: datetime) -> dict[str, object]:
    """The progress of a stopped plan that goes on: where it was if a person has paused it, else counted anew."""
    kept = {name: value for name, value in progress.items() if name not in {"stopped_why", HARMED, PAUSED}}
    if PAUSED in progress:
        return kept
    kept.pop(STEP, None)
    # The job goes on with a released plan; the apply of another one has ended.
    return {**kept, COUNTED_FROM: time_text(now)} | ({} if RELEASED in progress else {NEEDS_APPLY: True})


def set_rate(settings: Settings, name: str, rate: str, *, actor: str) -> PlanStatus:
    """`rate` is a rate such as 50/s, or faster (twice as fast), slower (half as fast) or none."""
    engine = store_for_person(actor, settings)
    with writing(engine) as connection:
        plan_id = find(connection, name)
        plan = locked(connection, plan_id)
        if plan.state in {"done", "aborted"}:
            raise PlanRefused(f"plan {plan.hash} is {plan.state}: it has no rate any more, and nothing was changed")
        now_per_second = (plan.progress or {}).get(RATE)
        if rate not in _TIMES:
            per_second = None if rate == NO_RATE else rate_of(rate)
        elif now_per_second is None:
            raise SettingsError(f"plan {plan.hash} has no rate, so nothing is {rate}; name one, such as 50/s")
        else:
            per_second = now_per_second * _TIMES[rate]
        enter(connection, plan, plan.state, plan.state_since, {**(plan.progress or {}), RATE: per_second})
    with reading(engine) as connection:
        return status_of(connection, plan_id)
