"""The page of one group says whether it is one cause, what was tried, and what can be decided about all of it."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from sqlalchemy import Engine
from starlette.responses import Response

from dlqbatch.groups import decisions
from dlqbatch.groups.decisions import Decided
from dlqbatch.groups.inbox import of_group
from dlqbatch.lifecycle.rule_rows import Rules
from dlqbatch.messages.composition import composition
from dlqbatch.store import holds
from dlqbatch.store.engine import reading
from dlqbatch.store.filters import NotUnderstood, parse_time

if TYPE_CHECKING:
    from dlqbatch.console.gate import Call

_FINGERPRINT: Final = re.compile("[0-9a-f]{16}")
_AHEAD: Final = re.compile(r"(\d{1,4})\s*([hd])")


def show(call: Call) -> Response:
    fingerprint = call.path("fingerprint")
    console = call.console
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise NotUnderstood("a group is 16 letters and digits, as the list of groups shows them")
    now = console.clock()
    with reading(console.engine, is_snapshot=True) as connection:
        found = composition(connection, fingerprint, now)
        written = holds.decided(connection, fingerprint, "", lock=False)
    sample = console.messages.show(found.samples["newest"]) if found.samples else None
    explained = None if sample is None else Rules(console.engine).test_message(sample.record.id)
    queues = tuple(found.parts["queue"])
    look = console.live.watch.last
    return call.page(
        "group.html",
        200 if found.total else 404,
        fingerprint=fingerprint,
        group=found,
        seen={name: written.get(name) or "" for name in ("note", "owner")},
        sample=sample,
        explained=explained,
        troubles={queue: console.live.watch.trouble_of(queue) for queue in queues},
        lines=of_group(console.engine, fingerprint, now).lines if found.total else (),
        queues={queue: look.queues[queue] for queue in queues if look is not None and queue in look.queues},
        query=f"group={fingerprint}",
        command=f"dlqbatch messages list --group {fingerprint}",
    )


def hold(call: Call) -> Response:
    return _decided(
        call, decisions.hold(*_about(call), actor=call.actor, reason=_reason(call), verified=call.is_verified)
    )


def unhold(call: Call) -> Response:
    return _decided(
        call, decisions.unhold(*_about(call), actor=call.actor, reason=_reason(call), verified=call.is_verified)
    )


def acknowledge(call: Call) -> Response:
    more = call.one("more").strip()
    return _decided(
        call,
        decisions.acknowledge(
            *_about(call),
            until=_until(call),
            more=call.whole(more) if more else None,
            actor=call.actor,
            reason=_reason(call),
            verified=call.is_verified,
        ),
    )


def note(call: Call) -> Response:
    said, owner = call.one("note").strip(), call.one("owner").strip()
    # What the page showed to whoever wrote: what somebody else has written since stays.
    seen = {"note": call.one("note-before"), "owner": call.one("owner-before")}
    return _decided(
        call,
        decisions.note(*_about(call), text=said, owner=owner, seen=seen, actor=call.actor, verified=call.is_verified),
    )


def _about(call: Call) -> tuple[Engine, str]:
    return call.console.engine, call.path("fingerprint")


def _reason(call: Call) -> str:
    reason = call.one("reason").strip()
    if not reason:
        raise NotUnderstood("a reason is needed: it goes into the journal. Nothing was changed.")
    return reason


def _until(call: Call) -> datetime | None:
    """`4h` and `2d` lie ahead here; anything else is a time as everywhere."""
    text = call.one("until").strip().lower()
    ahead = _AHEAD.fullmatch(text)
    if ahead is not None:
        return call.console.clock() + timedelta(**{{"h": "hours", "d": "days"}[ahead[2]]: int(ahead[1])})
    return parse_time(text) if text else None


def _decided(call: Call, done: Decided) -> Response:
    call.note("done", group=done.group, action=done.action)
    call.console.snapshots.forget()
    return call.to(f"/groups/{done.group}", f"{call.route.what.capitalize()}: done.", done.action)
