"""Holds: the messages of a held group are left alone by the lifecycle and by replays until a person lifts the hold.

A hold is one row of dlq_groups, whose key is a failure and a queue, or all queues. What comes due in a held group is
parked: it has no time for its next retry, and stands in no index that a claim reads. So a claim costs the same, however
many messages are held. Newcomers are parked when their time comes. Once a hold is lifted, what it parked is due again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Row, and_, exists, false, func, not_, or_, select, text, true, update

from dlqbatch.store import journal
from dlqbatch.store.action_tables import GROUPS, IS_HELD
from dlqbatch.store.bulk import in_list, insert_into
from dlqbatch.store.scopes import own, scope_of
from dlqbatch.store.states import Status
from dlqbatch.store.tables import IS_DUE, MESSAGES
from dlqbatch.store.text import json_ready

ON_HOLD: Final = "its group is on hold"
_PARKED: Final = "its group is on hold: no retry before somebody lifts that"
_AT_ONCE: Final = 1_000
_M: Final = MESSAGES.c
_G: Final = GROUPS.c
_TIMES: Final = ("held_at", "acknowledged_at")
"""The columns that say when something was decided."""
_DECIDED: Final = (*_TIMES, "note", "owner", "tags")
_IN_INDEX: Final = text(f"({IS_HELD})")
QUEUE: Final[ColumnElement[str]] = func.coalesce(_M.origin_queue, _M.origin_exchange, "")
"""The queue of a message as holds name it: where it failed, or the exchange where no queue is known."""
IS_ON_HOLD: Final[ColumnElement[bool]] = exists().where(
    _G.held_at.is_not(None),
    *(_G.scope_id == _M.scope_id, _G.fingerprint == _M.fingerprint),
    or_(_G.queue == "", _G.queue == QUEUE),
)
"""The condition that a message is of a group that is held."""


def not_on_hold(connection: Connection) -> ColumnElement[bool]:
    """The condition that a message may be sent; nothing to look at for each message while nothing is held."""
    return ~IS_ON_HOLD if is_any_held(connection) else true()


def is_any_held(connection: Connection) -> bool:
    is_held = (_IN_INDEX, own(connection, _G.scope_id), _G.held_at.is_not(None))
    return bool(connection.scalar(select(exists().where(*is_held))))


def on_hold(connection: Connection, row_ids: Sequence[int]) -> set[int]:
    """Which of these messages are of a held group."""
    return set(connection.scalars(select(_M.id).where(in_list(connection, _M.id, row_ids), IS_ON_HOLD)))


def park(connection: Connection, rows: Sequence[Row[*tuple[Any, ...]]], now: datetime) -> set[int]:
    """Park those of these locked rows that are on hold, and what was marked as due before its group was held.

    Returns the ids of the parked ones.
    """
    if not is_any_held(connection):
        return set()
    marked = (
        select(_M.id)
        .where(text(IS_DUE), own(connection), IS_ON_HOLD)
        .limit(_AT_ONCE)
        .with_for_update(skip_locked=True, of=MESSAGES)
    )
    held = on_hold(connection, [row.id for row in rows]) | set(connection.scalars(marked))
    if held:
        these = in_list(connection, _M.id, held)
        connection.execute(update(MESSAGES).where(these).values(is_due=false(), next_retry_at=None))
        journal.note_many(connection, dict.fromkeys(sorted(held), _PARKED), now, "lifecycle")
    return held


def lifted(connection: Connection) -> Sequence[Row[*tuple[Any, ...]]]:
    """The groups whose hold was lifted, and whose parked messages have not all come back yet."""
    is_lifted = (_IN_INDEX, own(connection, _G.scope_id), _G.reviving)
    return connection.execute(select(_G.fingerprint, _G.queue).where(*is_lifted)).all()


def revive(connection: Connection, fingerprint: str, queue: str, now: datetime, after: int = 0) -> int | None:
    """Make parked messages of a group due again, a thousand at once; the last id, or None when there are no more.

    What another hold covers stays parked.
    """
    parked = and_(
        own(connection),
        _M.status == Status.PENDING,
        _M.fingerprint == fingerprint,
        not_(_M.is_due),
        _M.next_retry_at.is_(None),
        _M.plan_id.is_(None),
        _M.id > after,
    )
    query = select(_M.id).where(parked, ~IS_ON_HOLD)
    if queue:
        query = query.where(QUEUE.in_([queue]))
    ids = connection.scalars(query.order_by(_M.id).limit(_AT_ONCE).with_for_update(of=MESSAGES)).all()
    if ids:
        connection.execute(update(MESSAGES).where(in_list(connection, _M.id, ids)).values(next_retry_at=now))
    if len(ids) == _AT_ONCE:
        return int(ids[-1])
    is_this = (own(connection, _G.scope_id), _G.fingerprint == fingerprint, _G.queue == queue, _G.held_at.is_(None))
    connection.execute(update(GROUPS).where(*is_this).values(reviving=false()))
    return None


def decided(connection: Connection, fingerprint: str, queue: str, *, lock: bool = True) -> dict[str, Any]:
    """What is decided about a group, such as its hold; empty if nothing ever was."""
    this = (_G.scope_id == scope_of(connection), _G.fingerprint == fingerprint, _G.queue == queue)
    query = select(GROUPS).where(*this)
    row = connection.execute(query.with_for_update() if lock else query).one_or_none()
    return {} if row is None else dict(row._mapping)  # noqa: SLF001  (SQLAlchemy's own name for the columns of a row)


def decided_in(connection: Connection, queues: Collection[str], limit: int) -> list[Row[*tuple[Any, ...]]]:
    """What is decided about groups in these queues or in all of them, the newest decision first."""
    mine = (own(connection, _G.scope_id), or_(_G.queue == "", in_list(connection, _G.queue, queues)))
    rows = connection.execute(select(GROUPS).where(*mine).order_by(_G.updated_at.desc()).limit(limit))
    return [row for row in rows if any(getattr(row, name) for name in _DECIDED)]


def decided_alike(connection: Connection, fingerprint: str, others: Collection[str], queue: str) -> list[str]:
    """Those of the others about which the same is decided as about this group, in this queue; '' is every queue."""
    mine = (own(connection, _G.scope_id), in_list(connection, _G.fingerprint, [fingerprint, *others]))
    found: dict[str, set[tuple[object, ...]]] = {each: set() for each in (fingerprint, *others)}
    for row in connection.execute(select(GROUPS).where(*mine)):
        values = (row.held_at, row.held_by, row.held_why, row.note, row.owner, tuple(row.tags), row.acknowledged_by)
        if any(values) and (not queue or row.queue in {"", queue}):
            found[row.fingerprint].add((row.queue, *values))
    return [each for each in others if found[each] == found[fingerprint]]


def decided_together(connection: Connection, fingerprint: str, queue: str, names: Iterable[str]) -> list[str]:
    """The other groups for which these columns were decided together with those of this group, in the same queue.

    They have equal values, and one time: their own, or that of the last decision.
    """
    this = decided(connection, fingerprint, queue)
    if not this:
        return []
    columns = {*names} - {"reviving"}
    time = next((name for name in _TIMES if name in columns and this[name] is not None), "updated_at")
    mine = (own(connection, _G.scope_id), _G.queue == queue, _G.fingerprint != fingerprint, _G[time] == this[time])
    rows = connection.execute(select(GROUPS).where(*mine).order_by(_G.fingerprint))
    return [row.fingerprint for row in rows if all(getattr(row, name) == this[name] for name in columns)]


def take_over(connection: Connection, fingerprint: str, row: Row[*tuple[Any, ...]]) -> None:
    """Decide about this group, about which nothing is decided, what the row says of another one."""
    values = {each.name: getattr(row, each.name) for each in GROUPS.columns}
    values |= {"fingerprint": fingerprint, "reviving": False}
    place = ["scope_id", "fingerprint", "queue"]
    changed = {name: value for name, value in values.items() if name not in place}
    adding = insert_into(connection, GROUPS).values(values)
    connection.execute(adding.on_conflict_do_update(index_elements=place, set_=changed))


def decide(
    connection: Connection, fingerprint: str, queue: str, values: Mapping[str, Any], now: datetime
) -> dict[str, object]:
    """Write what is decided about a group, and return the details of an action that can be undone."""
    before = decided(connection, fingerprint, queue)
    key = {"scope_id": scope_of(connection), "fingerprint": fingerprint, "queue": queue}
    changed = {**values, "updated_at": now}
    adding = insert_into(connection, GROUPS).values({"tags": [], **changed, **key})
    connection.execute(adding.on_conflict_do_update(index_elements=list(key), set_=changed))
    # As it is stored: a long text is cut, and an undo compares.
    after = decided(connection, fingerprint, queue)
    return {
        "group": fingerprint,
        "queue": queue,
        "before": {name: json_ready(before.get(name)) for name in values},
        "after": {name: json_ready(after[name]) for name in values},
    }
