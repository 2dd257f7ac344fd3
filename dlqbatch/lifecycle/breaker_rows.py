"""The circuit breakers' states in the database, counted under a lock so that of two workers one gets the probe.

A breaker knows an attempt by the id of its row: a row has one open attempt, and a probe that could not be sent is still
the probe when its row is due again. Breakers are locked last, after messages and attempts, in the order of their
origins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, Connection, ScalarSelect, Select, bindparam, exists, select, update

from dlqbatch.lifecycle import breaker
from dlqbatch.lifecycle.breaker import Breaker, Limits
from dlqbatch.store.bulk import in_list, insert_into, values_table
from dlqbatch.store.scopes import own, scope_of
from dlqbatch.store.states import Phase
from dlqbatch.store.tables import ATTEMPTS, BREAKERS, MESSAGES, PLAN_ITEMS, PLANS
from dlqbatch.store.text import key

_FIELDS: Final = Breaker.__slots__
_STATES: Final = select(BREAKERS.c.origin, *(BREAKERS.c[name] for name in _FIELDS))
_FIRST: Final = Breaker()


class Failed(NamedTuple):
    """An attempt that came back."""

    row_id: int
    origin: str | None
    sent_at: datetime


def place(queue: str | None, exchange: str | None, routing_key: str | None) -> str | None:
    """The key of a row's breaker; None if nobody knows where it failed."""
    if queue is None and exchange:
        return key(f"exchange {exchange}")
    return queue if queue is not None else routing_key


def named_queue() -> ScalarSelect[Any]:
    """The queue that a replay has named for this attempt; what becomes of it says nothing of its row's origin."""
    item = PLAN_ITEMS.c
    of_this = (item.message_id == ATTEMPTS.c.message_id, item.attempt == ATTEMPTS.c.number)
    # Plans first, of which there are few: as a join SQLite would read every item of every plan, for each attempt.
    has_this = exists().where(item.plan_id == PLANS.c.id, *of_this).correlate(ATTEMPTS, PLANS)
    named = select(PLANS.c.to_queue).where(PLANS.c.to_queue.is_not(None), has_this)
    return named.limit(1).correlate(ATTEMPTS).scalar_subquery()


def failures_of(
    connection: Connection,
    numbers: Mapping[int, int],
    origins: Mapping[int, tuple[str | None, str | None, str | None]],
    now: datetime,
) -> list[Failed]:
    """What is counted of attempts that came back, by row id: their numbers, and the origins of their rows."""
    if not numbers:
        return []
    attempt = ATTEMPTS.c
    listed = values_table(connection, {attempt.message_id: list(numbers), attempt.number: list(numbers.values())})
    these = (attempt.message_id == listed.c.message_id, attempt.number == listed.c.number)
    rows = connection.execute(select(attempt.message_id, attempt.sent_at, named_queue()).where(*these))
    sent = {row_id: (sent_at, named) for row_id, sent_at, named in rows}
    failures: list[Failed] = []
    for row_id, origin in origins.items():
        # It may be back before its sender could note that it was sent.
        sent_at, named = sent.get(row_id, (None, None))
        failures.append(Failed(row_id, named or place(*origin), sent_at or now))
    return failures


def not_closed(connection: Connection, origins: Iterable[str]) -> set[str]:
    """Of these origins those whose circuit breaker does not let everything through."""
    of_these = (_ours(connection), in_list(connection, BREAKERS.c.origin, origins))
    return set(connection.scalars(select(BREAKERS.c.origin).where(BREAKERS.c.phase != Phase.CLOSED, *of_these)))


def admit(
    connection: Connection, wanted: Mapping[str, Sequence[int]], now: datetime, limits: Limits, *, keep: bool = True
) -> set[int]:
    """Of the rows by origin, those that may be sent now; without `keep` nobody becomes the probe by it."""
    states = _by_origin(connection, _states_of(connection, list(wanted)))
    doubtful = {origin: state for origin, state in states.items() if state.phase is not Phase.CLOSED}
    admitted = {row_id for origin in wanted.keys() - doubtful.keys() for row_id in wanted[origin]}
    before = _locked(connection, doubtful) if keep else doubtful
    after = dict(before)
    for origin in before:
        for row_id in wanted[origin]:
            is_admitted, after[origin] = breaker.admit(after[origin], str(row_id), now, limits)
            if is_admitted:
                admitted.add(row_id)
    if keep:
        _save(connection, before, after, now)
    return admitted


def count_sent(connection: Connection, origins: Iterable[str], now: datetime, limits: Limits) -> None:
    """An origin for each attempt that was sent."""
    numbers = Counter(origins)
    if numbers:
        first = {**{name: getattr(_FIRST, name) for name in _FIELDS}, "updated_at": now}
        adding = insert_into(connection, BREAKERS)
        adding = adding.on_conflict_do_nothing(index_elements=[BREAKERS.c.scope_id, BREAKERS.c.origin])
        scope = {"scope_id": scope_of(connection)}
        connection.execute(adding, [{"origin": origin, **first, **scope} for origin in sorted(numbers)])
    before = _locked(connection, numbers)
    after = {origin: breaker.sent(state, now, limits, numbers[origin]) for origin, state in before.items()}
    _save(connection, before, after, now)


def count_failed(connection: Connection, failures: Sequence[Failed], now: datetime, limits: Limits) -> None:
    before = _locked(connection, {each.origin for each in failures if each.origin is not None})
    after = dict(before)
    for each in failures:
        if each.origin in after:
            after[each.origin] = breaker.failed(after[each.origin], str(each.row_id), each.sent_at, now, limits)
    _save(connection, before, after, now)


def release_probes(connection: Connection, row_ids: Iterable[int], now: datetime) -> None:
    """These rows are sent no more, and their attempts neither failed nor succeeded: discarded, or left to a person."""
    _end_probes(connection, row_ids, now, breaker.released)


def count_succeeded(connection: Connection, row_ids: Collection[int], now: datetime) -> None:
    """These rows were resolved: a probe closes its breaker, and so does an attempt that was sent since it opened."""
    _end_probes(connection, row_ids, now, lambda state, probe: breaker.succeeded(state, probe, now))
    if not connection.scalar(select(exists().where(_ours(connection), BREAKERS.c.phase != Phase.CLOSED))):
        return
    sent = select(*(MESSAGES.c[name] for name in ("origin_queue", "origin_exchange", "origin_key")), ATTEMPTS.c.sent_at)
    sent = sent.join(MESSAGES, MESSAGES.c.id == ATTEMPTS.c.message_id)
    sent = sent.where(in_list(connection, ATTEMPTS.c.message_id, row_ids), ATTEMPTS.c.outcome == "succeeded")
    newest: dict[str, datetime] = {}
    for *origin, sent_at in connection.execute(sent.where(named_queue().is_(None), ATTEMPTS.c.sent_at.is_not(None))):
        name = place(*origin)
        if name is not None:
            newest[name] = max(newest.get(name, sent_at), sent_at)
    before = _locked(connection, newest)
    _save(connection, before, {name: breaker.proven(state, newest[name], now) for name, state in before.items()}, now)


def _end_probes(
    connection: Connection, row_ids: Iterable[int], now: datetime, ended: Callable[[Breaker, str], Breaker]
) -> None:
    """The breakers whose probe is one of these rows."""
    names = [str(row_id) for row_id in row_ids]
    if names:
        probed = (_ours(connection), BREAKERS.c.probe.in_(names))
        origins = connection.scalars(select(BREAKERS.c.origin).where(*probed)).all()
        before = {origin: state for origin, state in _locked(connection, origins).items() if state.probe in names}
        _save(connection, before, {origin: ended(state, str(state.probe)) for origin, state in before.items()}, now)


def _locked(connection: Connection, origins: Iterable[str]) -> dict[str, Breaker]:
    names = list(origins)
    if not names:
        return {}
    query = _states_of(connection, names).order_by(BREAKERS.c.origin)
    return _by_origin(connection, query.with_for_update())


def _ours(connection: Connection) -> ColumnElement[bool]:
    return own(connection, BREAKERS.c.scope_id)


def _states_of(connection: Connection, origins: Sequence[str]) -> Select[Any]:
    return _STATES.where(_ours(connection), BREAKERS.c.origin.in_(origins))


def _by_origin(connection: Connection, query: Select[Any]) -> dict[str, Breaker]:
    return {origin: Breaker(*state) for origin, *state in connection.execute(query)}


def _save(connection: Connection, before: Mapping[str, Breaker], after: Mapping[str, Breaker], now: datetime) -> None:
    changed = [
        {"_origin": origin, "updated_at": now, **{name: getattr(state, name) for name in _FIELDS}}
        for origin, state in after.items()
        if state != before[origin]
    ]
    if changed:
        saving = update(BREAKERS).where(_ours(connection), BREAKERS.c.origin == bindparam("_origin"))
        connection.execute(saving.values({name: bindparam(name) for name in ("updated_at", *_FIELDS)}), changed)
