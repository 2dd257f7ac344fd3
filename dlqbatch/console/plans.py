"""The pages of replay plans: what a plan would send and what speaks against it; how far it is; and its end."""

from __future__ import annotations

import secrets
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import Response

from dlqbatch.console.addresses import chips
from dlqbatch.console.decisions import check_typed, chosen
from dlqbatch.console.rights import Role
from dlqbatch.replay import plan as plans
from dlqbatch.replay.abort import abort_replay
from dlqbatch.replay.approve import approve_replay
from dlqbatch.replay.batches import ApplyOptions
from dlqbatch.replay.canary_and_rate import FIRST_STEP
from dlqbatch.replay.control import pause_replay, resume_replay, set_rate
from dlqbatch.replay.freeze import Selection, made_by
from dlqbatch.replay.job import AS_PLANNED, has_run_lately, plan_replay, release_replay
from dlqbatch.replay.plan_status import PlanStatus
from dlqbatch.replay.second_person import is_same, why_not_alone
from dlqbatch.store.filters import NotUnderstood
from dlqbatch.store.reservation import OVER

if TYPE_CHECKING:
    from dlqbatch.console.gate import Call
    from dlqbatch.console.live import Parts

_SHOWN: Final = 50
PARTS: Final = ("far", "decide")


def listing(call: Call) -> Response:
    return call.page("plans.html", plans=plans.recent(call.console.engine, _SHOWN))


def ask(call: Call) -> Response:
    """Before a plan: what is selected, and the reason that goes with it."""
    found = chosen(call)
    ids = " ".join(map(str, found.row_ids))
    return call.page("plan_ask.html", chips=chips(found.pairs), query=found.query, ids=ids, form=secrets.token_hex(8))


def make(call: Call) -> Response:
    """Freeze what the form selects; nothing is sent."""
    if call.one("step") == "ask":
        return ask(call)
    # A form that is sent again, because its answer was lost, leads to the plan that it has made.
    form = sha256(repr((call.actor, call.form)).encode()).hexdigest() if call.one("form") else ""
    already = made_by(call.console.engine, form)
    if already is not None:
        return call.to(f"/plans/{already}", "This form has made this plan already.")
    found, to_queue = chosen(call), call.one("to_queue").strip() or None
    selection = Selection(
        found.filters,
        found.row_ids,
        everything=call.one("everything") == "yes",
        to_queue=to_queue,
        mended=call.one("mended").strip() or None,
    )
    reason = call.one("reason").strip() or "replay"
    planned = plan_replay(call.console.settings, selection, actor=call.actor, reason=reason, form=form)
    if not planned.frozen.size:
        why = ", ".join(f"{number:,} are left out: {name}" for name, number in planned.frozen.left_out.items())
        raise NotUnderstood(f"nothing matches that can be replayed{f'; {why}' if why else ''}. Nothing was planned.")
    call.note("done", plan=planned.frozen.hash, messages=planned.frozen.size)
    call.console.snapshots.forget()
    return call.to(
        f"/plans/{planned.frozen.hash}", f"{planned.frozen.size:,} messages are planned; nothing has moved yet."
    )


def show(call: Call) -> Response:
    plan = plans.status(call.console.engine, call.path("hash"))
    return call.page(
        "plan.html",
        live=plan.state not in OVER or plan.outcomes.open > 0,
        **_values(call, plan),
    )


def _values(call: Call, plan: PlanStatus) -> dict[str, Any]:
    """What the parts of the page show to this person: how far the plan is, and what can be decided about it."""
    most_alone, is_approved = call.console.settings.replay_approval, plan.approved is not None
    look = call.console.live.watch.last
    return {
        "plan": plan,
        "harmed": look.queues.get(plan.harmed_queue or "") if look is not None else None,
        "may_decide": _may_decide(call),
        "first": min(FIRST_STEP, plan.waiting),
        "not_alone": why_not_alone(
            plan.hash, plan.size, plan.actor, call.actor, is_approved=is_approved, most_alone=most_alone
        ),
        "wants_approval": most_alone is not None
        and plan.size > most_alone
        and not is_approved
        and not is_same(call.actor, plan.actor),
    }


def _may_decide(call: Call) -> bool:
    return call.person is not None and call.person.role >= Role.OPERATOR


def release(call: Call) -> Response:
    """Hand the plan to the job `replay`: in canary steps, or with `send=all` at once if its number is typed."""
    name, at_once = call.path("hash"), call.one("send") == "all"
    if at_once:
        check_typed(call, plans.status(call.console.engine, name).waiting)
    done = release_replay(
        call.console.settings,
        name,
        ApplyOptions(rate=call.one("rate").strip() or None, canary=not at_once),
        actor=call.actor,
        reason=call.one("reason").strip() or AS_PLANNED,
        verified=call.is_verified,
    )
    notice = f"Released: the job `replay` sends {'all of them' if at_once else 'a few first'}."
    if not has_run_lately(call.console.settings):
        notice = (
            "Released, but no run of the job `replay` has begun in the last ten minutes, so nothing is sent yet: "
            "`dlqbatch schedule` or a timer has to start it."
        )
    return _changed(call, done.hash, notice)


def approve(call: Call) -> Response:
    done = approve_replay(
        call.console.settings,
        call.path("hash"),
        actor=call.actor,
        reason=call.one("reason"),
        verified=call.is_verified,
    )
    return _changed(call, done.hash, f"Approved: {done.actor} may send it now.")


def live(call: Call) -> Response:
    console, found = call.console, plans.status(call.console.engine, call.path("hash"))

    def parts() -> Parts:
        values = _values(call, plans.status(console.engine, found.hash))
        return {name: console.pages.part(f"_plan_{name}.html", **values) for name in PARTS}

    # What can be decided differs by the role, and between who made the plan and a second person.
    kind = ("operator" if _may_decide(call) else "reader", "own" if is_same(call.actor, found.actor) else "other")
    return console.live.stream(f"plan:{found.hash}:{':'.join(kind)}", parts)


def abort(call: Call) -> Response:
    done = abort_replay(call.console.settings, call.path("hash"), actor=call.actor).status
    call.note("done", plan=done.hash)
    call.console.snapshots.forget()
    given_up = done.waiting - done.held
    notice = f"Stopped: {done.sent:,} were sent, {given_up:,} are as they were before the plan."
    return call.to(f"/plans/{done.hash}", notice + (f" Of {done.held:,} it is not known yet." if done.held else ""))


def pause(call: Call) -> Response:
    done = pause_replay(call.console.settings, call.path("hash"), actor=call.actor, reason=call.one("reason").strip())
    return _changed(
        call, done.hash, f"Paused: {done.sent:,} were sent, and nothing more is sent until somebody goes on."
    )


def resume(call: Call) -> Response:
    done = resume_replay(call.console.settings, call.path("hash"), actor=call.actor)
    waits = f"It may be sent again; `dlqbatch replay apply {done.hash}` sends the rest."
    return _changed(call, done.hash, waits if done.needs_apply else "It may be sent again.")


def rate(call: Call) -> Response:
    """A rate such as 50/s; faster is twice the rate, slower is half of it, none is without one."""
    done = set_rate(call.console.settings, call.path("hash"), call.one("rate").strip(), actor=call.actor)
    return _changed(call, done.hash, "The rate is changed.")


def _changed(call: Call, name: str, notice: str) -> Response:
    call.note("done", plan=name)
    call.console.snapshots.forget()
    return call.to(f"/plans/{name}", notice)
