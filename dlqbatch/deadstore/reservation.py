"""What a replay plan has reserved: nobody else takes it, changes it or deletes it until the plan is over.

A row that the plan has sent is let go when it is known what became of it: it is written then anyhow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlalchemy import exists, select, update

from dlqbatch.deadstore.engine import reading, writing
from dlqbatch.deadstore.given import among
from dlqbatch.deadstore.tables import MESSAGES, PLANS
from dlqbatch.policy.lifecycle import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import ColumnElement, Connection, Engine

OVER: Final = ("done", "aborted")
_AT_ONCE: Final = 1_000
"""Rows of one transaction."""
_AT_REST: Final = tuple(status for status in Status if status is not Status.PROCESSING)
_M: Final = MESSAGES.c
_P: Final = PLANS.c
STILL_RESERVED: Final = (
    select(_P.id).where(_P.id == _M.plan_id, _P.state.not_in(OVER)).correlate(MESSAGES).scalar_subquery()
)
"""What a row's plan becomes when the row is no longer processing."""


def holder(connection: Connection, plan_id: int | None) -> str | None:
    """The hash of the plan that has reserved a row with this plan; None: nobody has."""
    if plan_id is None:
        return None
    return connection.scalar(select(_P.hash).where(_P.id == plan_id, _P.state.not_in(OVER)))


def let_go(engine: Engine, plan_id: int) -> None:
    """The plan's rows are everybody's again; what it is sending, or has sent, becomes so when it comes to rest."""
    last = 0
    while True:
        with writing(engine) as connection:
            some = select(_M.id).where(*_at_rest(plan_id), _M.id > last).order_by(_M.id)
            ids = connection.scalars(some.limit(_AT_ONCE).with_for_update()).all()
            if not ids:
                return
            connection.execute(update(MESSAGES).where(among(connection, _M.id, ids)).values(plan_id=None))
        last = ids[-1]


def forgotten(engine: Engine) -> Sequence[int]:
    """Plans that are over and have rows all the same: an end was cut, or a row came to rest in that moment."""
    with reading(engine) as connection:
        has_rows = exists().where(*_at_rest(_P.id))
        return connection.scalars(select(_P.id).where(_P.state.in_(OVER), has_rows)).all()


def _at_rest(plan_id: int | ColumnElement[int]) -> tuple[ColumnElement[bool], ...]:
    # Named one by one: by an index on both columns, and not through all that the plan has sent.
    return _M.plan_id == plan_id, _M.status.in_(_AT_REST)
