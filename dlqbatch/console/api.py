"""The API under /api/v1: what the command line prints with --json, for programs with a token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from dlqbatch import __version__
from dlqbatch.actions import queries as actions
from dlqbatch.actions.undo import undo as undo_action
from dlqbatch.console.addresses import filters_of
from dlqbatch.console.schema import FILTER, checked
from dlqbatch.drain.event_config import EventConfig
from dlqbatch.drain.simulate_since import simulate_since
from dlqbatch.groups.inbox import inbox
from dlqbatch.lifecycle.rule_rows import Rules
from dlqbatch.messages.changes import Changes
from dlqbatch.messages.edit_many import ManyEdited
from dlqbatch.messages.shown import Reveal
from dlqbatch.monitor import run_list
from dlqbatch.monitor.job import overview
from dlqbatch.store.engine import reading
from dlqbatch.store.filters import LARGEST_ID, Filters, NotUnderstood, parse_time
from dlqbatch.store.text import json_ready

if TYPE_CHECKING:
    from dlqbatch.console.gate import Call

_LIMIT: Final = 50
_MOST: Final = 10_000
Answer = dict[str, object]


def limit_of(call: Call) -> int:
    word = call.one("limit", str(_LIMIT))
    if not word.isascii() or not word.isdigit() or not 1 <= int(word[:9]) <= _MOST:
        raise NotUnderstood(f"a limit is a number from 1 to {_MOST:,}")
    return int(word)


def ready(value: object) -> Answer:
    found = json_ready(value)
    assert isinstance(found, dict)  # noqa: S101  (each caller passes a dataclass or a mapping)
    return found


def status(call: Call) -> Answer:
    return overview(call.console.settings).as_dict()


def figures(call: Call) -> Answer:
    """What the screen of `dlqbatch status` is made of."""
    return ready(overview(call.console.settings))


def me(call: Call) -> Answer:
    """Who the login says that this is, and which process answers."""
    assert call.person is not None  # noqa: S101  (the route takes a role)
    return {
        "name": call.actor,
        "role": call.person.role.word,
        "reveals": call.person.may_reveal,
        "version": __version__,
        "instance": call.console.repeated.instance,
    }


def messages(call: Call) -> Answer:
    page = call.console.messages.page(call.filters(), limit_of(call), call.one("after") or None)
    return ready(page)


def message(call: Call) -> Answer:
    return call.console.messages.show(call.number("id")).as_dict()


def message_unmasked(call: Call) -> Answer:
    reason = text(checked(call.content, call.route.takes), "reason")
    call.note("done", message=call.path("id"))
    return call.console.messages.show(call.number("id"), Reveal(call.actor, reason)).as_dict()


def groups(call: Call) -> Answer:
    return inbox(call.console.engine, call.filters(), limit_of(call)).as_dict()


def journal(call: Call) -> Answer:
    number, since = call.one("message"), call.one("since")
    row_id = call.whole(number) if number else None
    return ready(
        call.console.messages.journal(
            row_id,
            actor=call.one("actor") or None,
            since=parse_time(since) if since else None,
            limit=limit_of(call),
        )
    )


def runs(call: Call) -> Answer:
    after = call.one("after")
    with reading(call.console.engine) as connection:
        found = run_list.recent(
            connection, call.one("job") or None, limit_of(call), call.whole(after) if after else None
        )
    return {"runs": json_ready(found), "next": found[-1].id if len(found) == limit_of(call) else None}


def discard(call: Call) -> Answer:
    asked = checked(call.content, call.route.takes)
    filters, row_ids = chosen(asked)
    done = call.console.messages.discard(
        row_ids,
        None if row_ids else filters,
        actor=call.actor,
        reason=text(asked, "reason"),
        everything=bool(asked.get("everything")),
        expect=asked.get("expect"),
        dry_run=bool(asked.get("dry_run")),
        verified=call.is_verified,
    )
    return noted(call, done)


def restore(call: Call) -> Answer:
    asked = checked(call.content, call.route.takes)
    filters, row_ids = chosen(asked)
    done = call.console.messages.restore(
        row_ids,
        None if row_ids else filters,
        actor=call.actor,
        reason=text(asked, "reason"),
        dry_run=bool(asked.get("dry_run")),
        verified=call.is_verified,
    )
    return noted(call, done)


def noted(call: Call, done: Changes | ManyEdited) -> Answer:
    if not done.dry_run:
        call.note("done", action=done.action, done=done.done, refused=done.not_done)
        call.console.snapshots.forget()
    return done.as_dict()


def action_list(call: Call) -> Answer:
    by, kind = call.one("by") or None, call.one("kind") or None
    found = actions.recent(call.console.engine, limit_of(call), actor=by, kind=kind)
    return {"actions": [each.as_dict() for each in found]}


def action(call: Call) -> Answer:
    after = call.one("after")
    return actions.show(
        call.console.engine,
        call.path("name"),
        limit_of(call),
        call.whole(after) if after else 0,
        state=call.one("state") or None,
    ).as_dict()


def undo(call: Call) -> Answer:
    asked = checked(call.content, call.route.takes)
    dry_run = bool(asked.get("dry_run"))
    done = undo_action(
        call.console.engine,
        call.path("name"),
        actor=call.actor,
        reason=text(asked, "reason"),
        dry_run=dry_run,
        verified=call.is_verified,
    )
    return noted(call, done)


def events(call: Call) -> Answer:
    rows = EventConfig(call.console.engine).read()
    table = [{"event": row.name, "max_retries": row.max_retries, "from": "table", "id": row.id} for row in rows]
    named = [
        {"event": name, "max_retries": retries, "from": "application.properties", "id": None}
        for name, retries in call.console.settings.events.items()
    ]
    return {"events": [*table, *named]}


def simulate(call: Call) -> Answer:
    asked = checked(call.content, call.route.takes)
    return simulate_since(call.console.settings, asked["numbers"], str(asked.get("since", "7d"))).as_dict()


def set_event(call: Call) -> Answer:
    asked = checked(call.content, call.route.takes)
    row, action = EventConfig(call.console.engine).set(text(asked, "event"), asked.get("max_retries"), call.by)
    call.note("done", event=row.name, max_retries=row.max_retries, action=action)
    return {"event": row.name, "max_retries": row.max_retries, "id": row.id, "done": "set", "action": action}


def rules(call: Call) -> Answer:
    found, broken = Rules(call.console.engine).read()
    return {
        "rules": json_ready(found),
        "broken": [{"name": each.name, "problem": each.problem} for each in broken],
    }


def document(call: Call) -> Answer:
    from dlqbatch.console.openapi import document_of  # noqa: PLC0415  (it reads the route table, which names this)

    return document_of(call.console)


def chosen(asked: dict[str, Any]) -> tuple[Filters, tuple[int, ...]]:
    pairs = [(name, str(each)) for name, value in (asked.get("filter") or {}).items() for each in _listed(value)]
    unknown = [name for name in asked.get("filter") or {} if name not in FILTER["properties"]]
    if unknown:
        raise NotUnderstood(f"'{unknown[0]}' is no filter; the filters are {', '.join(FILTER['properties'])}")
    row_ids = tuple(dict.fromkeys(asked.get("ids") or ()))
    if any(not 0 < row_id <= LARGEST_ID for row_id in row_ids):
        raise NotUnderstood("the number of a message is above 0. Nothing was done.")
    if row_ids and pairs:
        raise NotUnderstood("name messages by their ids or by a filter, not both. Nothing was done.")
    return filters_of(pairs, as_written=True), row_ids


def _listed(value: object) -> Iterable[object]:
    return value if isinstance(value, list) else [value]


def text(asked: dict[str, Any], name: str) -> str:
    word = str(asked[name]).strip()
    if not word or not word.isprintable():
        raise NotUnderstood(f"{name} is a text that is not empty and holds no control characters. Nothing was done.")
    return word
