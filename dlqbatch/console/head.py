"""The page that takes the message at the head of a queue out, which kills whoever consumes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from dlqbatch.ingest.head import take_head
from dlqbatch.jobs import RunOptions
from dlqbatch.store.filters import NotUnderstood

if TYPE_CHECKING:
    from dlqbatch.console.gate import Call


def ask(call: Call) -> Response:
    """`plan` is the replay that the guard has stopped for this queue."""
    return call.page("head.html", queue=_queue(call), plan=_plan(call))


def take(call: Call) -> Response:
    """Take it, and show the message; from there, or from the replay, the bar offers to lift its hold."""
    queue, reason, plan = _queue(call), call.one("reason").strip(), _plan(call)
    if not reason:
        raise NotUnderstood("a reason is needed: it goes into the journal. Nothing was changed.")
    taken = take_head(
        call.console.settings,
        RunOptions(),
        queue,
        actor=call.actor,
        reason=reason,
        note=call.one("note").strip() or None,
        takes_any=call.one("any") == "yes",
        verified=call.is_verified,
    )
    call.note("done", queue=queue, message=taken.id, action=taken.action)
    call.console.snapshots.forget()
    notice = f"Message {taken.id} was taken out of {queue}, and is on hold. {taken.warning}".strip()
    return call.to(f"/plans/{plan}" if plan else f"/messages/{taken.id}", notice, taken.action)


def _queue(call: Call) -> str:
    queue = call.one("queue")
    if not queue:
        raise NotUnderstood("name the queue. Nothing was changed.")
    return queue


def _plan(call: Call) -> str:
    """The hash of a plan; what is none leads nowhere."""
    plan = call.one("plan")
    return plan if plan.isascii() and plan.isalnum() else ""
