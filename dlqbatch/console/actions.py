"""The pages of actions say what people did, to which messages, and take it back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from starlette.responses import Response

from dlqbatch.actions import queries
from dlqbatch.actions.undo import undo as undo_action
from dlqbatch.console.pages import shown
from dlqbatch.store.filters import NotUnderstood

if TYPE_CHECKING:
    from dlqbatch.console.gate import Call

_PAGE: Final = 50
_MESSAGES: Final = 100


def listing(call: Call) -> Response:
    by, kind = call.one("by").strip(), call.one("kind").strip()
    found = queries.recent(call.console.engine, _PAGE, actor=by or None, kind=kind or None)
    return call.page("actions.html", actions=found, by=by, kind=kind)


def show(call: Call) -> Response:
    after, state = call.one("after", "0"), call.one("state") or None
    if not (after.isascii() and after.isdigit()):
        raise NotUnderstood("a page of messages goes on after a number")
    found = queries.show(call.console.engine, call.path("name"), _MESSAGES, int(after), state=state)
    more = urlencode({**({"state": state} if state else {}), "after": found.next}) if found.next else ""
    return call.page("action.html", action=found.action, messages=found.messages, more=more, state=state)


def undo(call: Call) -> Response:
    name, reason = call.path("name"), call.one("reason").strip() or "undone in the console"
    before = queries.show(call.console.engine, name, 1).action
    done = undo_action(call.console.engine, name, actor=call.actor, reason=reason, verified=call.is_verified)
    call.note("done", action=name, undo=done.action, done=done.done, skipped=done.not_done)
    call.console.snapshots.forget()
    if not done.done and before.undone_by is not None:
        by = queries.show(call.console.engine, before.undone_by, 1).action.actor
        notice = f"{name} was undone already, by {shown(by, 60)} as {before.undone_by}: nothing was changed."
        return call.to(f"/actions/{name}", notice)
    skipped = f", {done.not_done:,} skipped, for they have changed since" if done.not_done else ""
    return call.to(f"/actions/{done.action or name}", f"{done.done:,} are as they were before {name}{skipped}.")
