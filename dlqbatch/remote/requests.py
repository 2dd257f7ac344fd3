"""Which request stands for which function: `REQUESTS` has each function that a command may call at a console.

A request takes the arguments of its function, with the console in the place of database or settings, and returns what
the function would have returned. Who it was is known by the token.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from dlqbatch.actions.queries import Action, ActionMessage, ShownAction
from dlqbatch.amqp.packed import Unpacked
from dlqbatch.amqp.readable import Readable
from dlqbatch.errors import SettingsError
from dlqbatch.groups.decisions import Decided
from dlqbatch.groups.inbox import Inbox, Line
from dlqbatch.messages.actions import Journal, Listing
from dlqbatch.messages.changes import Change, Changes
from dlqbatch.messages.content import ShownContent
from dlqbatch.messages.edit import Edited, Original
from dlqbatch.messages.edit_many import EditedMessage, ManyEdited
from dlqbatch.messages.queries import Attempt, Content, Groups, Record, Transition
from dlqbatch.messages.search import Searched
from dlqbatch.messages.selection import Split
from dlqbatch.messages.shown import Reveal, Shown, stack_note
from dlqbatch.messages.timeline import Step
from dlqbatch.monitor.job import Overview
from dlqbatch.remote.client import RemoteConsole, segment
from dlqbatch.remote.decode import decode
from dlqbatch.replay.batches import ApplyOptions
from dlqbatch.replay.freeze import Selection
from dlqbatch.store.filters import Filters


@dataclass(frozen=True, slots=True)
class Answered:
    """What a command prints as it came."""

    content: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return dict(self.content)


def words(filters: Filters | None) -> dict[str, list[str]]:
    """The filter as the API takes it; reading it there gives this filter again."""
    if filters is None:
        return {}
    found: dict[str, Iterable[object]] = {
        "status": filters.statuses,
        "id": filters.ids,
        "error-type": filters.error_types,
        "group": filters.groups,
        "event": filters.events,
        "origin": filters.origins,
        "source": filters.sources,
        "tag": filters.tags,
        "field": [f"{name}={value}" for name, values in filters.fields for value in values],
        "text": filters.texts,
        "action": filters.actions,
        "not": [f"{name.replace(' ', '-')}={value}" for name, value in filters.unwanted],
        "since": [] if filters.since is None else [filters.since.isoformat()],
        # An end that is written as a time counts itself.
        "until": [] if filters.until is None else [(filters.until - timedelta(microseconds=1)).isoformat()],
        "edits": [] if filters.is_edit is None else [("no", "yes")[filters.is_edit]],
    }
    return {name: texts for name, values in found.items() if (texts := list(map(str, values)))}


def _chosen(row_ids: Sequence[int], filters: Filters | None) -> dict[str, object]:
    return {"ids": list(row_ids) or None, "filter": words(filters) or None}


def _page(
    console: RemoteConsole, filters: Filters, limit: int = 50, after: str | None = None, by: Reveal | None = None
) -> Listing:
    if by is not None:
        raise SettingsError(
            "a list is not revealed by --remote. Nothing was shown. `dlqbatch messages show ID --reveal` shows one"
        )
    return decode(Listing, console.ask("/messages", filter=words(filters), limit=limit, after=after))


def _groups_of_messages(console: RemoteConsole, filters: Filters, limit: int = 50) -> Groups:
    return decode(Groups, console.ask("/messages/groups", filter=words(filters), limit=limit))


def _near(console: RemoteConsole, filters: Filters) -> list[str]:
    return decode(list[str], console.ask("/messages/near", filter=words(filters))["near"])


def _values_not_found(console: RemoteConsole, filters: Filters) -> list[str]:
    if not (filters.ids or filters.fields or filters.origins or filters.unwanted):
        return []
    return decode(list[str], console.ask("/messages/missing", filter=words(filters))["missing"])


def _show(console: RemoteConsole, row_id: int, by: Reveal | None = None) -> Shown:
    if by is None:
        found = console.get(f"/messages/{row_id}")
    else:
        found = console.ask(f"/messages/{row_id}/reveal", reason=by.reason)
    body = b64decode(found["body_base64"])
    content = Content(body, b64decode(found["properties_base64"] or ""))
    packed = found["body_unpacked_base64"]
    unpacked = Unpacked(
        body if packed is None else b64decode(packed),
        tuple(found["body_packed"]),
        found["body_unpacked_whole"] is not False,
    )
    readable = Readable(found["properties"], found["headers"], found["properties_readable"])
    return Shown(
        decode(Record, found),
        content,
        decode(tuple[Attempt, ...], found["attempts"]),
        decode(tuple[Transition, ...], found["transitions"]),
        decode(tuple[Step, ...], found["timeline"]),
        ShownContent(readable, unpacked, found["masked"], found["body_form"]),
        stack_note(body),
        found["masked"],
        found["plan"],
    )


def _journal(
    console: RemoteConsole,
    row_id: int | None = None,
    *,
    actor: str | None = None,
    since: datetime | None = None,
    limit: int = 50,
) -> Journal:
    begin = None if since is None else since.isoformat()
    return decode(Journal, console.get("/journal", message=row_id, actor=actor, since=begin, limit=limit))


def _search_bodies(
    console: RemoteConsole,
    text: str,
    filters: Filters,
    *,
    limit: int,
    after: str | None = None,
    seconds: float,
    **_: object,
) -> Searched:
    asked = {"sought": text, "filter": words(filters), "limit": limit, "after": after, "max-seconds": seconds}
    return decode(Searched, console.ask("/search", seconds=seconds, **asked))


def _fields_with(console: RemoteConsole, text: str) -> list[str]:
    return decode(list[str], console.ask("/fields", sought=text)["fields"])


def _changes(found: Mapping[str, Any]) -> Changes:
    return Changes(
        decode(tuple[Change, ...], found["messages"]),
        found["dry_run"],
        found["action"],
        Split.from_dict(found["split"]) if "split" in found else None,
        tuple(found.get("left", ())),
    )


def _discard(
    console: RemoteConsole,
    row_ids: Sequence[int] = (),
    filters: Filters | None = None,
    *,
    reason: str,
    everything: bool = False,
    expect: int | None = None,
    dry_run: bool = False,
    **_: object,
) -> Changes:
    asked = {"reason": reason, "everything": everything, "expect": expect, "dry_run": dry_run}
    return _changes(console.decide("/discard", **_chosen(row_ids, filters), **asked))


def _restore(
    console: RemoteConsole,
    row_ids: Sequence[int] = (),
    filters: Filters | None = None,
    *,
    reason: str,
    dry_run: bool = False,
    **_: object,
) -> Changes:
    return _changes(console.decide("/restore", **_chosen(row_ids, filters), reason=reason, dry_run=dry_run))


def _edit_written(
    console: RemoteConsole,
    values: Sequence[str],
    patch: bytes | None,
    headers: Sequence[tuple[str, str]],
    removed: Sequence[str],
    row_ids: Sequence[int] = (),
    filters: Filters | None = None,
    *,
    reason: str,
    expect: int | None = None,
    force: bool = False,
    dry_run: bool = False,
    **_: object,
) -> ManyEdited:
    found = console.decide(
        "/edit",
        **_chosen(row_ids, filters),
        reason=reason,
        set=list(values) or None,
        merge_patch=None if patch is None else patch.decode("utf-8", "surrogateescape"),
        set_headers=dict(headers) or None,
        remove_headers=list(removed) or None,
        expect=expect,
        force=force,
        dry_run=dry_run,
    )
    return ManyEdited(
        decode(tuple[EditedMessage, ...], found["messages"]),
        found["dry_run"],
        found["action"],
        Split.from_dict(found["split"]) if "split" in found else None,
    )


def _original(console: RemoteConsole, row_id: int, by: Reveal, *, force: bool = False, **_: object) -> Original:
    found = console.ask(f"/messages/{row_id}/original", reason=by.reason, force=force)
    return Original(b64decode(found["body_base64"]), found["form"])


def _edit_one(
    console: RemoteConsole,
    row_id: int,
    body: bytes | None,
    headers: Sequence[tuple[str, str]],
    removed: Sequence[str],
    *,
    reason: str,
    force: bool = False,
    dry_run: bool = False,
    **_: object,
) -> Edited:
    found = console.decide(
        f"/messages/{row_id}/edit",
        reason=reason,
        body_base64=None if body is None else b64encode(body).decode(),
        set_headers=dict(headers) or None,
        remove_headers=list(removed) or None,
        force=force,
        dry_run=dry_run,
    )
    return decode(Edited, found)


def _inbox(console: RemoteConsole, filters: Filters, limit: int = 50) -> Inbox:
    return _lines(console.ask("/groups", filter=words(filters), limit=limit))


def _of_group(console: RemoteConsole, word: str) -> Inbox:
    return _lines(console.get(f"/groups/{segment(word)}"))


def _lines(found: Mapping[str, Any]) -> Inbox:
    lines = decode(tuple[Line, ...], found["groups"])
    return Inbox(lines, found["is_complete"], found["total"])


def _group_decision(what: str) -> Callable[..., Decided]:
    def decide(console: RemoteConsole, group: str, *, queue: str = "", **asked: Any) -> Decided:
        until = asked.pop("until", None)
        del asked["actor"]
        content = {**asked, "queue": queue or None, "until": until and until.isoformat()}
        return decode(Decided, console.decide(f"/groups/{segment(group)}/{what}", **content))

    return decide


def _recent(
    console: RemoteConsole, limit: int = 50, *, actor: str | None = None, kind: str | None = None
) -> tuple[Action, ...]:
    found = console.get("/actions", limit=limit, by=actor, kind=kind)["actions"]
    return decode(tuple[Action, ...], found)


def _show_action(
    console: RemoteConsole, name: str, limit: int = 50, after: int = 0, *, state: str | None = None
) -> ShownAction:
    found = console.get(f"/actions/{segment(name)}", limit=limit, after=after or None, state=state)
    messages = decode(tuple[ActionMessage, ...], found["messages"])
    return ShownAction(decode(Action, found), messages, found["next"])


def _undo(console: RemoteConsole, name: str, *, reason: str, dry_run: bool = False, **_: object) -> Changes:
    return _changes(console.decide(f"/actions/{segment(name)}/undo", reason=reason, dry_run=dry_run))


def _overview(console: RemoteConsole, **_: object) -> Overview:
    return decode(Overview, console.get("/status/figures"))


def _plan(console: RemoteConsole, selection: Selection, *, reason: str, dry_run: bool = False, **_: object) -> Answered:
    return Answered(
        console.decide(
            "/plans",
            **_chosen(selection.row_ids, selection.filters),
            reason=reason,
            everything=selection.everything,
            limit=selection.limit,
            to_queue=selection.to_queue,
            in_order=selection.in_order,
            mended=selection.mended,
            dry_run=dry_run,
        )
    )


def _release(console: RemoteConsole, name: str, options: ApplyOptions, *, reason: str, **_: object) -> Answered:
    return Answered(
        console.decide(
            f"/plans/{segment(name)}/release",
            reason=reason,
            rate=options.rate,
            canary=options.canary,
            max_failure_rate=options.max_failure_rate,
            guard=options.guard,
        )
    )


def _has_run_lately(console: RemoteConsole) -> bool:
    return bool(console.get("/jobs/replay")["has_run_lately"])


def _status(console: RemoteConsole, name: str) -> Answered:
    return Answered(console.get(f"/plans/{segment(name)}"))


def _plans(console: RemoteConsole, limit: int) -> tuple[Answered, ...]:
    return tuple(map(Answered, console.get("/plans", limit=limit)["plans"]))


def _plan_decision(what: str) -> Callable[..., Answered]:
    def decide(console: RemoteConsole, name: str, *words_: str, reason: str = "", **_: object) -> Answered:
        asked = {"reason": reason or None, "rate": words_[0] if words_ else None}
        return Answered(console.decide(f"/plans/{segment(name)}/{what}", **asked))

    return decide


def _simulated(console: RemoteConsole, numbers: Mapping[str, int], since: str) -> Answered:
    return Answered(console.ask("/events/simulate", numbers=dict(numbers), since=since))


REQUESTS: Final[Mapping[str, Callable[..., Any]]] = {
    "dlqbatch.messages.actions.MessageActions.page": _page,
    "dlqbatch.messages.actions.MessageActions.groups": _groups_of_messages,
    "dlqbatch.messages.actions.MessageActions.near": _near,
    "dlqbatch.messages.actions.MessageActions.values_not_found": _values_not_found,
    "dlqbatch.messages.actions.MessageActions.show": _show,
    "dlqbatch.messages.actions.MessageActions.journal": _journal,
    "dlqbatch.messages.actions.MessageActions.discard": _discard,
    "dlqbatch.messages.actions.MessageActions.restore": _restore,
    "dlqbatch.messages.search.search_bodies": _search_bodies,
    "dlqbatch.messages.search.fields_with": _fields_with,
    "dlqbatch.messages.edit_written.edit_written": _edit_written,
    "dlqbatch.messages.edit_written.edit_one": _edit_one,
    "dlqbatch.messages.edit_written.original": _original,
    "dlqbatch.groups.inbox.inbox": _inbox,
    "dlqbatch.groups.inbox.of_group": _of_group,
    "dlqbatch.groups.decisions.hold": _group_decision("hold"),
    "dlqbatch.groups.decisions.unhold": _group_decision("unhold"),
    "dlqbatch.groups.decisions.acknowledge": _group_decision("ack"),
    "dlqbatch.groups.decisions.note": _group_decision("note"),
    "dlqbatch.actions.queries.recent": _recent,
    "dlqbatch.actions.queries.show": _show_action,
    "dlqbatch.actions.undo.undo": _undo,
    "dlqbatch.monitor.job.overview": _overview,
    "dlqbatch.replay.job.plan_replay": _plan,
    "dlqbatch.replay.job.release_replay": _release,
    "dlqbatch.replay.job.has_run_lately": _has_run_lately,
    "dlqbatch.replay.job.replay_status": _status,
    "dlqbatch.replay.job.replay_plans": _plans,
    "dlqbatch.replay.approve.approve_replay": _plan_decision("approve"),
    "dlqbatch.replay.control.pause_replay": _plan_decision("pause"),
    "dlqbatch.replay.control.resume_replay": _plan_decision("resume"),
    "dlqbatch.replay.control.set_rate": _plan_decision("rate"),
    "dlqbatch.replay.abort.abort_replay": _plan_decision("abort"),
    "dlqbatch.drain.simulate_since.simulate_since": _simulated,
}
