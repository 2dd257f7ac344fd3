"""Changes of many messages under one action, in bounded transactions; what is refused has its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from itertools import islice
from typing import NamedTuple

from sqlalchemy import Connection, Engine

from dlqbatch.errors import ActionCut, DatabaseUnreadable
from dlqbatch.messages.selection import Split
from dlqbatch.store import action_log
from dlqbatch.store.action_log import AT_ONCE, ActionRow, Request
from dlqbatch.store.engine import keeping, reading, writing
from dlqbatch.store.filters import action_name
from dlqbatch.store.states import Status
from dlqbatch.store.text import json_ready


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
    left: str = ""
    """Where the content of a message that is erased can be found still, and what to do about it."""


@dataclass(frozen=True, slots=True)
class Changes:
    changes: tuple[Change, ...]
    dry_run: bool
    action: str | None = None
    """What undoes it: `dlqbatch undo A-17`. None: nothing was changed."""
    split: Split | None = None
    """How the messages that a filter matched are divided."""
    left: tuple[str, ...] = ()
    """What an erase could not reach, and what to do about it."""

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
                if field.name not in {"asked", "left"} or getattr(one, field.name)
            }
            for one in self.changes
        ]
        return {
            "dry_run": self.dry_run,
            "action": self.action,
            "done": self.done,
            "not_done": self.not_done,
            **({} if self.split is None else {"split": self.split.as_dict()}),
            **({"left": list(self.left)} if self.left else {}),
            "messages": changes,
        }


class Outcome(NamedTuple):
    """What became of one message, and its lines in the action; a message that is not there has none."""

    change: Change
    rows: tuple[ActionRow, ...]


ChangeSome = Callable[[Connection, Sequence[int]], Sequence[Outcome]]
"""Changes some messages in one transaction, or says on a dry run what it would do."""


def change_many(
    engine: Engine,
    chosen: Iterable[int],
    request: Request,
    now: datetime,
    change_some: ChangeSome,
    *,
    dry_run: bool,
    at_once: int | None = None,
) -> Changes:
    """Change these messages in bounded transactions under one action; no action is written if nothing is changed.

    After a cut the action holds what was committed. The same command goes on with the rest, as a new action.
    """
    found: list[Change] = []
    waiting: list[ActionRow] = []
    action_id = committed = None
    left = iter(chosen)
    try:
        with keeping(engine) as kept:
            some = list(islice(left, at_once or AT_ONCE))
            while some:
                with (reading if dry_run else writing)(kept) as connection:
                    outcomes = change_some(connection, some)
                    waiting += [row for outcome in outcomes for row in outcome.rows]
                    if not dry_run and (action_id is not None or any(row.state == "done" for row in waiting)):
                        action_id = action_log.begin(connection, request, now) if action_id is None else action_id
                        action_log.add_rows(connection, action_id, waiting)
                        waiting = []
                committed = action_id
                found += [outcome.change for outcome in outcomes]
                some = list(islice(left, at_once or AT_ONCE))
            if action_id is not None:
                with writing(kept) as connection:
                    action_log.end(connection, action_id, now)
    except DatabaseUnreadable as error:
        if committed is None:
            raise
        raise ActionCut(error, action_name(committed)) from error
    return Changes(tuple(found), dry_run, None if action_id is None else action_name(action_id))
