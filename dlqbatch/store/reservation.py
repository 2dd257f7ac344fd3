"""What a replay plan has reserved: nobody else takes it, changes it or deletes it until the plan is over.

A row that the plan has sent is let go when it is known what became of it: it is written then anyhow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import Connection, select

from dlqbatch.store.states import PLAN_MOVES
from dlqbatch.store.tables import MESSAGES, PLAN_ITEMS, PLANS

OVER: Final = tuple(state for state, ends in PLAN_MOVES.items() if not ends)
# What stands before a plan's hash in the journal of each message that it has sent.
REPLAYED_AS: Final = "replay "
_M: Final = MESSAGES.c
_P: Final = PLANS.c
_I: Final = PLAN_ITEMS.c
# What a row's plan becomes when the row is no longer processing.
STILL_RESERVED: Final = (
    select(_P.id).where(_P.id == _M.plan_id, _P.state.not_in(OVER)).correlate(MESSAGES).scalar_subquery()
)


def holder(connection: Connection, plan_id: int | None) -> str | None:
    """The hash of the plan that has reserved a row with this plan; None: nobody has."""
    if plan_id is None:
        return None
    return connection.scalar(select(_P.hash).where(_P.id == plan_id, _P.state.not_in(OVER)))


def hash_of(connection: Connection, plan_id: int | None) -> str | None:
    return None if plan_id is None else connection.scalar(select(_P.hash).where(_P.id == plan_id))


def begun(connection: Connection, plan_id: int) -> Sequence[int]:
    """Rows of the plan with an attempt that is not known to be sent: never more than a few applies hold.

    Asked for by themselves: of a plan that has moved since PostgreSQL's last statistics it would join the rows that are
    sent with the items that wait, one by one.
    """
    waiting = select(_I.message_id).where(_I.plan_id == plan_id, _I.state == "waiting", _I.attempt.is_not(None))
    return connection.scalars(waiting).all()
