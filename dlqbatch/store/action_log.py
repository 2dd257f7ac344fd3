"""What people did, as actions: each is written in the transaction of its first change, with its messages.

A large change takes several transactions, and each adds its messages to the action. After a cut the action says which
messages it has changed, and these can be undone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal

from sqlalchemy import ColumnElement, Connection, func, insert, inspect, not_, select, update

from dlqbatch.errors import DlqbatchError
from dlqbatch.store import journal
from dlqbatch.store.action_tables import ACTION_ROWS, ACTIONS
from dlqbatch.store.bulk import bulk_insert, in_list
from dlqbatch.store.filters import NotUnderstood, action_name
from dlqbatch.store.journal import JOBS, REVEALED, RowMove
from dlqbatch.store.states import Status, way
from dlqbatch.store.tables import PLAN_ITEMS, TRANSITIONS

AT_ONCE: Final = 500
"""Messages of one transaction."""
IDEMPOTENCY_KEY: Final = "idempotency_key"
"""The detail with the key of the request that an action was taken by; it is not shown."""
DECIDED_BY_KEY: Final[ContextVar[str]] = ContextVar(IDEMPOTENCY_KEY, default="")
_NEWEST: Final = 1_000
"""The number of newest actions that are looked at for one with a key."""
_A: Final = ACTIONS.c
_R: Final = ACTION_ROWS.c
_T: Final = TRANSITIONS.c
RowState = Literal["done", "refused", "skipped", "undone"]


class NoSuchAction(DlqbatchError):
    exit_code = 1

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"there is no action {name}. `dlqbatch actions list` shows the newest.")


@dataclass(frozen=True, slots=True)
class Request:
    """Who wants what, and why."""

    kind: str
    actor: str
    reason: str
    verified: bool = False
    """A console or an identity provider has checked who the actor is."""
    filters: Mapping[str, object] = field(default_factory=dict)
    details: Mapping[str, object] = field(default_factory=dict)
    """What a change that is not of messages needs to be undone, and what a reader of the action wants to know."""
    undoes: int | None = None


def check_person(actor: str, reason: str) -> None:
    """Both go into the journal."""
    if not actor.strip() or actor in JOBS:
        raise NotUnderstood(
            f"'{actor}' does not name a person, and the journal has to: give a name with --actor. Nothing was changed."
        )
    if not reason.strip():
        raise NotUnderstood("a reason is needed: it goes into the journal. Nothing was changed.")


@dataclass(frozen=True, slots=True)
class ActionRow:
    message_id: int
    state: RowState
    from_status: Status | None
    to_status: Status | None
    reason: str | None = None
    """Why it was refused or skipped; of what is done, what there is to know of it."""
    before: Mapping[str, object] = field(default_factory=dict)
    """Columns of the message that its former state needs."""
    last_before: int | None = None
    last_after: int | None = None
    edit_of: int | None = None
    """The message whose place it took."""


def begin(connection: Connection, request: Request, at: datetime, *, ended: bool = False) -> int:
    """Write the action; call it in the transaction of its first change."""
    key = DECIDED_BY_KEY.get()
    details = {name: value for name, value in request.details.items() if name != IDEMPOTENCY_KEY}
    values = {
        "kind": request.kind,
        "actor": request.actor,
        "verified": request.verified,
        "reason": request.reason,
        "filters": dict(request.filters),
        "details": details | ({IDEMPOTENCY_KEY: key} if key else {}),
        "undoes": request.undoes,
        "at": at,
        "ended_at": at if ended else None,
    }
    return int(connection.execute(insert(ACTIONS).values(values).returning(_A.id)).scalar_one())


def taken_by_key(connection: Connection, actor: str, key: str) -> str | None:
    """The action that this actor has taken by a request with this key, if it is among the newest."""
    newest = select(_A.id, _A.actor, _A.details).order_by(_A.id.desc()).limit(_NEWEST)
    found = (
        row.id for row in connection.execute(newest) if row.actor == actor and key == row.details.get(IDEMPOTENCY_KEY)
    )
    return next((action_name(action_id) for action_id in found), None)


def add_rows(connection: Connection, action_id: int, rows: Iterable[ActionRow]) -> None:
    """Add messages to the action in the transaction that changes them."""
    columns = [column.name for column in ACTION_ROWS.c if column.name != "action_id"]
    values = [{"action_id": action_id} | {name: getattr(row, name) for name in columns} for row in rows]
    if values:
        bulk_insert(connection, ACTION_ROWS, values, "message_id")
        count(connection, action_id, Counter(str(row["state"]) for row in values))


def count(connection: Connection, action_id: int, more: Mapping[str, int]) -> None:
    """Add to the numbers of the action; a number may be negative."""
    query = select(_A.counts).where(_A.id == action_id)
    counts = Counter(connection.execute(query.with_for_update()).scalar_one())
    counts.update(more)
    left = {state: number for state, number in counts.items() if number}
    connection.execute(update(ACTIONS).where(_A.id == action_id).values(counts=left))


@dataclass(frozen=True, slots=True)
class By:
    """Who decides something, and why."""

    actor: str
    reason: str
    verified: bool = False


def decide(connection: Connection, by: By | None, kind: str, name: str, before: object, after: object) -> str | None:
    """Write a decision about `name`, which an undo can take back; None if nobody decided it, or nothing changed by it.

    A database that is there for the events alone has no actions.
    """
    if by is None or before == after or not inspect(connection).has_table(ACTIONS.name):
        return None
    at = datetime.now(UTC)
    if connection.dialect.name == "postgresql":
        at = connection.execute(select(func.now())).scalar_one()
    details = {kind: name, "before": before, "after": after}
    return action_name(
        begin(connection, Request(kind, by.actor, by.reason, by.verified, details=details), at, ended=True)
    )


def end(connection: Connection, action_id: int, at: datetime) -> None:
    connection.execute(update(ACTIONS).where(_A.id == action_id).values(ended_at=at))


def selected_by(connection: Connection, action_id: int, message_id: ColumnElement[int]) -> ColumnElement[bool]:
    """The condition that the action changed a message; of an edit the messages that it made, of a replay what it sent.

    It stays true of a message after the action was undone.
    """
    query = select(_A.kind, _A.details).where(_A.id == action_id)
    found = connection.execute(query).one_or_none()
    if found is None:
        raise NoSuchAction(action_name(action_id))
    if "plan" in found.details:
        items = PLAN_ITEMS.c
        return message_id.in_(
            select(items.message_id).where(items.plan_id == found.details["plan_id"], items.state == "sent")
        )
    rows = select(_R.message_id).where(_R.action_id == action_id, _R.state.in_(("done", "undone")))
    if found.kind == "edit":
        rows = rows.where(_R.edit_of.is_not(None))
    return message_id.in_(rows)


# --- Changes of state, many at once


@dataclass(frozen=True, slots=True)
class StateChange:
    row_id: int
    start: Status
    end: Status
    token: str | None
    reason: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    """What is set with the last move."""


def change_states(connection: Connection, changes: Sequence[StateChange], at: datetime, actor: str) -> None:
    """Move messages that this transaction has locked, by all the moves that each of them needs."""
    lock = {"lock_owner": actor, "lock_token": "a person", "locked_at": at}
    ways = [(change, way(change.start, change.end)) for change in changes]
    for step in range(max((len(moves) for _, moves in ways), default=0)):
        moving = []
        for change, moves in ways:
            if step >= len(moves):
                continue
            columns: dict[str, Any] = {"next_retry_at": None}
            if moves[step].end == Status.PROCESSING:
                columns |= lock
            if step == len(moves) - 1:
                columns |= change.columns
            token = change.token if step == 0 else None
            moving.append(RowMove(change.row_id, *moves[step], token, change.reason, columns))
        journal.move_locked(connection, moving, at, actor)


def last_transitions(connection: Connection, row_ids: Iterable[int]) -> dict[int, int]:
    """The newest line of the journal of each message; any change of state writes one, and who only looks counts not."""
    is_change = not_(_T.reason.startswith(REVEALED, autoescape=True))
    newest = select(_T.message_id, func.max(_T.id)).where(in_list(connection, _T.message_id, row_ids), is_change)
    return dict(connection.execute(newest.group_by(_T.message_id)).all())
