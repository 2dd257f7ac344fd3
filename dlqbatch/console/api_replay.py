"""The API of replays: plans are made, approved, released, paused, resumed and aborted, as by the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlqbatch.console.api import Answer, chosen, limit_of, text
from dlqbatch.console.schema import checked
from dlqbatch.replay import plan as plans
from dlqbatch.replay.abort import abort_replay
from dlqbatch.replay.approve import approve_replay
from dlqbatch.replay.batches import ApplyOptions
from dlqbatch.replay.canary_and_rate import MAX_FAILURE_RATE
from dlqbatch.replay.control import pause_replay, resume_replay, set_rate
from dlqbatch.replay.freeze import Selection
from dlqbatch.replay.job import AS_PLANNED, has_run_lately, plan_replay, release_replay
from dlqbatch.replay.plan_status import PlanStatus

if TYPE_CHECKING:
    from dlqbatch.console.gate import Call


def plan_list(call: Call) -> Answer:
    return {"plans": [plan.as_dict() for plan in plans.recent(call.console.engine, limit_of(call))]}


def plan(call: Call) -> Answer:
    return plans.status(call.console.engine, call.path("hash")).as_dict()


def make_plan(call: Call) -> Answer:
    asked = checked(call.content, call.route.takes)
    filters, row_ids = chosen(asked)
    to_queue = str(asked["to_queue"]) if asked.get("to_queue") else None
    everything, dry_run = bool(asked.get("everything")), bool(asked.get("dry_run"))
    mended = text(asked, "mended") if "mended" in asked else None
    selection = Selection(filters, row_ids, everything, asked.get("limit"), to_queue, asked.get("in_order"), mended)
    planned = plan_replay(
        call.console.settings, selection, actor=call.actor, reason=text(asked, "reason"), dry_run=dry_run
    )
    if not dry_run:
        call.note("done", plan=planned.frozen.hash, messages=planned.frozen.size)
    return planned.as_dict()


def release_plan(call: Call) -> Answer:
    asked = checked(call.content, call.route.takes)
    options = ApplyOptions(
        rate=asked.get("rate"),
        canary=bool(asked.get("canary", True)),
        max_failure_rate=asked.get("max_failure_rate", MAX_FAILURE_RATE),
        guard=bool(asked.get("guard", True)),
    )
    reason = text(asked, "reason") if "reason" in asked else AS_PLANNED
    done = release_replay(
        call.console.settings,
        call.path("hash"),
        options,
        actor=call.actor,
        reason=reason,
        verified=call.is_verified,
    )
    return _noted_plan(call, done)


def approve_plan(call: Call) -> Answer:
    reason = text(checked(call.content, call.route.takes), "reason")
    done = approve_replay(
        call.console.settings, call.path("hash"), actor=call.actor, reason=reason, verified=call.is_verified
    )
    return _noted_plan(call, done)


def pause_plan(call: Call) -> Answer:
    reason = str(checked(call.content, call.route.takes).get("reason", "")).strip()
    return _noted_plan(call, pause_replay(call.console.settings, call.path("hash"), actor=call.actor, reason=reason))


def resume_plan(call: Call) -> Answer:
    checked(call.content, call.route.takes)
    return _noted_plan(call, resume_replay(call.console.settings, call.path("hash"), actor=call.actor))


def rate_of_plan(call: Call) -> Answer:
    """A rate such as 50/s, or faster, slower or none."""
    rate = text(checked(call.content, call.route.takes), "rate")
    return _noted_plan(call, set_rate(call.console.settings, call.path("hash"), rate, actor=call.actor))


def _noted_plan(call: Call, done: PlanStatus) -> Answer:
    call.note("done", plan=done.hash)
    call.console.snapshots.forget()
    return done.as_dict()


def abort_plan(call: Call) -> Answer:
    done = abort_replay(call.console.settings, call.path("hash"), actor=call.actor)
    call.note("done", plan=done.status.hash)
    return done.as_dict()


def job(call: Call) -> Answer:
    """Whether the job that sends released plans has run a short time ago."""
    return {"has_run_lately": has_run_lately(call.console.settings)}
