"""The API of one group: what it is doing, and what somebody decides about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlqbatch.console.api import Answer, ready, text
from dlqbatch.console.schema import checked
from dlqbatch.groups import decisions
from dlqbatch.groups.decisions import Decided
from dlqbatch.groups.inbox import of_group
from dlqbatch.store.filters import parse_time

if TYPE_CHECKING:
    from dlqbatch.console.gate import Call


def show(call: Call) -> Answer:
    return of_group(call.console.engine, call.path("group")).as_dict()


def hold(call: Call) -> Answer:
    asked = checked(call.content, call.route.takes)
    return _noted(call, decisions.hold(*_about(call), **_by(call, asked), reason=text(asked, "reason")))


def unhold(call: Call) -> Answer:
    asked = checked(call.content, call.route.takes)
    return _noted(call, decisions.unhold(*_about(call), **_by(call, asked), reason=text(asked, "reason")))


def ack(call: Call) -> Answer:
    asked = checked(call.content, call.route.takes)
    until = parse_time(asked["until"]) if "until" in asked else None
    more, reason = asked.get("more"), text(asked, "reason")
    return _noted(call, decisions.acknowledge(*_about(call), **_by(call, asked), until=until, more=more, reason=reason))


def note(call: Call) -> Answer:
    asked = checked(call.content, call.route.takes)
    said: dict[str, Any] = {name: asked.get(name) for name in ("text", "owner", "tags")} | _by(call, asked)
    return _noted(call, decisions.note(*_about(call), **said))


def _about(call: Call) -> tuple[Any, str]:
    return call.console.engine, call.path("group")


def _by(call: Call, asked: dict[str, Any]) -> dict[str, Any]:
    return {"queue": asked.get("queue", ""), "actor": call.actor, "verified": call.is_verified}


def _noted(call: Call, done: Decided) -> Answer:
    call.note("done", group=done.group, action=done.action)
    call.console.snapshots.forget()
    return ready(done)
