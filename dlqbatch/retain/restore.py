"""A message from cold storage: shown as it was, and restored into the dead store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, Engine, delete, insert, select

from dlqbatch.messages.actions import Change, Shown, check_person, replaced, shown
from dlqbatch.messages.queries import Attempt, Content, Detail, Record, Transition
from dlqbatch.retain.format import ArchiveDamaged, Line
from dlqbatch.store import journal as states
from dlqbatch.store.access import StoreClock
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.filters import LARGEST_ID
from dlqbatch.store.states import Status
from dlqbatch.store.tables import ATTEMPTS, MESSAGES, TRANSITIONS
from dlqbatch.store.text import key

_M: Final = MESSAGES.c
# Columns that are not restored: the state, its lease, its replay plan and its next retry.
_BEGINS_ANEW: Final = frozenset(
    {
        *("id", "status", "status_since", "updated_at", "is_due", "plan_id", "next_retry_at"),
        *("lock_owner", "lock_token", "locked_at", "lease_until"),
    }
)


def shown_copy(line: Line, part: str) -> Shown:
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
    return shown(detail)


class Restoring:
    """Each call is a transaction of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

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

    def _from_archived(self, row_id: int, actor: str, reason: str, now: datetime, *, dry_run: bool) -> Change:
        with (reading if dry_run else writing)(self._engine) as connection:
            row = select(_M.status).where(_M.id == row_id)
            status = connection.scalar(row if dry_run else row.with_for_update())
            if status != Status.ARCHIVED:
                why = f"it is in the dead store, and {status}; only what is archived comes back"
                return Change(row_id, status, status, is_done=False, why=why if status else "it was deleted just now")
            if not dry_run and not states.move(connection, row_id, status, Status.MANUAL, None, now, actor, reason):
                raise AssertionError("a row changed though it was locked")
            return Change(row_id, status, Status.MANUAL, is_done=True, why=replaced(connection, row_id))

    def _from_copy(self, line: Line, part: str, actor: str, reason: str, now: datetime, *, dry_run: bool) -> Change:
        number, identity = int(line.message["id"]), key(str(line.message["identity"]))
        with (reading if dry_run else writing)(self._engine) as connection:
            again = connection.execute(select(_M.id, _M.status).where(_M.identity == identity)).one_or_none()
            if again is None and dry_run:
                return Change(number, Status.ARCHIVED, Status.MANUAL, is_done=True)
            row_id = None if again is not None else _insert(connection, line, part, actor, reason, now)
            if row_id is None:
                who = f"message {again.id} ({again.status})" if again is not None else "another message"
                why = f"its identity is in the dead store again, as {who}: look at that one"
                return Change(number, None, None, is_done=False, why=why)
            why = "; ".join(filter(None, (f"was message {number}", replaced(connection, row_id))))
            return Change(row_id, Status.ARCHIVED, Status.MANUAL, is_done=True, why=why)


def _insert(connection: Connection, line: Line, part: str, actor: str, reason: str, now: datetime) -> int | None:
    row = {name: value for name, value in line.message.items() if name not in _BEGINS_ANEW}
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
            connection.execute(insert(ATTEMPTS), [{"message_id": row_id, **each} for each in over])
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
    before = [{"message_id": row_id, **each} for each in line.transitions]
    connection.execute(insert(TRANSITIONS), [*before, dict(arrival)])
