"""Erase what a message holds, for good: its body, properties, error texts and fields. What happened to it stays.

Its cold copies are erased first, by whom the caller names: retain/erase.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Engine, delete, select, update

from dlqbatch.lifecycle import breaker_rows as breakers
from dlqbatch.messages.changes import Change, Changes, Outcome, change_many
from dlqbatch.messages.discard import locked_rows
from dlqbatch.messages.queries import linked_by_edits
from dlqbatch.messages.selection import check_number, choose
from dlqbatch.store import journal
from dlqbatch.store.access import StoreClock
from dlqbatch.store.action_log import AT_ONCE, ActionRow, Request, StateChange, change_states, check_person
from dlqbatch.store.bulk import in_list
from dlqbatch.store.engine import reading
from dlqbatch.store.field_tables import FIELDS
from dlqbatch.store.filters import Filters, NotUnderstood
from dlqbatch.store.reservation import holder
from dlqbatch.store.states import Status
from dlqbatch.store.tables import COLD_COPIES, MESSAGES

KIND: Final = "erase"
NOTHING_LEFT: Final[Mapping[str, object]] = {
    "body": b"",
    "properties": b"\0\0",
    "tags": [],
    **dict.fromkeys(("message_id", "framework_id", "error_message", "error_stack", "reason", "source")),
}
"""What an erased message holds. The digests stay: by them the broker's copy of the same message is known."""
_M: Final = MESSAGES.c
_NOT_BY_THE_STATE: Final = {
    Status.PROCESSING: "a retry of it is under way, and may be out already; erase it when it is no longer processing",
    Status.RESOLVED: "it is resolved, and `dlqbatch retain` deletes it when its time is over",
}


class Sought(NamedTuple):
    """Messages whose cold copies are to be erased."""

    identities: Mapping[int, str]
    gone: Sequence[int]
    """Numbers of which the dead store has no message any more."""


class Copies(NamedTuple):
    """What became of the cold copies of a message."""

    done: tuple[str, ...]
    """The files that were written anew without it; on a dry run those that hold it."""
    left: tuple[str, ...]
    """What holds its content still, and what to do."""

    def says(self, *, dry_run: bool) -> list[str]:
        word = "in cold storage these are to be written anew" if dry_run else "in cold storage it was erased, in"
        return [f"{word} {', '.join(self.done)}"] if self.done else []


class CopiesFound(NamedTuple):
    by_id: Mapping[int, Copies]
    """The copies of each message that has some."""
    doubts: tuple[str, ...]
    """What could not be looked at, or stays of parts that were replaced."""


EraseCopies = Callable[[Sought], CopiesFound]


def erase(
    engine: Engine,
    row_ids: Sequence[int] = (),
    filters: Filters | None = None,
    *,
    actor: str,
    reason: str,
    now: datetime | None = None,
    expect: int | None = None,
    dry_run: bool = False,
    verified: bool = False,
    copies: EraseCopies | None = None,
) -> Changes:
    """Overwrite the content of these messages, which are archived then and can never be replayed.

    Nothing brings the content back. A filter without a status means every state; what cannot be erased is refused with
    its reason. More than a hundred that it matches are erased only where `expect` is their number. `copies` erases the
    cold copies, before the messages; without it they are named.
    """
    check_person(actor, reason)
    filters = None if filters == Filters() else filters
    if bool(row_ids) == (filters is not None):
        raise NotUnderstood("name messages by their ids, or by a filter. Nothing was changed.")
    now = StoreClock(engine)() if now is None else now
    chosen = None if filters is None else choose(engine, filters, tuple(Status))
    if chosen is not None and (not dry_run or expect is not None):
        check_number(chosen.split, expect)
    shown = {"ids": len(row_ids)} if filters is None else {"filter": sorted(filters.shown())}
    request = Request(KIND, actor, reason, verified, shown)
    ids = dict.fromkeys(row_ids) if chosen is None else chosen.row_ids
    found = None if copies is None else copies(_sought(engine, ids))
    some = partial(_erase_some, actor=actor, reason=reason, now=now, dry_run=dry_run, found=found)
    done = change_many(engine, ids, request, now, some, dry_run=dry_run)
    left = [] if found is None else list(found.doubts)
    left += [f"message {each.id}: {each.left}" for each in done.changes if each.left]
    return replace(done, left=tuple(left))


def _sought(engine: Engine, row_ids: Iterable[int]) -> Sought:
    """Those of the messages that are erased now, that were erased before, and that are gone."""
    identities: dict[int, str] = {}
    gone: list[int] = []
    left = iter(row_ids)
    while some := list(islice(left, AT_ONCE)):
        with reading(engine) as connection:
            rows = locked_rows(connection, some, lock=False)
            meant = [
                row_id
                for row_id, row in rows.items()
                if row.erased_at is not None or not _reason_not_to_erase(connection, row)
            ]
            gone += [row_id for row_id in some if row_id not in rows]
            query = select(_M.id, _M.identity).where(in_list(connection, _M.id, meant))
            identities |= {row.id: row.identity for row in connection.execute(query)}
    return Sought(identities, gone)


def _erase_some(
    connection: Connection,
    row_ids: Sequence[int],
    *,
    actor: str,
    reason: str,
    now: datetime,
    dry_run: bool,
    found: CopiesFound | None,
) -> list[Outcome]:
    rows = locked_rows(connection, row_ids, lock=not dry_run)
    why_not = {row_id: _reason_not_to_erase(connection, row) for row_id, row in rows.items()}
    ids = [row_id for row_id in rows if not why_not[row_id]]
    of_copy = select(COLD_COPIES.c.message_id, COLD_COPIES.c.part).where(
        in_list(connection, COLD_COPIES.c.message_id, ids)
    )
    # Where the copies were erased, nothing is left to name.
    parts = {} if found is not None else {row_id: str(part) for row_id, part in connection.execute(of_copy)}
    left = {row_id: _what_is_left(connection, row_id, parts.get(row_id)) for row_id in ids}
    if not dry_run and ids:
        _overwrite(connection, [rows[row_id] for row_id in ids], parts, actor, f"erased: {reason}", now)
    copies = {} if found is None else found.by_id
    return [
        _outcome(
            row_id, rows.get(row_id), why_not.get(row_id, ""), left.get(row_id, []), copies.get(row_id), dry_run=dry_run
        )
        for row_id in row_ids
    ]


def _reason_not_to_erase(connection: Connection, row: Any) -> str:
    if row.erased_at is not None:
        return "it is erased already"
    if (name := holder(connection, row.plan_id)) is not None:
        return f"replay plan {name} has reserved it; `dlqbatch replay abort {name}` lets it go"
    return _NOT_BY_THE_STATE.get(row.status, "")


def _what_is_left(connection: Connection, row_id: int, part: str | None) -> list[str]:
    """Where the content is still to be found, outside of this row and of the cold copies that were erased."""
    where = "set cold_storage to where that is, leave out --no-cold, and erase it again"
    left = [f"its cold copy in {part} holds it still: {where}"] if part is not None else []
    linked = linked_by_edits(connection, row_id)
    ids = [each.row_id for each in linked if each.status is not None]
    there = select(_M.id).where(in_list(connection, _M.id, ids), _M.erased_at.is_(None)).order_by(_M.id)
    held = [str(each) for each in connection.scalars(there)] if ids else []
    if held:
        left.append(f"an edit links it with message {', '.join(held)}, with much the same content: erase it too")
    return left


def _overwrite(
    connection: Connection, rows: Sequence[Any], parts: dict[int, str], actor: str, why: str, now: datetime
) -> None:
    ids = [row.id for row in rows]

    def line(row: Any) -> str:
        return f"{why} (a cold copy is in {parts[row.id]})" if row.id in parts else why

    moving = [
        StateChange(row.id, row.status, Status.ARCHIVED, row.lock_token, line(row))
        for row in rows
        if row.status != Status.ARCHIVED
    ]
    change_states(connection, moving, now, actor)
    archived = {row.id: line(row) for row in rows if row.status == Status.ARCHIVED}
    journal.note_many(connection, archived, now, actor)
    breakers.release_probes(connection, ids, now)
    empty = {**NOTHING_LEFT, "erased_at": now, "updated_at": now}
    connection.execute(update(MESSAGES).where(in_list(connection, _M.id, ids)).values(empty))
    connection.execute(delete(FIELDS).where(in_list(connection, FIELDS.c.message_id, ids)))
    # The copy is none of this row any more: retain makes one of what is left before it deletes the row.
    connection.execute(delete(COLD_COPIES).where(in_list(connection, COLD_COPIES.c.message_id, ids)))


def _outcome(
    row_id: int, row: Any, why_not: str, left: Sequence[str], copies: Copies | None, *, dry_run: bool
) -> Outcome:
    said = [] if copies is None else copies.says(dry_run=dry_run)
    kept = "; ".join([*left, *(() if copies is None else copies.left)])
    why = "; ".join(filter(None, (*said, kept)))
    status = Status.ARCHIVED if row is None else row.status
    if copies is None and row is None:
        return Outcome(Change(row_id, None, None, is_done=False, why="there is no such message"), ())
    if row is None or (row.erased_at is not None and copies is not None):
        # Nothing of it is in the dead store: it was erased before, or is in cold storage only.
        change = Change(row_id, status, status, is_done=bool(said), why=why, left=kept)
        return Outcome(change, (ActionRow(row_id, "done" if said else "refused", status, status, why),))
    if why_not:
        refused = ActionRow(row_id, "refused", row.status, row.status, why_not)
        return Outcome(Change(row_id, row.status, row.status, is_done=False, why=why_not), (refused,))
    done = ActionRow(row_id, "done", row.status, Status.ARCHIVED, why or None)
    return Outcome(Change(row_id, row.status, Status.ARCHIVED, is_done=True, why=why, left=kept), (done,))
