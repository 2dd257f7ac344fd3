"""The API under /api/v1: what the command line prints with --json, for programs with a token."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from dlqbatch.actions import queries as actions
from dlqbatch.actions.undo import undo as undo_action
from dlqbatch.amqp.fields import Fields
from dlqbatch.console.addresses import filters_of
from dlqbatch.console.schema import FILTER, checked
from dlqbatch.drain.event_config import EventConfig
from dlqbatch.groups.inbox import inbox
from dlqbatch.lifecycle.rule_rows import Rules
from dlqbatch.messages.changes import Changes
from dlqbatch.messages.edit import header_edits
from dlqbatch.messages.edit_many import ManyEdited, edit_many, edits
from dlqbatch.messages.shown import Reveal
from dlqbatch.monitor import run_list
from dlqbatch.monitor.job import overview
from dlqbatch.replay import plan as plans
from dlqbatch.replay.abort import abort_replay
from dlqbatch.replay.approve import approve_replay
from dlqbatch.replay.batches import ApplyOptions
from dlqbatch.replay.control import pause_replay, resume_replay, set_rate
from dlqbatch.replay.freeze import Selection
from dlqbatch.replay.job import AS_PLANNED, plan_replay, release_replay
from dlqbatch.replay.plan_status import PlanStatus
from dlqbatch.store.engine import reading
from dlqbatch.store.filters import LARGEST_ID, Filters, NotUnderstood, parse_time
from dlqbatch.store.text import json_ready

if TYPE_CHECKING:
    from dlqbatch.console.gate import Call

_LIMIT: Final = 50
_MOST: Final = 1_000
_KEPT_SECONDS: Final = 3_600.0
_KEPT: Final = 1_000
Answer = dict[str, object]


def limit_of(call: Call) -> int:
    text = call.one("limit", str(_LIMIT))
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= _MOST:
        raise NotUnderstood(f"a limit is a number from 1 to {_MOST:,}")
    return int(text)


def _ready(value: object) -> Answer:
    found = json_ready(value)
    assert isinstance(found, dict)  # noqa: S101  (each caller passes a dataclass or a mapping)
    return found


def status(call: Call) -> Answer:
    return overview(call.console.settings).as_dict()


def messages(call: Call) -> Answer:
    page = call.console.messages.page(filters_of(call.query()), limit_of(call), call.one("after") or None)
    return _ready(page)


def message(call: Call) -> Answer:
    return call.console.messages.show(call.number("id")).as_dict()


def message_unmasked(call: Call) -> Answer:
    reason = _text(checked(call.content, call.route.takes), "reason")
    call.note("done", message=call.path("id"))
    return call.console.messages.show(call.number("id"), Reveal(call.actor, reason)).as_dict()


def groups(call: Call) -> Answer:
    return inbox(call.console.engine, filters_of(call.query()), limit_of(call)).as_dict()


def journal(call: Call) -> Answer:
    text, since = call.one("message"), call.one("since")
    row_id = call.whole(text) if text else None
    return _ready(
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


def plan_list(call: Call) -> Answer:
    return {"plans": [plan.as_dict() for plan in plans.recent(call.console.engine, limit_of(call))]}


def plan(call: Call) -> Answer:
    return plans.status(call.console.engine, call.path("hash")).as_dict()


def make_plan(call: Call) -> Answer:
    asked = checked(call.content, call.route.takes)
    filters, row_ids = _chosen(asked)
    to_queue = str(asked["to_queue"]) if asked.get("to_queue") else None
    everything, dry_run = bool(asked.get("everything")), bool(asked.get("dry_run"))
    mended = _text(asked, "mended") if "mended" in asked else None
    selection = Selection(
        filters, row_ids, everything=everything, limit=asked.get("limit"), to_queue=to_queue, mended=mended
    )
    planned = plan_replay(
        call.console.settings, selection, actor=call.actor, reason=_text(asked, "reason"), dry_run=dry_run
    )
    if not dry_run:
        call.note("done", plan=planned.frozen.hash, messages=planned.frozen.size)
    return planned.as_dict()


def release_plan(call: Call) -> Answer:
    asked = checked(call.content, call.route.takes)
    options = ApplyOptions(
        rate=asked.get("rate"), canary=bool(asked.get("canary", True)), guard=bool(asked.get("guard", True))
    )
    reason = _text(asked, "reason") if "reason" in asked else AS_PLANNED
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
    reason = _text(checked(call.content, call.route.takes), "reason")
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
    rate = _text(checked(call.content, call.route.takes), "rate")
    return _noted_plan(call, set_rate(call.console.settings, call.path("hash"), rate, actor=call.actor))


def _noted_plan(call: Call, done: PlanStatus) -> Answer:
    call.note("done", plan=done.hash)
    call.console.snapshots.forget()
    return done.as_dict()


def abort_plan(call: Call) -> Answer:
    done = abort_replay(call.console.settings, call.path("hash"), actor=call.actor)
    call.note("done", plan=done.status.hash)
    return done.as_dict()


def discard(call: Call) -> Answer:
    asked = checked(call.content, call.route.takes)
    filters, row_ids = _chosen(asked)
    done = call.console.messages.discard(
        row_ids,
        None if row_ids else filters,
        actor=call.actor,
        reason=_text(asked, "reason"),
        expect=asked.get("expect"),
        dry_run=bool(asked.get("dry_run")),
        verified=call.is_verified,
    )
    return _noted(call, done)


def restore(call: Call) -> Answer:
    asked = checked(call.content, call.route.takes)
    filters, row_ids = _chosen(asked)
    done = call.console.messages.restore(
        row_ids,
        None if row_ids else filters,
        actor=call.actor,
        reason=_text(asked, "reason"),
        dry_run=bool(asked.get("dry_run")),
        verified=call.is_verified,
    )
    return _noted(call, done)


def edit(call: Call) -> Answer:
    asked = checked(call.content, call.route.takes)
    filters, row_ids = _chosen(asked)
    patch = asked.get("merge_patch")
    headers = header_edits((asked.get("set_headers") or {}).items(), asked.get("remove_headers") or ())
    done = edit_many(
        call.console.engine,
        edits(asked.get("set") or (), None if patch is None else patch.encode("utf-8", "surrogatepass"), headers),
        row_ids,
        None if row_ids else filters,
        actor=call.actor,
        reason=_text(asked, "reason"),
        expect=asked.get("expect"),
        force=bool(asked.get("force")),
        dry_run=bool(asked.get("dry_run")),
        verified=call.is_verified,
        fields=Fields(call.console.settings.fields),
    )
    return _noted(call, done)


def _noted(call: Call, done: Changes | ManyEdited) -> Answer:
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
        call.console.engine, call.path("name"), limit_of(call), call.whole(after) if after else 0
    ).as_dict()


def undo(call: Call) -> Answer:
    asked = checked(call.content, call.route.takes)
    dry_run = bool(asked.get("dry_run"))
    done = undo_action(
        call.console.engine,
        call.path("name"),
        actor=call.actor,
        reason=_text(asked, "reason"),
        dry_run=dry_run,
        verified=call.is_verified,
    )
    return _noted(call, done)


def events(call: Call) -> Answer:
    rows = EventConfig(call.console.engine).read()
    table = [{"event": row.name, "max_retries": row.max_retries, "from": "table", "id": row.id} for row in rows]
    named = [
        {"event": name, "max_retries": retries, "from": "application.properties", "id": None}
        for name, retries in call.console.settings.events.items()
    ]
    return {"events": [*table, *named]}


def set_event(call: Call) -> Answer:
    asked = checked(call.content, call.route.takes)
    row, action = EventConfig(call.console.engine).set(_text(asked, "event"), asked.get("max_retries"), call.by)
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


def _chosen(asked: dict[str, Any]) -> tuple[Filters, tuple[int, ...]]:
    pairs = [(name, str(each)) for name, value in (asked.get("filter") or {}).items() for each in _listed(value)]
    unknown = [name for name in asked.get("filter") or {} if name not in FILTER["properties"]]
    if unknown:
        raise NotUnderstood(f"'{unknown[0]}' is no filter; the filters are {', '.join(FILTER['properties'])}")
    row_ids = tuple(dict.fromkeys(asked.get("ids") or ()))
    if any(not 0 < row_id <= LARGEST_ID for row_id in row_ids):
        raise NotUnderstood("the number of a message is above 0. Nothing was done.")
    if row_ids and pairs:
        raise NotUnderstood("name messages by their ids or by a filter, not both. Nothing was done.")
    return filters_of(pairs), row_ids


def _listed(value: object) -> Iterable[object]:
    return value if isinstance(value, list) else [value]


def _text(asked: dict[str, Any], name: str) -> str:
    text = str(asked[name]).strip()
    if not text or not text.isprintable():
        raise NotUnderstood(f"{name} is a text that is not empty and holds no control characters. Nothing was done.")
    return text


class Repeated:
    """Answers to requests with an Idempotency-Key, which this process keeps for an hour: a repeated one is not done."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: OrderedDict[tuple[str, str, str], tuple[float, Answer]] = OrderedDict()

    def answer(self, call: Call) -> Answer | None:
        with self._lock:
            found = self._kept.get(self._key(call))
        return found[1] if found is not None and time.monotonic() - found[0] < _KEPT_SECONDS else None

    def keep(self, call: Call, answer: Answer) -> None:
        with self._lock:
            self._kept[self._key(call)] = (time.monotonic(), answer)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)

    @staticmethod
    def _key(call: Call) -> tuple[str, str, str]:
        return call.actor, call.request.url.path, call.request.headers.get("idempotency-key", "")
