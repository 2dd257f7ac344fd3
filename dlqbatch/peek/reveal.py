"""Who sees messages of a live queue unmasked: it takes the right to, and is an action before anything is shown.

A message that is not in the dead store has no journal of its own.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

from sqlalchemy import Engine, text

from dlqbatch.messages.shown import MayNotReveal, Reveal
from dlqbatch.store.action_log import Request, begin, check_person
from dlqbatch.store.engine import writing

PEEK: Final = "peek"
"""The kind of the action."""
_MAY: Final = text(
    "SELECT has_table_privilege('dlq_reveals', 'INSERT') AND has_table_privilege('dlq_actions', 'INSERT')"
)


def write_down(engine: Engine, by: Reveal, queue: str, number: int, now: datetime) -> int:
    """The number of the action; MayNotReveal without the right to reveal, or to have actions."""
    check_person(by.actor, by.reason)
    with writing(engine) as connection:
        if connection.dialect.name == "postgresql" and not connection.scalar(_MAY):
            raise MayNotReveal
        details = {"queue": queue, "count": number}
        return begin(connection, Request(PEEK, by.actor, by.reason, details=details), now, ended=True)
