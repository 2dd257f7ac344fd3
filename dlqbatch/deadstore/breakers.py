"""The circuit breakers' states in the database, counted under a lock so that of two workers one gets the probe.

An attempt's name for its breaker is its row's id: a row has one open attempt, and a probe that could not be sent is
still the probe when its row is due again. Whoever counts holds its messages and attempts already; breakers come last,
in the order of their origins.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import bindparam, select, update
from sqlalchemy.dialects import postgresql, sqlite

from dlqbatch.deadstore.tables import ATTEMPTS, BREAKERS, PLAN_ITEMS, PLANS
from dlqbatch.deadstore.text import key
from dlqbatch.policy import breaker
from dlqbatch.policy.breaker import Breaker, Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import Connection, ScalarSelect

    from dlqbatch.policy.breaker import Limits

_STATE: Final = tuple(BREAKERS.c[name] for name in Breaker.__slots__)


class Failed(NamedTuple):
    """An attempt that came back."""

    row_id: int
    origin: str | None
    sent_at: datetime


def place(queue: str | None, exchange: str | None, routing_key: str | None) -> str | None:
    """What a row's breaker is kept under; None: nobody knows where it failed."""
    if queue is None and exchange:
        return key(f"exchange {exchange}")
    return queue if queue is not None else routing_key


def named_queue() -> ScalarSelect[Any]:
    """The queue that a replay has named for this attempt; what becomes of it says nothing of its row's origin."""
    item = PLAN_ITEMS.c
    of_this = (item.message_id == ATTEMPTS.c.message_id, item.attempt == ATTEMPTS.c.number)
    plans = PLANS.join(PLAN_ITEMS, item.plan_id == PLANS.c.id)
    named = select(PLANS.c.to_queue).select_from(plans).where(PLANS.c.to_queue.is_not(None), *of_this)
    return named.limit(1).correlate(ATTEMPTS).scalar_subquery()


def admit(
    connection: Connection, wanted: Mapping[str, Sequence[int]], now: datetime, limits: Limits, *, keep: bool = True
) -> set[int]:
    """Of the rows by origin, those that may be sent now; without `keep` nobody becomes the probe by it."""
    states = _read(connection, wanted)
    admitted = {row_id for origin in wanted.keys() - states.keys() for row_id in wanted[origin]}
    doubtful = {origin for origin, state in states.items() if state.phase is not Phase.CLOSED}
    admitted.update(row_id for origin in states.keys() - doubtful for row_id in wanted[origin])
    found = _locked(connection, doubtful) if keep else {origin: states[origin] for origin in doubtful}
    changed = {}
    for origin, state in found.items():
        for row_id in wanted[origin]:
            is_admitted, state = breaker.admit(state, str(row_id), now, limits)  # noqa: PLW2901  (one state after the other)
            if is_admitted:
                admitted.add(row_id)
        changed[origin] = state
    if keep:
        _write(connection, found, changed, now)
    return admitted


def count_sent(connection: Connection, origins: Iterable[str], now: datetime, limits: Limits) -> None:
    """An origin for each attempt that was sent."""
    numbers = Counter(origins)
    before = _locked(connection, numbers, now)
    after = {}
    for origin, state in before.items():
        for _ in range(numbers[origin]):
            state = breaker.sent(state, now, limits)  # noqa: PLW2901  (the same)
        after[origin] = state
    _write(connection, before, after, now)


def count_failed(connection: Connection, failures: Sequence[Failed], now: datetime, limits: Limits) -> None:
    before = _locked(connection, {each.origin for each in failures if each.origin is not None}, now)
    after = dict(before)
    for each in failures:
        if each.origin in after:
            after[each.origin] = breaker.failed(after[each.origin], str(each.row_id), each.sent_at, now, limits)
    _write(connection, before, after, now)


def count_succeeded(connection: Connection, row_ids: Iterable[int], now: datetime) -> None:
    """Only a probe's success changes anything."""
    names = [str(row_id) for row_id in row_ids]
    if not names:
        return
    origins = connection.scalars(select(BREAKERS.c.origin).where(BREAKERS.c.probe.in_(names))).all()
    before = _locked(connection, origins)
    after = {
        origin: breaker.succeeded(state, state.probe, now) if state.probe in names else state
        for origin, state in before.items()
    }
    _write(connection, before, after, now)


def _read(connection: Connection, origins: Iterable[str]) -> dict[str, Breaker]:
    found = connection.execute(select(BREAKERS.c.origin, *_STATE).where(BREAKERS.c.origin.in_(list(origins))))
    return {origin: Breaker(*state) for origin, *state in found}


def _locked(connection: Connection, origins: Iterable[str], new_at: datetime | None = None) -> dict[str, Breaker]:
    """With a time, those that are missing are made first."""
    names = sorted(origins)
    if not names:
        return {}
    if new_at is not None:
        first = {**{name: getattr(_FIRST, name) for name in Breaker.__slots__}, "updated_at": new_at}
        kind = postgresql if connection.dialect.name == "postgresql" else sqlite
        making = kind.insert(BREAKERS).on_conflict_do_nothing(index_elements=[BREAKERS.c.origin])
        connection.execute(making, [{"origin": name, **first} for name in names])
    asking = select(BREAKERS.c.origin, *_STATE).where(BREAKERS.c.origin.in_(names))
    found = connection.execute(asking.order_by(BREAKERS.c.origin).with_for_update())
    return {origin: Breaker(*state) for origin, *state in found}


_FIRST: Final = Breaker()


def _write(connection: Connection, before: Mapping[str, Breaker], after: Mapping[str, Breaker], now: datetime) -> None:
    changed = [
        {"_origin": origin, "updated_at": now, **{name: getattr(state, name) for name in Breaker.__slots__}}
        for origin, state in after.items()
        if state != before[origin]
    ]
    if changed:
        writing = update(BREAKERS).where(BREAKERS.c.origin == bindparam("_origin"))
        names = [name for name in changed[0] if name != "_origin"]
        connection.execute(writing.values({name: bindparam(name) for name in names}), changed)
