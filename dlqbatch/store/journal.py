"""The only place that writes a state: every move is one conditional update and one row of the journal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, select, update
from sqlalchemy.dialects import postgresql, sqlite

from dlqbatch.store.bulk import bulk_insert, constants_and_lists, in_list, rows_to_insert, values_table
from dlqbatch.store.field_tables import write_fields
from dlqbatch.store.reservation import STILL_RESERVED
from dlqbatch.store.scopes import scope_of
from dlqbatch.store.states import Status, check
from dlqbatch.store.tables import MESSAGES, TRANSITIONS
from dlqbatch.store.text import key

JOBS: Final = frozenset({"ingest", "lifecycle", "retain"})
"""Actors that are programs; every other actor is a person, to whom the table allows more."""
EDIT_OF: Final = "an edit of message "
"""The journal of an edit begins with this, and the number of the message whose place it took."""
EDITED: Final = "edited: message "
"""This stands in the journal of that message, and the number of its edit."""
REVEALED: Final = "shown unmasked: "
"""The line of the journal begins with this when somebody has seen the content of a message unmasked."""
_UNLOCKED: Final[Mapping[str, None]] = {"lock_owner": None, "lock_token": None, "locked_at": None, "lease_until": None}
# All rows of a batch name the same columns: SQLAlchemy takes them from the first and drops what only others have.
_NEW: Final[Mapping[str, Any]] = {
    **{column.name: None for column in MESSAGES.c if column.nullable},
    "dlq_retry_count": 0,
    "is_due": False,
    "priority": 0,
    "tags": [],
    "system_state": {},
    "possible_duplicate": False,
    "ack_proven": False,
}
# Bodies of more bytes are not sent as an array, which is one more copy of them.
_SMALL_BODIES: Final = 4 * 1024 * 1024
_FIELDS: Final = "fields"
_OURS: Final = frozenset({"id", "status", "status_since", "updated_at"})


@dataclass(frozen=True, slots=True)
class RowMove:
    row_id: int
    from_: Status
    to: Status
    token: str | None
    """The lock token that the row is known to have; None: it has none."""
    reason: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    """What else changes in the row with it."""


def move(
    connection: Connection,
    row_id: int,
    from_: Status,
    to: Status,
    token: str | None,
    at: datetime,
    actor: str,
    reason: str,
    **columns: Any,
) -> bool:
    """False, and nothing written, if somebody else was faster; MoveRefused before any SQL if no such move exists."""
    values = _values(RowMove(row_id, from_, to, token, reason, columns), at, actor)
    changing = update(MESSAGES).where(
        MESSAGES.c.id == row_id,
        MESSAGES.c.status == from_,
        MESSAGES.c.lock_token.is_not_distinct_from(token),
    )
    if connection.execute(changing.values(values)).rowcount != 1:
        return False
    _journal(connection, [_entry(row_id, from_, to, at, actor, reason)])
    return True


def move_many(connection: Connection, moves: Sequence[RowMove], at: datetime, actor: str) -> set[int]:
    """The ids of the rows that moved; the others were changed by somebody else first, and stay as they are."""
    prepared = {entry.row_id: (entry, _values(entry, at, actor)) for entry in moves}
    if len(prepared) != len(moves):
        raise ValueError("one row can move only once in a batch")
    found = connection.execute(
        select(MESSAGES.c.id, MESSAGES.c.status, MESSAGES.c.lock_token)
        .where(in_list(connection, MESSAGES.c.id, prepared))
        .order_by(MESSAGES.c.id)  # two batches that share rows lock them in the same order
        .with_for_update()
    )
    won = [
        prepared[row_id]
        for row_id, status, token in found
        if (status, token) == (prepared[row_id][0].from_, prepared[row_id][0].token)
    ]
    _change(connection, won, at, actor)
    return {entry.row_id for entry, _ in won}


def move_locked(connection: Connection, moves: Sequence[RowMove], at: datetime, actor: str) -> None:
    """Move rows that this transaction has locked, and found in the state and with the token that their moves name."""
    _change(connection, [(entry, _values(entry, at, actor)) for entry in moves], at, actor)


def _change(connection: Connection, moves: Sequence[tuple[RowMove, dict[str, Any]]], at: datetime, actor: str) -> None:
    """One statement for all moves that set the same columns."""
    alike = defaultdict(list)
    for entry, values in moves:
        alike[frozenset(values)].append({"id": entry.row_id, **values})
    for rows in alike.values():
        constants, lists = constants_and_lists(rows, "id")
        listed = values_table(connection, {MESSAGES.c[name]: values for name, values in lists.items()})
        changing = update(MESSAGES).where(MESSAGES.c.id == listed.c.id)
        del lists["id"]
        connection.execute(changing.values({**constants, **{name: listed.c[name] for name in lists}}))
    _journal(connection, (_entry(one.row_id, one.from_, one.to, at, actor, one.reason) for one, _ in moves))


def arrive(
    connection: Connection, rows: Sequence[Mapping[str, Any]], at: datetime, actor: str, reason: str | Mapping[str, str]
) -> dict[str, int]:
    """Insert rows, each with its first state; the ids by identity, without those whose identity is there already.

    The reason is that of all rows, or of each by its identity.
    A row may have `fields`, which are pairs of a name and a value.
    A missing one may have been committed by somebody else just now: look again.
    """
    by_identity = {key(row["identity"]): row for row in rows}
    said = None if isinstance(reason, str) else reason
    if len(by_identity) != len(rows):
        raise ValueError("one identity can arrive only once in a batch")
    for row in rows:
        check(None, row["status"])
        if unknown := row.keys() - MESSAGES.c.keys() - {_FIELDS}:
            raise ValueError(f"a dead message has no {', '.join(sorted(unknown))}")
    if not rows:
        return {}
    # In the order of their identities: two batches that share some would wait for each other otherwise.
    stamp = {**_NEW, "status_since": at, "created_at": at, "updated_at": at, "scope_id": scope_of(connection)}
    stamped = [{**stamp, **row, "identity": identity} for identity, row in sorted(by_identity.items())]
    fields = {row["identity"]: row.pop(_FIELDS, ()) for row in stamped}
    ids = _insert(connection, stamped)
    write_fields(connection, {row_id: fields[identity] for identity, row_id in ids.items()})
    _journal(
        connection,
        (
            _entry(row_id, None, by_identity[name]["status"], at, actor, str(reason) if said is None else said[name])
            for name, row_id in ids.items()
        ),
    )
    return ids


def _insert(connection: Connection, rows: list[dict[str, Any]]) -> dict[str, int]:
    is_postgresql = connection.dialect.name == "postgresql"
    adding = (postgresql if is_postgresql else sqlite).insert(MESSAGES)
    if is_postgresql and sum(len(row["body"]) for row in rows) <= _SMALL_BODIES:
        # psycopg takes a list of values for each row apart anew every time, which costs as much as the insert itself.
        adding = adding.from_select(*rows_to_insert(connection, MESSAGES, rows, "identity"), include_defaults=False)
        parameters: list[dict[str, Any]] | None = None
    else:
        parameters = rows
    found = connection.execute(
        adding.on_conflict_do_nothing(index_elements=[MESSAGES.c.identity]).returning(
            MESSAGES.c.identity, MESSAGES.c.id
        ),
        parameters,
    )
    return {row.identity: row.id for row in found}


def note(connection: Connection, row_id: int, at: datetime, actor: str, reason: str) -> bool:
    """A line in the journal that changes no state; False if there is no such row."""
    return note_many(connection, {row_id: reason}, at, actor) == 1


def note_many(connection: Connection, reasons: Mapping[int, str], at: datetime, actor: str) -> int:
    """One line for each row id; says how many of the rows there are."""
    found = connection.execute(
        select(MESSAGES.c.id, MESSAGES.c.status).where(in_list(connection, MESSAGES.c.id, reasons))
    )
    entries = [_entry(row_id, status, status, at, actor, reasons[row_id]) for row_id, status in found]
    _journal(connection, entries)
    return len(entries)


def _values(entry: RowMove, at: datetime, actor: str) -> dict[str, Any]:
    check(entry.from_, entry.to, message_id=entry.row_id, by_person=actor not in JOBS)
    if wrong := _OURS & entry.columns.keys():
        raise ValueError(f"a move sets {', '.join(sorted(wrong))} itself")
    values: dict[str, Any] = {"status": entry.to, "is_due": False, "updated_at": at}
    if entry.from_ != entry.to:
        values["status_since"] = at
    if entry.to != Status.PROCESSING:
        values.update(_UNLOCKED)
        if entry.from_ == Status.PROCESSING:
            values["plan_id"] = STILL_RESERVED
    elif not entry.columns.get("lock_token"):
        raise ValueError("who takes a row brings a lock_token")
    return values | dict(entry.columns)


def _entry(row_id: int, from_: Status | None, to: Status, at: datetime, actor: str, reason: str) -> dict[str, Any]:
    return {
        "message_id": row_id,
        "from_status": from_,
        "to_status": to,
        "at": at,
        "actor": actor,
        "reason": reason,
    }


def _journal(connection: Connection, entries: Iterable[dict[str, Any]]) -> None:
    scope = {"scope_id": scope_of(connection)}
    lines = [entry | scope for entry in entries]
    if lines:
        bulk_insert(connection, TRANSITIONS, lines, "message_id")
