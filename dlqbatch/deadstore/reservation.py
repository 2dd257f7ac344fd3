"""What a plan has reserved, let go when it is over; and leases that nobody needs any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import or_, select, text, update

from dlqbatch.deadstore.attempts import IS_SENT
from dlqbatch.deadstore.engine import writing
from dlqbatch.deadstore.given import among
from dlqbatch.deadstore.tables import HAS_LEASE, MESSAGES
from dlqbatch.policy.lifecycle import Status

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Engine

    from dlqbatch.deadstore.engine import Kept

AT_ONCE: Final = 1_000
"""Rows of one transaction."""
_M: Final = MESSAGES.c


def let_go(engine: Engine, plan_id: int) -> None:
    """The plan's rows are everybody's again, but for those that an apply is sending at this moment."""
    free = or_(_M.status != Status.PROCESSING, _M.lease_until.is_(None), IS_SENT)
    last = 0
    while True:
        with writing(engine) as connection:
            some = select(_M.id).where(_M.plan_id == plan_id, _M.id > last, free).order_by(_M.id)
            ids = connection.scalars(some.limit(AT_ONCE).with_for_update()).all()
            if not ids:
                return
            letting = update(MESSAGES).where(among(connection, _M.id, ids))
            connection.execute(letting.values(plan_id=None, lease_until=None))
        last = ids[-1]


def end_leases(engine: Engine | Kept, plan_id: int, before: datetime | None = None) -> None:
    """The leases of what is sent, all of them or those that are over before a time.

    A row that somebody works on at this moment is passed over: its lease ends with that, or the next time.
    """
    is_meant: list[Any] = [text(HAS_LEASE), _M.plan_id == plan_id, IS_SENT]
    if before is not None:
        is_meant.append(_M.lease_until < before)
    # By their index: a plan may have a million rows, of which few have a lease.
    some = select(_M.id).where(*is_meant).order_by(_M.lease_until).limit(AT_ONCE).with_for_update(skip_locked=True)
    found = AT_ONCE
    while found == AT_ONCE:
        with writing(engine) as connection:
            ids = connection.scalars(some).all()
            if ids:
                connection.execute(update(MESSAGES).where(among(connection, _M.id, ids)).values(lease_until=None))
        found = len(ids)
