"""A message from cold storage: shown as it was, and restored into the dead store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, Engine, delete, insert, select

from dlqbatch.amqp.fields import Fields
from dlqbatch.errors import DlqbatchError
from dlqbatch.messages.changes import Change
from dlqbatch.messages.discard import ERASED, replaced, restore_some
from dlqbatch.messages.queries import Attempt, Content, Detail, Record, Transition
from dlqbatch.messages.shown import Reveal, Shown, reveal, shown
from dlqbatch.retain.format import ArchiveDamaged, Line
from dlqbatch.store import action_log
from dlqbatch.store import journal as states
from dlqbatch.store.access import StoreClock
from dlqbatch.store.action_log import ActionRow, Request, check_person, last_transitions
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.filters import LARGEST_ID, action_name
from dlqbatch.store.scopes import scope_of
from dlqbatch.store.states import Status
from dlqbatch.store.tables import ATTEMPTS, MESSAGES, SCOPES, TRANSITIONS
from dlqbatch.store.text import key

_M: Final = MESSAGES.c
# Columns that are not restored: the state, its lease, its replay plan and its next retry.
_BEGINS_ANEW: Final = frozenset(
    {
        *("id", "status", "status_since", "updated_at", "is_due", "plan_id", "next_retry_at"),
        *("lock_owner", "lock_token", "locked_at", "lease_until", "scope"),
    }
)


def shown_copy(line: Line, part: str, *, is_revealed: bool = False) -> Shown:
    """What `messages show` would have shown of the message when it was copied."""
    known = {**line.message, "body_size": len(line.message["body"])}
    try:
        known["status"] = Status(known["status"])
        detail = Detail(
            Record(**{field.name: known[field.name] for field in fields(Record)}),
            Content(line.message["body"], line.message["properties"]),
            tuple(Attempt(**each) for each in line.attempts),
            tuple(Transition(**each) for each in line.transitions),
        )
    except ValueError as error:
        raise ArchiveDamaged(part, "a message is in a state that there is not") from error
    return shown(detail, is_revealed=is_revealed)


class NoJournal(DlqbatchError):
    """A copy whose message is no longer in the dead store: nothing could tell who saw it unmasked."""

    def __init__(self, number: int) -> None:
        super().__init__(
            f"message {number} is in cold storage only, so no journal can hold who sees it unmasked. Restore it "
            f"(`dlqbatch archive restore {number} --reason …`), then use `dlqbatch messages show --reveal`"
        )


class Restoring:
    """Each call is a transaction of its own; what one object restores is one action."""

    def __init__(self, engine: Engine, fields: Fields) -> None:
        self._engine, self._fields = engine, fields
        self._action: int | None = None

    def bring_back(
        self,
        sought: int | str,
        find: Callable[[], tuple[Line, str] | None],
        *,
        actor: str,
        reason: str,
        dry_run: bool,
        now: datetime | None = None,
    ) -> Change:
        """Restore a message by the number that it had, or by its identity.

        `find` looks for a copy, and is called only if the row is gone. `now` is the store's own time by default.
        """
        check_person(actor, reason)
        now = StoreClock(self._engine)() if now is None else now
        is_number = isinstance(sought, int)
        condition = _M.id == min(int(sought), LARGEST_ID) if is_number else _M.identity == sought
        with reading(self._engine) as connection:
            here = connection.execute(select(_M.id, _M.status).where(condition)).one_or_none()
        if here is not None:
            return self._from_archived(here.id, actor, reason, now, dry_run=dry_run)
        found = find()
        if found is None:
            number = int(sought) if is_number else 0
            what = "it is" if is_number else f"'{sought}' is"
            why = f"{what} neither in the dead store nor in cold storage; `dlqbatch archive list` shows what there is"
            return Change(number, None, None, is_done=False, why=why)
        return self._from_copy(*found, actor, reason, now, dry_run=dry_run)

    def journal_reveal(self, line: Line, by: Reveal) -> None:
        """Write into the journal of the message who sees its copy unmasked; refuse where it has no journal any more."""
        check_person(by.actor, by.reason)
        now = StoreClock(self._engine)()
        with writing(self._engine) as connection:
            row_id = connection.scalar(select(_M.id).where(_M.identity == key(str(line.message["identity"]))))
            if row_id is None:
                raise NoJournal(int(line.message["id"]))
            reveal(connection, [row_id], by, now)

    def end(self) -> str | None:
        """The name of the action, which is over now; None if nothing was restored."""
        if self._action is None:
            return None
        with writing(self._engine) as connection:
            action_log.end(connection, self._action, StoreClock(self._engine)())
        return action_name(self._action)

    def _note(self, connection: Connection, rows: Iterable[ActionRow], actor: str, reason: str, now: datetime) -> None:
        """Add the messages to the action, which begins with the first."""
        if self._action is None:
            self._action = action_log.begin(connection, Request("restore", actor, reason), now)
        action_log.add_rows(connection, self._action, rows)

    def _from_archived(self, row_id: int, actor: str, reason: str, now: datetime, *, dry_run: bool) -> Change:
        with (reading if dry_run else writing)(self._engine) as connection:
            (outcome,) = restore_some(
                connection, [row_id], actor=actor, reason=reason, now=now, dry_run=dry_run, are_named=True
            )
            if outcome.change.is_done and not dry_run:
                self._note(connection, outcome.rows, actor, reason, now)
            if outcome.change.before is None:
                return replace(outcome.change, why="it is another scope's, or deleted")
            return outcome.change

    def _from_copy(self, line: Line, part: str, actor: str, reason: str, now: datetime, *, dry_run: bool) -> Change:
        number, identity = int(line.message["id"]), key(str(line.message["identity"]))
        if line.message["erased_at"] is not None:
            return Change(number, Status.ARCHIVED, Status.ARCHIVED, is_done=False, why=ERASED)
        with (reading if dry_run else writing)(self._engine) as connection:
            again = connection.execute(select(_M.id, _M.status).where(_M.identity == identity)).one_or_none()
            if (elsewhere := _other_scope(connection, line)) is not None:
                why = f"it belongs to the scope {elsewhere}: --scope '{elsewhere}' restores it there"
                return Change(number, None, None, is_done=False, why=why)
            if again is None and dry_run:
                return Change(number, Status.ARCHIVED, Status.MANUAL, is_done=True)
            row_id = None if again is not None else _insert(connection, line, part, actor, reason, now, self._fields)
            if row_id is None:
                who = f"message {again.id} ({again.status})" if again is not None else "another message"
                why = f"its identity is in the dead store again, as {who}: look at that one"
                return Change(number, None, None, is_done=False, why=why)
            after = last_transitions(connection, [row_id])[row_id]
            row = ActionRow(row_id, "done", Status.ARCHIVED, Status.MANUAL, last_after=after)
            self._note(connection, [row], actor, reason, now)
            why = "; ".join(filter(None, (f"was message {number}", replaced(connection, row_id))))
            return Change(row_id, Status.ARCHIVED, Status.MANUAL, is_done=True, why=why)


def _other_scope(connection: Connection, line: Line) -> str | None:
    """The scope of a copy, if the database knows it as another deployment's; in another database it is this one's."""
    name = line.message["scope"]
    known = select(SCOPES.c.id).where(SCOPES.c.name == name, SCOPES.c.id != scope_of(connection))
    return name if name is not None and connection.scalar(known) is not None else None


def _insert(
    connection: Connection, line: Line, part: str, actor: str, reason: str, now: datetime, fields: Fields
) -> int | None:
    row = {name: value for name, value in line.message.items() if name not in _BEGINS_ANEW}
    row["fields"] = fields.read(line.message["body"], line.message["properties"])
    why = f"message {line.message['id']} restored from cold storage {part}: {reason}"
    try:
        arrived = states.arrive(connection, [row | {"status": Status.MANUAL}], now, actor, why)
        if not arrived:
            return None
        (row_id,) = arrived.values()
        if line.attempts:
            # An attempt that was open has no end any more.
            given_up = {"closed_at": now, "outcome": "abandoned"}
            over = ({**each, **({} if each["closed_at"] else given_up)} for each in line.attempts)
            own_rows = {"message_id": row_id, "scope_id": scope_of(connection)}
            connection.execute(insert(ATTEMPTS), [own_rows | each for each in over])
        _write_journal(connection, row_id, line)
    except ValueError as error:
        raise ArchiveDamaged(part, f"message {line.message['id']} has a value that no row can have") from error
    return row_id


def _write_journal(connection: Connection, row_id: int, line: Line) -> None:
    """Write the old journal, then the arrival: a journal is read in the order of its ids."""
    names = [column.name for column in TRANSITIONS.c if column.name != "id"]
    own = TRANSITIONS.c.message_id == row_id
    (arrival,) = connection.execute(select(*(TRANSITIONS.c[name] for name in names)).where(own)).mappings().all()
    connection.execute(delete(TRANSITIONS).where(own))
    before = [{"message_id": row_id, "scope_id": scope_of(connection), **each} for each in line.transitions]
    connection.execute(insert(TRANSITIONS), [*before, dict(arrival)])
