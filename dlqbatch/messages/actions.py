"""What people do to dead messages: the command line calls it, and so can a web console."""

from __future__ import annotations

import secrets
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, Engine, select, update

from dlqbatch.amqp.readable import BodyForm, Readable, body_form, body_lines, readable
from dlqbatch.ingest.dialects import read_dramatiq
from dlqbatch.lifecycle import breaker_rows as breakers
from dlqbatch.lifecycle.attempts import IS_SENT
from dlqbatch.messages import queries as messages
from dlqbatch.messages.queries import WAITING, Attempt, Content, Detail, Groups, Record, Transition, linked_by_edits
from dlqbatch.messages.timeline import Step, timeline
from dlqbatch.store import journal as states
from dlqbatch.store.access import StoreClock
from dlqbatch.store.engine import keeping, reading, writing
from dlqbatch.store.filter_conditions import near
from dlqbatch.store.filters import LARGEST_ID, Filters, NoSuchMessage, NotUnderstood, Place
from dlqbatch.store.reservation import hash_of, holder
from dlqbatch.store.states import Move, Status, path, path_of_discard
from dlqbatch.store.tables import ATTEMPTS, MESSAGES, TRANSITIONS
from dlqbatch.store.text import json_ready

JOURNAL_LOOKED_THROUGH: Final = 200_000
"""Without a message, so many of the newest entries of the journal are searched for an actor."""
_PAGE: Final = 200
_M: Final = MESSAGES.c
_T: Final = TRANSITIONS.c


@dataclass(frozen=True, slots=True)
class Listing:
    messages: tuple[Record, ...]
    next: str | None
    """What the next page begins after; None: there is nothing behind."""


@dataclass(frozen=True, slots=True)
class Shown:
    record: Record
    content: Content
    attempts: tuple[Attempt, ...]
    transitions: tuple[Transition, ...]
    timeline: tuple[Step, ...]
    readable: Readable
    body_form: BodyForm
    plan: str | None = None
    """The hash of the replay plan that has reserved it, or is sending it."""

    @property
    def stack_note(self) -> str:
        """What a reader of the stack has to know; empty if there is nothing."""
        if read_dramatiq(self.content.body) is None:
            return ""
        return "why its framework retried it for the last time; what it died of after that is written nowhere"

    def body_lines(self) -> Iterator[str]:
        return body_lines(self.content.body, self.body_form)

    def as_dict(self) -> dict[str, object]:
        """Everything there is, the body exactly."""
        content: dict[str, object] = {
            "properties": dict(self.readable.properties),
            "headers": dict(self.readable.headers),
            "properties_readable": self.readable.is_whole,
            "properties_base64": b64encode(self.content.properties).decode(),
            "body_form": self.body_form,
            "body_base64": b64encode(self.content.body).decode(),
            "attempts": json_ready(self.attempts),
            "transitions": json_ready(self.transitions),
            "timeline": json_ready(self.timeline),
            "plan": self.plan,
        }
        return {field.name: json_ready(getattr(self.record, field.name)) for field in fields(self.record)} | content


def shown(detail: Detail, plan: str | None = None) -> Shown:
    content = detail.content
    record, attempts, transitions = detail.record, detail.attempts, detail.transitions
    form = body_form(content.body)
    return Shown(record, content, attempts, transitions, timeline(detail), readable(content.properties), form, plan)


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the journal."""

    id: int
    message_id: int
    from_status: Status | None
    to_status: Status
    at: datetime
    actor: str
    reason: str


@dataclass(frozen=True, slots=True)
class Journal:
    entries: tuple[Entry, ...]
    """The newest first."""
    is_complete: bool
    """False: only the newest entries were looked through for this actor."""


@dataclass(frozen=True, slots=True)
class Change:
    id: int | None
    """None for a message that was named by its identity and has no number."""
    before: Status | None
    """None: there is no such message."""
    after: Status | None
    is_done: bool
    """On a dry run: whether it would be."""
    why: str = ""
    """What stood in the way, and what to do about it; of what is done, what there is to know of it."""
    asked: str | None = None
    """How the caller named it, where that need not be its number."""


@dataclass(frozen=True, slots=True)
class Changes:
    changes: tuple[Change, ...]
    dry_run: bool

    @property
    def done(self) -> int:
        return sum(change.is_done for change in self.changes)

    @property
    def not_done(self) -> int:
        return len(self.changes) - self.done

    def as_dict(self) -> dict[str, object]:
        changes = [
            {
                field.name: json_ready(getattr(one, field.name))
                for field in fields(one)
                if one.asked or field.name != "asked"
            }
            for one in self.changes
        ]
        return {"dry_run": self.dry_run, "done": self.done, "not_done": self.not_done, "messages": changes}


class MessageActions:
    """Each call is on its own; it holds no connection in between."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def page(self, filters: Filters, limit: int = 50, after: str | None = None) -> Listing:
        place = None if after is None else Place.parse(after)
        with reading(self._engine) as connection:
            page = messages.find(connection, filters, limit, place)
        return Listing(page.records, page.next and page.next.token)

    def groups(self, filters: Filters, limit: int = 50) -> Groups:
        with reading(self._engine) as connection:
            return messages.groups(connection, filters, limit)

    def near(self, filters: Filters) -> list[str]:
        """Why nothing matches: which names no message has, and the names most like them."""
        with reading(self._engine) as connection:
            return near(connection, filters)

    def show(self, row_id: int) -> Shown:
        with reading(self._engine) as connection:
            detail = messages.get(connection, row_id) if 0 < row_id <= LARGEST_ID else None
            plan = None if detail is None else hash_of(connection, detail.record.plan_id)
        if detail is None:
            raise NoSuchMessage(row_id)
        return shown(detail, plan)

    def journal(
        self, row_id: int | None = None, *, actor: str | None = None, since: datetime | None = None, limit: int = 50
    ) -> Journal:
        conditions = [] if row_id is None else [_T.message_id == min(max(row_id, 0), LARGEST_ID)]
        if since is not None:
            conditions.append(_T.at >= since)
        # A message's lines are few and in the order of their ids; all others are found by their time.
        newest = (_T.id.desc(),) if row_id is not None else (_T.at.desc(), _T.id.desc())
        query = select(*(_T[field.name] for field in fields(Entry))).where(*conditions).order_by(*newest)
        with reading(self._engine) as connection:
            edge = None
            if actor is not None:
                if row_id is None:
                    # No index knows the actors: what is behind the edge is not looked at.
                    behind = select(_T.at).where(*conditions).order_by(*newest).offset(JOURNAL_LOOKED_THROUGH).limit(1)
                    edge = connection.scalar(behind)
                if edge is not None:
                    query = query.where(_T.at >= edge)
                query = query.where(_T.actor == actor)
            found = connection.execute(query.limit(limit))
            return Journal(tuple(Entry(*row) for row in found), edge is None)

    def discard(
        self,
        row_ids: Sequence[int] = (),
        filters: Filters | None = None,
        *,
        actor: str,
        reason: str,
        now: datetime | None = None,
        everything: bool = False,
        dry_run: bool = False,
    ) -> Changes:
        """Archive these, or all that match; a filter without a status means what is not over yet.

        Each message changes in a transaction of its own, all its moves or none. Without a time it is the store's: how
        long a message is kept counts from there.
        """
        now = StoreClock(self._engine)() if now is None else now
        filters = None if filters == Filters() else filters
        if row_ids and (filters is not None or everything):
            raise NotUnderstood("name messages by their ids or by a filter, not both. Nothing was changed.")
        if not row_ids and filters is None and not everything:
            raise NotUnderstood(
                "nothing says which messages to discard: give ids or a filter, or --all --yes for everything that is "
                "not over yet. Nothing was changed."
            )
        check_person(actor, reason)
        with keeping(self._engine) as engine:
            chosen = iter(dict.fromkeys(row_ids)) if row_ids else _matching(engine, filters or Filters(), WAITING)
            found = tuple(_discard(engine, row_id, actor, reason, now, dry_run=dry_run) for row_id in chosen)
        return Changes(found, dry_run)

    def restore(
        self,
        row_ids: Sequence[int] = (),
        filters: Filters | None = None,
        *,
        actor: str,
        reason: str,
        now: datetime | None = None,
        dry_run: bool = False,
    ) -> Changes:
        """Archived messages to manual, where a person decides about them again; without a time at the store's.

        What an edit has replaced is restored only by its id: its edit may have been sent, and it would go out too.
        """
        now = StoreClock(self._engine)() if now is None else now
        filters = None if filters == Filters() else filters
        if bool(row_ids) == (filters is not None):
            raise NotUnderstood("name messages by their ids, or by a filter. Nothing was changed.")
        if filters is not None and set(filters.statuses) - {Status.ARCHIVED}:
            raise NotUnderstood("only what is archived can be restored; leave --status out. Nothing was changed.")
        check_person(actor, reason)
        with keeping(self._engine) as engine:
            chosen = iter(dict.fromkeys(row_ids)) if filters is None else _matching(engine, filters, [Status.ARCHIVED])
            is_named = filters is None
            found = tuple(
                _restore(engine, row_id, actor, reason, now, dry_run=dry_run, is_named=is_named) for row_id in chosen
            )
        return Changes(found, dry_run)


def _matching(engine: Engine, filters: Filters, statuses: Sequence[Status]) -> Iterator[int]:
    """The ids that match, page by page, the newest first: what arrives meanwhile is in front of the first page.

    Of these states where the filters name none.
    """
    if not filters.statuses:
        filters = replace(filters, statuses=tuple(statuses))
    place = None
    while True:
        with reading(engine) as connection:
            page = messages.find(connection, filters, _PAGE, place)
        yield from [record.id for record in page.records]
        place = page.next
        if place is None:
            return


def _discard(engine: Engine, row_id: int, actor: str, reason: str, now: datetime, *, dry_run: bool) -> Change:
    with (reading if dry_run else writing)(engine) as connection:
        row = _row(connection, row_id, lock=not dry_run)
        if row is None:
            return _missing(row_id)
        if row.lease_until is not None and not connection.scalar(select(IS_SENT).where(_M.id == row_id)):
            return Change(row_id, row.status, row.status, is_done=False, why=_held(row))
        if (name := holder(connection, row.plan_id)) is not None:
            why = f"replay plan {name} has reserved it; `dlqbatch replay abort {name}` lets it go"
            return Change(row_id, row.status, row.status, is_done=False, why=why)
        if row.status == Status.RESOLVED:
            return Change(row_id, row.status, row.status, is_done=False, why=_RESOLVED)
        moves = path_of_discard(row.status)
        if not moves:
            return Change(row_id, row.status, row.status, is_done=False, why="it is archived already")
        if not dry_run:
            if row.status == Status.PROCESSING:
                # It was sent, and may never be resolved: nobody waits for it any more.
                given_up = update(ATTEMPTS).where(ATTEMPTS.c.message_id == row_id, ATTEMPTS.c.closed_at.is_(None))
                connection.execute(given_up.values(closed_at=now, outcome="abandoned"))
            carry_out(connection, row_id, moves, now, actor, reason, row.lock_token)
            breakers.release_probes(connection, [row_id], now)
        return Change(row_id, row.status, Status.ARCHIVED, is_done=True)


def _restore(
    engine: Engine, row_id: int, actor: str, reason: str, now: datetime, *, dry_run: bool, is_named: bool
) -> Change:
    with (reading if dry_run else writing)(engine) as connection:
        row = _row(connection, row_id, lock=not dry_run)
        if row is None:
            return _missing(row_id)
        if row.status != Status.ARCHIVED:
            why = f"it is {row.status}; only what is archived can be restored"
            return Change(row_id, row.status, row.status, is_done=False, why=why)
        if not is_named and messages.was_edited(connection, row_id):
            why = f"{replaced(connection, row_id)}; to restore it all the same, name it by its id"
            return Change(row_id, row.status, row.status, is_done=False, why=why)
        if not dry_run:
            carry_out(connection, row_id, path(row.status, Status.MANUAL, by_person=True), now, actor, reason)
        return Change(row_id, row.status, Status.MANUAL, is_done=True, why=replaced(connection, row_id))


def replaced(connection: Connection, row_id: int) -> str:
    """What to know of a message that an edit has replaced; nothing of any other message."""
    linked = linked_by_edits(connection, row_id)
    if not linked:
        return ""
    first = linked[0]
    if first.status is None:
        return (
            f"message {first.row_id} took its place in an edit, and is deleted by now: it may well have been "
            "handled, and whoever replays this one does the work twice"
        )
    return f"message {first.row_id} ({first.status}) took its place in an edit; whoever replays both sends it twice"


def _row(connection: Connection, row_id: int, *, lock: bool) -> Any:
    if not 0 < row_id <= LARGEST_ID:
        return None
    held = (_M.lock_owner, _M.lock_token, _M.lease_until, _M.plan_id)
    query = select(_M.identity, _M.status, *held).where(_M.id == row_id)
    return connection.execute(query.with_for_update() if lock else query).one_or_none()


def carry_out(
    connection: Connection,
    row_id: int,
    moves: Sequence[Move],
    now: datetime,
    actor: str,
    reason: str,
    token: str | None = None,
) -> None:
    """The row is locked by this transaction, and no worker has it: nobody else can come in between."""
    for step in moves:
        columns: dict[str, Any] = {"next_retry_at": None}
        lock = token
        if step.end == Status.PROCESSING:
            token = secrets.token_hex(8)
            columns |= {"lock_owner": actor, "lock_token": token, "locked_at": now}
        else:
            token = None
        if not states.move(connection, row_id, step.start, step.end, lock, now, actor, reason, **columns):
            raise RuntimeError(f"message {row_id} changed although it was locked")


_RESOLVED: Final = (
    "it is resolved: it was handled, and nothing sends it again. Discarded, it could be restored, and the work be done "
    "twice; `dlqbatch retain` deletes it when its time is over"
)


def _missing(row_id: int) -> Change:
    return Change(row_id, None, None, is_done=False, why="there is no such message")


def _held(row: Any) -> str:
    return (
        f"{row.lock_owner or 'a worker'} works on it until {row.lease_until:%Y-%m-%d %H:%M:%S} UTC. "
        "Discard it when it is no longer processing; a run of the lifecycle takes over what was left behind"
    )


def check_person(actor: str, reason: str) -> None:
    """Both go into the journal."""
    if not actor.strip() or actor in states.JOBS:
        raise NotUnderstood(
            f"'{actor}' does not name a person, and the journal has to: give a name with --actor. Nothing was changed."
        )
    if not reason.strip():
        raise NotUnderstood("a reason is needed: it goes into the journal. Nothing was changed.")
