"""Discard and restore: which messages may be archived or taken out of the archive, and the change of some of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, select, update

from dlqbatch.lifecycle import breaker_rows as breakers
from dlqbatch.lifecycle.attempts import IS_SENT
from dlqbatch.messages.changes import Change, Outcome
from dlqbatch.messages.queries import linked_by_edits, was_edited, with_edits
from dlqbatch.store.action_log import ActionRow, StateChange, change_states, last_transitions
from dlqbatch.store.bulk import in_list
from dlqbatch.store.filters import LARGEST_ID
from dlqbatch.store.reservation import holder
from dlqbatch.store.scopes import scope_of
from dlqbatch.store.states import Status
from dlqbatch.store.tables import ATTEMPTS, MESSAGES

_M: Final = MESSAGES.c
_ROW: Final = (
    *(_M.id, _M.status, _M.lock_owner, _M.lock_token, _M.lease_until, _M.plan_id, _M.next_retry_at, _M.is_due),
    _M.erased_at,
    IS_SENT.label("is_sent"),
)
ERASED: Final = "it is erased: nothing is left of it that could be sent"
RESOLVED: Final = (
    "it is resolved: it was handled, and nothing sends it again. Discarded, it could be restored, and the work be done "
    "twice; `dlqbatch retain` deletes it when its time is over"
)


def discard_some(
    connection: Connection, row_ids: Sequence[int], *, actor: str, reason: str, now: datetime, dry_run: bool
) -> list[Outcome]:
    rows = locked_rows(connection, row_ids, lock=not dry_run)
    why_not = {row_id: reason_not_to_discard(connection, row) for row_id, row in rows.items()}
    moving = [row for row_id, row in rows.items() if not why_not[row_id]]
    if not dry_run:
        under_way = [row.id for row in moving if row.status == Status.PROCESSING]
        if under_way:
            # They were sent, and may never be resolved: nobody waits for them any more.
            given_up = update(ATTEMPTS).where(
                in_list(connection, ATTEMPTS.c.message_id, under_way), ATTEMPTS.c.closed_at.is_(None)
            )
            connection.execute(given_up.values(closed_at=now, outcome="abandoned"))
    moved = _move(connection, moving, Status.ARCHIVED, now, actor, reason, dry_run=dry_run)
    if not dry_run:
        breakers.release_probes(connection, [row.id for row in moving], now)
    return [_outcome(row_id, rows.get(row_id), Status.ARCHIVED, why_not.get(row_id, ""), moved) for row_id in row_ids]


def restore_some(
    connection: Connection,
    row_ids: Sequence[int],
    *,
    actor: str,
    reason: str,
    now: datetime,
    dry_run: bool,
    are_named: bool,
) -> list[Outcome]:
    """`are_named`: by their ids, so that an original that an edit replaced is meant too."""
    rows = locked_rows(connection, row_ids, lock=not dry_run)
    edited = set() if are_named else with_edits(connection, rows)
    why_not: dict[int, str] = {}
    for row_id, row in sorted(rows.items(), reverse=True):
        why_not[row_id] = ""
        if row.status != Status.ARCHIVED:
            why_not[row_id] = f"it is {row.status}; only what is archived can be restored"
        elif row.erased_at is not None:
            why_not[row_id] = ERASED
        elif row_id in edited and was_edited(connection, row_id):
            why_not[row_id] = f"{replaced(connection, row_id)}; to restore it all the same, name it by its id"
        elif row_id in edited:
            why_not[row_id] = _same_work(connection, row_id, {other for other, why in why_not.items() if not why})
    moving = [row for row_id, row in rows.items() if not why_not[row_id]]
    moved = _move(connection, moving, Status.MANUAL, now, actor, reason, dry_run=dry_run)
    found = []
    for row_id in row_ids:
        remark = replaced(connection, row_id) if row_id in rows and not why_not[row_id] else ""
        found.append(_outcome(row_id, rows.get(row_id), Status.MANUAL, why_not.get(row_id, ""), moved, remark))
    return found


def _same_work(connection: Connection, row_id: int, restored: Collection[int]) -> str:
    """Why an edit stays archived: it was undone, and the message that it had replaced is there again, or another edit.

    `restored` are messages that are restored with it.
    """
    for other in linked_by_edits(connection, row_id):
        if other.is_in_the_way or other.row_id in restored:
            state = Status.MANUAL if other.row_id in restored else other.status or "deleted"
            return f"message {other.row_id} ({state}) is the same work by an edit; to restore both, name it by its id"
    return ""


def locked_rows(connection: Connection, row_ids: Collection[int], *, lock: bool) -> dict[int, Any]:
    """The messages by their ids, locked in the order of these; all that a decision about them needs."""
    ids = [row_id for row_id in row_ids if 0 < row_id <= LARGEST_ID]
    ours = (_M.scope_id == scope_of(connection), in_list(connection, _M.id, ids))
    query = select(*_ROW).where(*ours).order_by(_M.id)
    return {row.id: row for row in connection.execute(query.with_for_update(of=MESSAGES) if lock else query)}


def reason_not_to_discard(connection: Connection, row: Any) -> str:
    """Why the message stays as it is; empty if it can be discarded."""
    if row.lease_until is not None and not row.is_sent:
        return (
            f"{row.lock_owner or 'a worker'} works on it until {row.lease_until:%Y-%m-%d %H:%M:%S} UTC. "
            "Discard it when it is no longer processing; a run of the lifecycle takes over what was left behind"
        )
    if (name := holder(connection, row.plan_id)) is not None:
        return f"replay plan {name} has reserved it; `dlqbatch replay abort {name}` lets it go"
    if row.status == Status.RESOLVED:
        return RESOLVED
    return "it is archived already" if row.status == Status.ARCHIVED else ""


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


def former_columns(row: Any) -> dict[str, object]:
    """What a message loses when it leaves its state, and gets back when that is undone."""
    if row.status != Status.PENDING:
        return {}
    at = row.next_retry_at
    return {"next_retry_at": None if at is None else at.isoformat(), "is_due": row.is_due}


def _move(
    connection: Connection, rows: Sequence[Any], to: Status, now: datetime, actor: str, reason: str, *, dry_run: bool
) -> dict[int, ActionRow]:
    """Move the rows, and return the line of each for the action."""
    ids = [row.id for row in rows]
    if dry_run:
        return {row.id: ActionRow(row.id, "done", row.status, to) for row in rows}
    before = last_transitions(connection, ids)
    changes = [StateChange(row.id, row.status, to, row.lock_token, reason) for row in rows]
    change_states(connection, changes, now, actor)
    after = last_transitions(connection, ids)
    return {
        row.id: ActionRow(
            row.id,
            "done",
            row.status,
            to,
            before=former_columns(row),
            last_before=before.get(row.id),
            last_after=after[row.id],
        )
        for row in rows
    }


def _outcome(row_id: int, row: Any, to: Status, why_not: str, moved: dict[int, ActionRow], remark: str = "") -> Outcome:
    if row is None:
        return Outcome(Change(row_id, None, None, is_done=False, why="there is no such message"), ())
    if why_not:
        refused = ActionRow(row_id, "refused", row.status, row.status, why_not)
        return Outcome(Change(row_id, row.status, row.status, is_done=False, why=why_not), (refused,))
    return Outcome(Change(row_id, row.status, to, is_done=True, why=remark), (moved[row_id],))
