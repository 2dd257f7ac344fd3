"""What a replay plan has reserved: nobody else takes it, changes it or deletes it until the plan is over.

A row that the plan has sent is let go when it is known what became of it: it is written then anyhow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from sqlalchemy import ColumnElement, Connection, Engine, exists, select, update

from dlqbatch.store.bulk import in_list
from dlqbatch.store.engine import keeping, reading, writing
from dlqbatch.store.scopes import own
from dlqbatch.store.states import PLAN_MOVES, Status
from dlqbatch.store.tables import MESSAGES, PLAN_ITEMS, PLANS

OVER: Final = tuple(state for state, ends in PLAN_MOVES.items() if not ends)
# What stands before a plan's hash in the journal of each message that it has sent.
REPLAYED_AS: Final = "replay "
_AT_ONCE: Final = 1_000  # rows of one transaction
_AT_REST: Final = tuple(status for status in Status if status is not Status.PROCESSING)
_M: Final = MESSAGES.c
_P: Final = PLANS.c
_I: Final = PLAN_ITEMS.c
Items = tuple[ColumnElement[bool], ...]
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


def items_of_rows(plan_id: int, places: Mapping[int, int], row_ids: Collection[int], connection: Connection) -> Items:
    """The items of these rows, whose places in the plan are known.

    Of a plan that was made just now PostgreSQL has no statistics, and by the ids of messages alone it would read all
    items of the plan for each batch; their places lie close together.
    """
    near = [places[row_id] for row_id in row_ids] or [0]
    return _I.plan_id == plan_id, _I.place.between(min(near), max(near)), in_list(connection, _I.message_id, row_ids)


def places_of(connection: Connection, plan_id: int, row_ids: Collection[int]) -> dict[int, int]:
    """Where in the plan these rows are."""
    these = (_I.plan_id == plan_id, in_list(connection, _I.message_id, row_ids))
    return dict(connection.execute(select(_I.message_id, _I.place).where(*these)).all())


def release_reservations(engine: Engine, plan_id: int, is_over: Callable[[], bool] = lambda: False) -> bool:
    """End the reservation of the plan's rows; a row that is processing keeps it until its outcome is known.

    False if `is_over` ended it before all were released: `ended_plans_with_rows` names the plan then.
    """
    with keeping(engine):
        # State by state, as the index has them, in the order of their ids: or each page would sort all the rest.
        for status in _AT_REST:
            last = 0
            while not is_over():
                with writing(engine) as connection:
                    some = select(_M.id).where(_M.plan_id == plan_id, _M.status == status, _M.id > last)
                    ids = connection.scalars(some.order_by(_M.id).limit(_AT_ONCE).with_for_update()).all()
                    if not ids:
                        break
                    connection.execute(update(MESSAGES).where(in_list(connection, _M.id, ids)).values(plan_id=None))
                last = ids[-1]
            else:
                return False
    return True


def ended_plans_with_rows(engine: Engine) -> Sequence[int]:
    """Plans that are over and still reserve rows: their end was cut, or a row left processing in that moment."""
    with reading(engine) as connection:
        # State by state: by an index on both columns, and not through all that the plan has sent.
        has_rows = exists().where(_M.plan_id == _P.id, _M.status.in_(_AT_REST))
        is_over = (own(connection, _P.scope_id), _P.state.in_(OVER))
        return connection.scalars(select(_P.id).where(*is_over, has_rows)).all()
