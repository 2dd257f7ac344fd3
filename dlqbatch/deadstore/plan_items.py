"""A plan on its way: rows are reserved, taken, marked or given back, and let go.

Locks are taken in one order: the plan, then messages by id, then attempts, then items. An item's attempt is written
down before its publish and the attempt is marked sent before the item is; so whatever comes in between, what the broker
confirmed is found to be sent.

A row is written as seldom as can be, for each time all its indexes are: when it is reserved, and when it is taken. Its
lease counts for nothing once its attempt is sent; lease and reservation go when it comes to rest.
"""

from __future__ import annotations

import secrets
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import select, text, update

from dlqbatch.deadstore import attempts, breakers, claim, states
from dlqbatch.deadstore.engine import keeping, reading, writing
from dlqbatch.deadstore.given import among
from dlqbatch.deadstore.plan_rows import as_they_are, is_held, mark_known, skip, these, waiting, why_not
from dlqbatch.deadstore.plan_status import held_rows, outcomes_of
from dlqbatch.deadstore.states import RowMove
from dlqbatch.deadstore.tables import ATTEMPTS, IS_OPEN, MESSAGES, PLAN_ITEMS, PLANS
from dlqbatch.policy.lifecycle import Status

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime, timedelta

    from sqlalchemy import ColumnElement, Connection, Engine, Row

    from dlqbatch.deadstore.attempts import Outgoing
    from dlqbatch.deadstore.engine import Kept
    from dlqbatch.deadstore.plan_rows import Items, Rows
    from dlqbatch.policy.replay import Outcomes

_AT_ONCE: Final = 1_000
"""Rows of one transaction."""
_M: Final = MESSAGES.c
_I: Final = PLAN_ITEMS.c
_P: Final = PLANS.c


@dataclass(frozen=True, slots=True)
class Taken:
    """What one look at the plan's next items brought."""

    state: str
    """The plan's: only while it is `applying` anything is taken."""
    sizes: Mapping[int, int] = field(default_factory=dict)
    """Sizes of the bodies by row id, in the plan's order: rows that are this apply's now."""
    numbers: Mapping[int, int] = field(default_factory=dict)
    """Their attempts, written down: these rows may be published."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    is_over: bool = False
    """There is nothing more that may be taken now."""


class PlanItems:
    """One apply of one plan; it remembers which rows it holds, and how far it has looked.

    One thread may reserve and one may take, while another sends what was taken: each has a connection of its own.
    """

    def __init__(
        self,
        engine: Engine,
        plan_id: int,
        *,
        actor: str,
        worker: str,
        lease: timedelta,
        reason: str,
        to_queue: str | None = None,
        counted_from: datetime | None = None,
    ) -> None:
        self._engine = engine
        self._store: Engine | Kept = engine
        self._taking: Engine | Kept = engine
        self._plan_id = plan_id
        self._actor = actor
        self._worker = worker
        self._lease = lease
        self._reason = reason
        self._to_queue = to_queue
        self._counted_from = counted_from
        self._place = 0
        self._tokens: dict[int, str] = {}
        self._origins: dict[int, str | None] = {}
        """What the circuit breakers of these rows are kept under."""
        self._taken_over: set[int] = set()
        """Rows with an attempt of another apply, whose confirm may still come."""
        self._places: dict[int, int] = {}
        """Where in the plan the rows are that are being looked at, or are under way."""

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Inside, connections are kept; not for longer than one is sure to survive doing nothing."""
        with keeping(self._engine) as kept, keeping(self._engine) as taking:
            self._store, self._taking = kept, taking
            try:
                yield
            finally:
                self._store = self._taking = self._engine

    def reserve(self) -> dict[str, int]:
        """The lifecycle leaves the plan's rows alone from now on; what changed since the plan is skipped, by why."""
        skipped: Counter[str] = Counter()
        place = 0
        with keeping(self._engine) as store:
            while (reserved := self._reserve_after(store, place)) is not None:
                place, why_not = reserved
                skipped.update(why_not.values())
        return dict(skipped)

    def _reserve_after(self, store: Kept, place: int) -> tuple[int, Mapping[int, str]] | None:
        """The last place of these, and why some are skipped."""
        with writing(store) as connection:
            # Locked: what is taken meanwhile would be found as changed since the plan.
            state = connection.scalar(select(_P.state).where(_P.id == self._plan_id).with_for_update())
            items = waiting(connection, self._plan_id, place, _AT_ONCE)
            if state != "applying" or not items:
                return None
            places = {item.message_id: item.place for item in items}
            rows = as_they_are(connection, list(places), locked=True)
            confirmed = mark_known(connection, self._plan_id, places, items)
            why_not = {
                item.message_id: why
                for item in items
                if item.message_id not in confirmed and (why := self._why_not(item, rows))
            }
            free = {row_id for row_id, row in rows.items() if row.plan_id is None}
            mine = free - why_not.keys() - confirmed
            connection.execute(update(MESSAGES).where(among(connection, _M.id, mine)).values(plan_id=self._plan_id))
            skip(connection, self._plan_id, places, why_not)
        return items[-1].place, why_not

    def take(self, limit: int, ceiling: int | None, now: datetime) -> Taken:
        """At most so many more rows, with a lease; `ceiling` bounds how many of the plan may be out in total.

        When nothing waits any more, what an apply that was cut has left behind.
        """
        with writing(self._taking) as connection:
            # Locked: of two applies at once only one may use up what a canary step allows.
            state = str(connection.scalar(select(_P.state).where(_P.id == self._plan_id).with_for_update()))
            if state != "applying":
                return Taken(state, is_over=True)
            wanted = left = limit
            if ceiling is not None:
                room = ceiling - outcomes_of(connection, self._plan_id, self._counted_from).sent
                wanted = min(limit, room - held_rows(connection, self._plan_id)[0])
                left = min(limit, room - held_rows(connection, self._plan_id, now)[0])
            items = self._waiting(connection, self._place, wanted) if wanted > 0 else []
            taken = self._take(connection, items, now) if items else Taken(state, is_over=True)
        if items:
            self._place = items[-1].place
        elif left > 0 and (sizes := self._take_over(left, now)):
            return Taken(state, sizes, self._begin(self._taking, sizes, now))
        return taken

    def return_expired(self, now: datetime) -> None:
        """Give back what an apply that was cut has left behind, as soon as its leases are over."""
        while left_behind := self._take_over(_AT_ONCE, now):
            self._back(dict.fromkeys(left_behind, "the apply was cut, and its plan is over"), now, {})
            self._forget(left_behind)

    def _take_over(self, limit: int, now: datetime) -> dict[int, int]:
        """Rows of an apply whose lease ran out, and the sizes of their bodies; their attempts go on."""
        found = claim.take_over(
            self._taking, self._worker, now, limit, self._lease, plan_id=self._plan_id, actor=self._actor
        )
        self._tokens.update({row.row_id: row.token for row in found})
        self._origins.update({row.row_id: self._to_queue or row.origin for row in found})
        self._taken_over.update(row.row_id for row in found if row.has_attempt)
        if found:
            self._look_up_places([row.row_id for row in found])
        return {row.row_id: row.body_size for row in found}

    def _look_up_places(self, row_ids: Sequence[int]) -> None:
        with reading(self._taking) as connection:
            this = (_I.plan_id == self._plan_id, among(connection, _I.message_id, row_ids))
            for item in connection.execute(select(_I.message_id, _I.place).where(*this)):
                self._places[item.message_id] = item.place

    def _take(self, connection: Connection, items: Sequence[Row[*tuple[Any, ...]]], now: datetime) -> Taken:
        rows = as_they_are(connection, [item.message_id for item in items], locked=True)
        confirmed = mark_known(connection, self._plan_id, self._places, items)
        why_not: dict[int, str] = {}
        moves: list[RowMove] = []
        token = secrets.token_hex(16)
        lock = {
            "lock_owner": self._worker,
            "lock_token": token,
            "locked_at": now,
            "lease_until": now + self._lease,
            "plan_id": self._plan_id,
        }
        for item in items:
            row = rows.get(item.message_id)
            if item.message_id in confirmed or (row is not None and is_held(row, self._plan_id)):
                continue
            why = self._why_not(item, rows)
            if why:
                why_not[item.message_id] = why
            else:
                moves.append(RowMove(item.message_id, item.seen_status, Status.PROCESSING, None, self._reason, lock))
        states.move_locked(connection, moves, now, self._actor)
        skip(connection, self._plan_id, self._places, why_not)
        ids = [move.row_id for move in moves]
        numbers = attempts.begin_locked(connection, ids, dict.fromkeys(ids), self._worker, now)
        self._mark_begun(connection, numbers)
        self._mark_confirmed_late(connection, set(ids) - numbers.keys())
        self._tokens.update(dict.fromkeys(numbers, token))
        found = {row_id: rows[row_id] for row_id in numbers}
        self._origins.update(
            {
                each.id: self._to_queue or breakers.place(each.origin_queue, each.origin_exchange, each.origin_key)
                for each in found.values()
            }
        )
        sizes = {row_id: rows[row_id].body_size for row_id in numbers}
        return Taken("applying", sizes, numbers, dict(Counter(why_not.values())))

    def begin(self, row_ids: Iterable[int], now: datetime) -> dict[int, int]:
        """Attempt numbers by row id, written down, with a lease that starts anew: they are this apply's still.

        Left out is what another apply has taken over meanwhile, or what is confirmed.
        """
        return self._begin(self._store, row_ids, now)

    def _begin(self, store: Engine | Kept, row_ids: Iterable[int], now: datetime) -> dict[int, int]:
        tokens = {row_id: self._tokens[row_id] for row_id in row_ids if row_id in self._tokens}
        with writing(store) as connection:
            numbers = attempts.begin(connection, tokens, dict.fromkeys(tokens), self._worker, now, self._lease)
            self._mark_begun(connection, numbers)
        for row_id in tokens.keys() - numbers.keys():
            del self._tokens[row_id]  # its confirm may still come, for its place in the plan
        return numbers

    def outgoing(self, numbers: Mapping[int, int]) -> list[Outgoing]:
        return attempts.outgoing(self._store, numbers, self._to_queue)

    def sent(self, numbers: Mapping[int, int], now: datetime) -> None:
        """The broker has confirmed these attempts, by row id."""
        with writing(self._store) as connection:
            marked = [self._origins.get(row.message_id) for row in attempts.confirm(connection, numbers, now)]
            for number, alike in self._by_number(connection, numbers):
                sent = (*alike, _I.attempt == number, _I.state == "waiting")
                connection.execute(update(PLAN_ITEMS).where(*sent).values(state="sent"))
            origins = (origin for origin in marked if origin is not None)
            breakers.count_sent(connection, origins, now, attempts.LIMITS)
        self._forget(numbers)

    def give_back(self, row_ids: Mapping[int, str], now: datetime, *, to_person: bool = False) -> None:
        """Rows by why they were not sent: they become what they were, and wait in the plan as before.

        What was taken over stays as it is until its lease is over, for the first to publish it may still be heard of.
        To a person goes what no later try would send: it is manual then, and the plan is done with it.
        """
        if not to_person:
            self._back({row_id: why for row_id, why in row_ids.items() if row_id not in self._taken_over}, now, {})
        else:
            moved = self._back(row_ids, now, {"next_retry_at": None, "plan_id": None}, Status.MANUAL)
            with writing(self._store) as connection:
                why_not = {row_id: why for row_id, why in row_ids.items() if row_id in moved}
                skip(connection, self._plan_id, self._places, why_not)
        self._forget(row_ids)

    def held(self) -> tuple[int, datetime | None]:
        """Rows that some apply holds, and when the last lease ends."""
        with reading(self._store) as connection:
            return held_rows(connection, self._plan_id)

    def outcomes(self) -> Outcomes:
        with reading(self._store) as connection:
            return outcomes_of(connection, self._plan_id, self._counted_from)

    def _back(
        self, row_ids: Mapping[int, str], now: datetime, columns: Mapping[str, object], to: Status | None = None
    ) -> set[int]:
        tokens = {row_id: self._tokens[row_id] for row_id in row_ids if row_id in self._tokens}
        if not tokens:
            return set()
        with writing(self._store) as connection:
            unsent = attempts.abandon_unsent(connection, tokens, now)
            these = self._items(connection, unsent)
            before = connection.execute(select(_I.message_id, _I.seen_status).where(*these)).all()
            moves = [
                RowMove(row_id, Status.PROCESSING, to or seen, tokens[row_id], row_ids[row_id], columns)
                for row_id, seen in before
            ]
            moved = states.move_many(connection, moves, now, self._actor)
            # As they are now is how the plan knows them from here on.
            back = update(PLAN_ITEMS).where(*self._items(connection, moved))
            connection.execute(back.values(seen_updated_at=now, attempt=None))
        return moved

    def _waiting(self, connection: Connection, after: int, limit: int) -> Sequence[Row[*tuple[Any, ...]]]:
        found = waiting(connection, self._plan_id, after, limit)
        self._places.update({item.message_id: item.place for item in found})
        return found

    def _items(self, connection: Connection, row_ids: Collection[int]) -> Items:
        return these(self._plan_id, self._places, row_ids, connection)

    def _by_number(
        self, connection: Connection, numbers: Mapping[int, int]
    ) -> Iterator[tuple[int, tuple[ColumnElement[bool], ...]]]:
        for number in set(numbers.values()):
            yield number, self._items(connection, [row_id for row_id in numbers if numbers[row_id] == number])

    def _forget(self, row_ids: Iterable[int]) -> None:
        for row_id in row_ids:
            self._tokens.pop(row_id, None)
            self._places.pop(row_id, None)
            self._origins.pop(row_id, None)
            self._taken_over.discard(row_id)

    def _why_not(self, item: Row[*tuple[Any, ...]], rows: Rows) -> str:
        return why_not(item, rows.get(item.message_id), self._plan_id, self._to_queue)

    def _mark_begun(self, connection: Connection, numbers: Mapping[int, int]) -> None:
        for number, alike in self._by_number(connection, numbers):
            is_new = _I.attempt.is_distinct_from(number)
            connection.execute(update(PLAN_ITEMS).where(*alike, is_new).values(attempt=number))

    def _mark_confirmed_late(self, connection: Connection, row_ids: Collection[int]) -> None:
        """An attempt that was given up, and confirmed after that, is what the plan has sent of them."""
        if row_ids:
            number = select(ATTEMPTS.c.number).where(ATTEMPTS.c.message_id == _I.message_id, text(IS_OPEN))
            late = update(PLAN_ITEMS).where(*self._items(connection, row_ids))
            connection.execute(late.values(state="sent", attempt=number.scalar_subquery()))
