"""Undo an action: each of its messages goes back to the state that it had, unless something else has changed it since.

The newest line of a message's journal tells whether it has changed: whatever changes a state writes a line there. What
an undo leaves behind counts as unchanged for the action before, as if the undone one had never been. So actions can be
undone in any order, and an undo too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, Engine, Row, select, update

from dlqbatch.actions.queries import find
from dlqbatch.drain import event_config
from dlqbatch.errors import ActionCut, DatabaseUnreadable, DlqbatchError
from dlqbatch.groups import decisions
from dlqbatch.groups.decisions import revive_all
from dlqbatch.lifecycle import rule_rows
from dlqbatch.messages.changes import Change, Changes
from dlqbatch.messages.discard import former_columns, locked_rows
from dlqbatch.messages.queries import linked_by_edits, with_edits
from dlqbatch.store import action_log
from dlqbatch.store.access import StoreClock
from dlqbatch.store.action_log import (
    AT_ONCE,
    ActionRow,
    Request,
    StateChange,
    change_states,
    check_person,
    last_transitions,
)
from dlqbatch.store.action_tables import ACTION_ROWS, ACTIONS
from dlqbatch.store.bulk import in_list, values_table
from dlqbatch.store.engine import keeping, reading, writing
from dlqbatch.store.filters import action_id_of, action_name
from dlqbatch.store.reservation import holder
from dlqbatch.store.states import Status

_A: Final = ACTIONS.c
_R: Final = ACTION_ROWS.c
AnyRow = Row[*tuple[Any, ...]]


class NotUndoable(DlqbatchError):
    """The action cannot be undone as a whole; nothing was changed."""

    exit_code = 1

    def __init__(self, name: str, why: str) -> None:
        self.name, self.why = name, why
        super().__init__(f"{name} cannot be undone: {why}. Nothing was changed.")


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    """A message of the action, and for an edit the one that took its place: they change together or not at all."""

    rows: tuple[AnyRow, ...]
    """Rows of the action."""


def undo(
    engine: Engine,
    name: str,
    *,
    actor: str,
    reason: str,
    now: datetime | None = None,
    dry_run: bool = False,
    verified: bool = False,
) -> Changes:
    """Undo an action, message by message; what was changed since is skipped, with the reason."""
    check_person(actor, reason)
    action_id = action_id_of(name)
    now = StoreClock(engine)() if now is None else now
    with reading(engine) as connection:
        action = find(connection, action_id)
        chain = _chain(connection, action)
    if action.kind == "erase":
        raise NotUndoable(action_name(action_id), "what is erased is gone")
    if action.kind == "peek":
        raise NotUndoable(action_name(action_id), "what was shown unmasked has been seen")
    if "plan" in action.details:
        plan = action.details["plan"]
        raise NotUndoable(
            action_name(action_id),
            "what a replay has sent is with its consumers. "
            f"`dlqbatch replay abort {plan}` keeps the rest of it from being sent",
        )
    if "after" in action.details:
        return _undo_decision(engine, action, actor, reason, now, dry_run=dry_run, verified=verified)
    request = Request("undo", actor, reason, verified, undoes=action_id)
    return _Undo(engine, action, chain, request, now, dry_run=dry_run).run()


def _undo_decision(
    engine: Engine, action: AnyRow, actor: str, reason: str, now: datetime, *, dry_run: bool, verified: bool
) -> Changes:
    """Undo an action that changed no messages but a decision: what was there before is written again."""
    details = dict(action.details)
    with (reading if dry_run else writing)(engine) as connection:
        if dry_run:
            return Changes((), dry_run)
        find(connection, action.id, lock=True)
        put_back = _PUT_BACK[next(kind for kind in _PUT_BACK if kind in details)]
        why_not = put_back(connection, details, now)
        if why_not:
            raise NotUndoable(action_name(action.id), why_not)
        details = decisions.reverse(details)
        request = Request("undo", actor, reason, verified, details=details, undoes=action.id)
        undo_id = action_log.begin(connection, request, now, ended=True)
        connection.execute(update(ACTIONS).where(_A.id == action.id).values(undone_by=undo_id))
        is_lifted = "group" in details and details["after"].get("held_at", "") is None
        lifted = decisions.groups_of(connection, details) if is_lifted else []
    if lifted:
        revive_all(engine, lifted, details["queue"], now)
    return Changes((), dry_run, action_name(undo_id))


_PUT_BACK: Final[dict[str, Callable[[Connection, Mapping[str, Any], datetime], str]]] = {
    "group": decisions.put_back,
    rule_rows.KIND: lambda connection, details, _: rule_rows.put_back(connection, details),
    event_config.KIND: lambda connection, details, _: event_config.put_back(connection, details),
}
"""What writes again what was there before a decision, by whose details say what it was about."""


class _Undo:
    def __init__(
        self, engine: Engine, action: AnyRow, chain: Sequence[int], request: Request, now: datetime, *, dry_run: bool
    ) -> None:
        self._engine = engine
        self._action = action
        self._chain = chain
        """The action, what it undoes, what that undoes, and so on."""
        self._request = request
        self._now = now
        self._dry_run = dry_run
        self._id: int | None = None
        self._committed: int | None = None
        """The undo's number, once a part of it is committed."""
        self._waiting: list[ActionRow] = []

    def run(self) -> Changes:
        try:
            return self._run()
        except DatabaseUnreadable as error:
            if self._committed is None:
                raise
            raise ActionCut(error, action_name(self._committed)) from error

    def _run(self) -> Changes:
        found: list[Change] = []
        last = 0
        with keeping(self._engine) as engine:
            while True:
                with (reading if self._dry_run else writing)(engine) as connection:
                    # Two who undo one action at once do it one after the other.
                    for action_id in sorted(self._chain):
                        find(connection, action_id, lock=not self._dry_run)
                    units = self._units(connection, last)
                    if not units:
                        break
                    found += self._undo_some(connection, units)
                self._committed = self._id
                last = units[-1].rows[0].message_id
            if self._id is not None:
                with writing(engine) as connection:
                    action_log.end(connection, self._id, self._now)
        return Changes(tuple(found), self._dry_run, None if self._id is None else action_name(self._id))

    def _units(self, connection: Connection, after: int) -> list[_Unit]:
        """The next messages of the action that are done, by their ids."""
        done = (_R.action_id == self._action.id, _R.state == "done")
        mine = select(ACTION_ROWS).where(*done, _R.edit_of.is_(None), _R.message_id > after)
        rows = connection.execute(mine.order_by(_R.message_id).limit(AT_ONCE)).all()
        ids = [row.message_id for row in rows]
        edits = {
            row.edit_of: row
            for row in connection.execute(select(ACTION_ROWS).where(*done, in_list(connection, _R.edit_of, ids)))
        }
        return [_Unit((row, edits[row.message_id]) if row.message_id in edits else (row,)) for row in rows]

    def _undo_some(self, connection: Connection, units: Sequence[_Unit]) -> list[Change]:
        ids = [row.message_id for unit in units for row in unit.rows]
        current = locked_rows(connection, ids, lock=not self._dry_run)
        newest = last_transitions(connection, current)
        edited = with_edits(connection, current)
        why_not = {unit: self._reason_to_skip(connection, unit, current, newest, edited) for unit in units}
        undone = [unit for unit in units if not why_not[unit]]
        lines = self._change(connection, undone, current, newest) if undone and not self._dry_run else []
        if not self._dry_run:
            self._waiting += [*lines, *_skipped(units, why_not, current)]
            if lines or self._id is not None:
                self._write(connection, undone)
        changes = []
        for unit in units:
            for row in unit.rows:
                now = current[row.message_id].status if row.message_id in current else None
                why = why_not[unit]
                after = now if why else target(row)
                remark = "" if why else _remark(row)
                changes.append(Change(row.message_id, now, after, is_done=not why, why=why or remark))
        return changes

    def _reason_to_skip(
        self,
        connection: Connection,
        unit: _Unit,
        current: Mapping[int, Any],
        newest: Mapping[int, int],
        edited: Collection[int],
    ) -> str:
        """Why these messages stay as they are; empty if all of them go back."""
        own = {row.message_id for row in unit.rows}
        for row in unit.rows:
            found = current.get(row.message_id)
            name = "it" if row.edit_of is None else f"message {row.message_id}, which took its place,"
            if found is None:
                return f"{name} is no longer in the dead store; cold storage may have it (`dlqbatch archive show`)"
            if found.status != row.to_status or newest.get(row.message_id) != row.last_after:
                return f"{name} has changed since: it is {found.status}"
            if (plan := holder(connection, found.plan_id)) is not None:
                return f"{name} is reserved by replay plan {plan}; `dlqbatch replay abort {plan}` lets it go"
            if target(row) is not Status.ARCHIVED and row.message_id in edited:
                for other in linked_by_edits(connection, row.message_id):
                    if other.is_in_the_way and other.row_id not in own:
                        state = other.status or "deleted"
                        return f"message {other.row_id} ({state}) is the same work by an edit; both would be sent"
        return ""

    def _change(
        self, connection: Connection, units: Sequence[_Unit], current: Mapping[int, Any], newest: Mapping[int, int]
    ) -> list[ActionRow]:
        """Move the messages back, and return their lines for the undo."""
        rows = [row for unit in units for row in unit.rows]
        reason = f"undo of {action_name(self._action.id)}: {self._request.reason}"
        changes = [
            StateChange(row.message_id, row.to_status, target(row), None, reason, _columns(row, self._now))
            for row in rows
        ]
        change_states(connection, changes, self._now, self._request.actor)
        after = last_transitions(connection, [row.message_id for row in rows])
        _rename_lines(connection, [(row.message_id, row.last_before, after[row.message_id]) for row in rows])
        return [
            ActionRow(
                row.message_id,
                "done",
                row.to_status,
                target(row),
                _remark(row) or None,
                former_columns(current[row.message_id]),
                newest[row.message_id],
                after[row.message_id],
                row.edit_of,
            )
            for row in rows
        ]

    def _write(self, connection: Connection, undone: Sequence[_Unit]) -> None:
        """Add the lines of this transaction to the undo, and mark the messages of the undone action."""
        if self._id is None:
            self._id = action_log.begin(connection, self._request, self._now)
        action_log.add_rows(connection, self._id, self._waiting)
        self._waiting = []
        ids = [row.message_id for unit in undone for row in unit.rows]
        # To undo an undo is to do the first action again.
        for number, action_id in enumerate(self._chain):
            _mark(connection, action_id, ids, *(("undone", "done") if number % 2 else ("done", "undone")))
        connection.execute(update(ACTIONS).where(_A.id == self._action.id).values(undone_by=self._id))


def _chain(connection: Connection, action: AnyRow) -> list[int]:
    chain = [action.id]
    while (undoes := connection.scalar(select(_A.undoes).where(_A.id == chain[-1]))) is not None:
        chain.append(undoes)
    return chain


def target(row: AnyRow) -> Status:
    """The state that a message goes to when this row of an action is undone."""
    before: Status | None = row.from_status
    if before is None:
        return Status.ARCHIVED  # an edit made it
    # What became of its retry was not watched meanwhile, so a person looks at it.
    return Status.MANUAL if before is Status.PROCESSING else before


def _remark(row: AnyRow) -> str:
    if row.from_status is Status.PROCESSING:
        return "its retry had been sent; look whether it was handled before you replay it"
    return ""


def _columns(row: AnyRow, now: datetime) -> dict[str, Any]:
    if target(row) is not Status.PENDING:
        return {}
    before = dict(row.before)
    if before.get("next_retry_at") is not None:
        before["next_retry_at"] = datetime.fromisoformat(before["next_retry_at"])
    elif not before.get("is_due"):
        # A hold had parked it, and may be lifted by now: a claim parks it again if not.
        before["next_retry_at"] = now
    return before


def _skipped(units: Iterable[_Unit], why_not: Mapping[_Unit, str], current: Mapping[int, Any]) -> Iterable[ActionRow]:
    for unit in units:
        for row in unit.rows:
            if why_not[unit]:
                found = current.get(row.message_id)
                status = None if found is None else found.status
                yield ActionRow(row.message_id, "skipped", status, status, why_not[unit], edit_of=row.edit_of)


def _mark(connection: Connection, action_id: int, ids: Sequence[int], before: str, after: str) -> None:
    if not ids:
        return
    these = (_R.action_id == action_id, in_list(connection, _R.message_id, ids), _R.state == before)
    marked = connection.execute(update(ACTION_ROWS).where(*these).values(state=after)).rowcount
    action_log.count(connection, action_id, {before: -marked, after: marked})


def _rename_lines(connection: Connection, lines: Sequence[tuple[int, int | None, int]]) -> None:
    """Let the new line of a message's journal stand, in all actions, for the line whose state it brings back."""
    known = [line for line in lines if line[1] is not None]
    if not known:
        return
    ids, old, new = (list(column) for column in zip(*known, strict=True))
    listed = values_table(connection, {_R.message_id: ids, _R.last_before: old, _R.last_after: new})
    for column in (_R.last_before, _R.last_after):
        renaming = update(ACTION_ROWS).where(_R.message_id == listed.c.message_id, column == listed.c.last_before)
        connection.execute(renaming.values({column: listed.c.last_after}))
