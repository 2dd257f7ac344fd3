"""The actions, the newest first, and one of them with its messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, Engine, Row, select

from dlqbatch.logs import masked, masking
from dlqbatch.store.action_log import IDEMPOTENCY_KEY, NoSuchAction
from dlqbatch.store.action_tables import ACTION_ROWS, ACTIONS
from dlqbatch.store.engine import reading
from dlqbatch.store.filters import action_id_of, action_name
from dlqbatch.store.states import Status
from dlqbatch.store.text import json_ready

_A: Final = ACTIONS.c
_R: Final = ACTION_ROWS.c


@dataclass(frozen=True, slots=True)
class Action:
    name: str
    """`A-17`"""
    kind: str
    actor: str
    verified: bool
    """Somebody has checked who the actor is; a name from the command line is not checked."""
    reason: str
    at: datetime
    ended_at: datetime | None
    """None: it is under way, or it was cut."""
    filters: Mapping[str, object]
    counts: Mapping[str, int]
    """Messages that are done, refused, skipped and undone."""
    details: Mapping[str, object]
    undoes: str | None
    undone_by: str | None
    """The newest action that undid some of it, or all."""

    def as_dict(self) -> dict[str, object]:
        return {field.name: json_ready(getattr(self, field.name)) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class ActionMessage:
    id: int
    state: str
    """done, refused, skipped or undone."""
    before: Status | None
    """None: this action made it."""
    after: Status | None
    edit_of: int | None
    why: str | None


@dataclass(frozen=True, slots=True)
class ShownAction:
    action: Action
    messages: tuple[ActionMessage, ...]
    """They are in the order of their ids."""
    next: int | None
    """The id that the next page begins after; None: there is nothing behind."""

    def as_dict(self) -> dict[str, object]:
        return {**self.action.as_dict(), "messages": json_ready(self.messages), "next": self.next}


def recent(engine: Engine, limit: int = 50, *, actor: str | None = None, kind: str | None = None) -> tuple[Action, ...]:
    """The newest first."""
    query = select(ACTIONS).order_by(_A.id.desc()).limit(limit)
    if actor is not None:
        query = query.where(_A.actor == actor)
    if kind is not None:
        query = query.where(_A.kind == kind)
    with reading(engine) as connection:
        return tuple(action_of(row) for row in connection.execute(query))


def show(engine: Engine, name: str, limit: int = 50, after: int = 0, *, state: str | None = None) -> ShownAction:
    action_id = action_id_of(name)
    query = select(_R.message_id, _R.state, _R.from_status, _R.to_status, _R.edit_of, _R.reason)
    query = query.where(_R.action_id == action_id, _R.message_id > after)
    if state is not None:
        query = query.where(_R.state == state)
    with reading(engine) as connection:
        row = find(connection, action_id)
        found = connection.execute(query.order_by(_R.message_id).limit(limit + 1)).all()
    messages = tuple(ActionMessage(*each) for each in found[:limit])
    return ShownAction(action_of(row), messages, messages[-1].id if len(found) > limit else None)


def find(connection: Connection, action_id: int, *, lock: bool = False) -> Row[*tuple[Any, ...]]:
    query = select(ACTIONS).where(_A.id == action_id)
    row = connection.execute(query.with_for_update() if lock else query).one_or_none()
    if row is None:
        raise NoSuchAction(action_name(action_id))
    return row


def action_of(row: Row[*tuple[Any, ...]]) -> Action:
    """The action as it is shown: people write secrets into reasons and filters too."""
    return Action(
        action_name(row.id),
        row.kind,
        row.actor,
        row.verified,
        masked(row.reason),
        row.at,
        row.ended_at,
        masking().value(row.filters),
        row.counts,
        masking().value({name: value for name, value in row.details.items() if name != IDEMPOTENCY_KEY}),
        None if row.undoes is None else action_name(row.undoes),
        None if row.undone_by is None else action_name(row.undone_by),
    )
