"""The messages of a plan while it is applied: they are reserved, taken, and marked as sent or given back.

Locks are taken in one order: the plan, then messages by id, then attempts, then items. The attempt of an item is
committed before its publish, and marked as sent before the item is. So a message that the broker confirmed is found to
be sent, whenever the apply is killed.

A row is written as seldom as possible, since each write changes all its indexes: when it is reserved, and when it is
taken. Its lease counts for nothing once its attempt is sent; lease and reservation end with its outcome.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Engine, Row, exists, func, select, text, update

from dlqbatch.lifecycle import attempts, leases
from dlqbatch.lifecycle import breaker_rows as breakers
from dlqbatch.lifecycle.attempts import Outgoing
from dlqbatch.lifecycle.breaker import Limits
from dlqbatch.lifecycle.ended_replays import return_to_plan
from dlqbatch.replay.canary_and_rate import Outcomes
from dlqbatch.replay.order import HeldKey, held_keys, next_in_order
from dlqbatch.replay.plan import RESERVED_TO
from dlqbatch.replay.plan_status import PAUSED, RATE, held_rows, outcomes_of
from dlqbatch.replay.skip_or_send import (
    current_rows,
    is_held,
    mark_items_sent,
    move_items,
    reason_to_skip,
    skip_items,
    waiting_items,
)
from dlqbatch.store import journal
from dlqbatch.store.bulk import in_list
from dlqbatch.store.engine import keeping, reading, writing
from dlqbatch.store.holds import on_hold
from dlqbatch.store.journal import RowMove
from dlqbatch.store.reservation import Items, begun, items_of_rows, places_of
from dlqbatch.store.states import Status
from dlqbatch.store.tables import ATTEMPTS, IS_OPEN, MESSAGES, PLAN_ITEMS, PLANS

# The lease of an apply is far shorter than that of the lifecycle: whoever applies a plan again waits for its end.
LEASE: Final = timedelta(seconds=60)
_AT_ONCE: Final = 1_000  # rows of one transaction
_M: Final = MESSAGES.c
_I: Final = PLAN_ITEMS.c
_P: Final = PLANS.c


@dataclass(frozen=True, slots=True)
class Taken:
    """The rows that one call of `take` has taken."""

    state: str
    """The state of the plan: rows are taken only while it is `applying`."""
    sizes: Mapping[int, int] = field(default_factory=dict)
    """Sizes of the bodies of the taken rows by row id, in the plan's order."""
    numbers: Mapping[int, int] = field(default_factory=dict)
    """Their committed attempts: these rows may be published."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    is_over: bool = False
    """Nothing more may be taken now."""


@dataclass(frozen=True, slots=True)
class Control:
    """What an apply reads of its plan before it publishes."""

    state: str
    is_paused: bool = False
    """A person has paused it."""
    per_second: float | None = None
    why: str | None = None
    """Why it is stopped or paused."""


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
        limits: Limits = attempts.LIMITS,
        is_in_order: bool = False,
    ) -> None:
        """`limits` are those of the circuit breakers."""
        self.engine = engine
        self.plan_id = plan_id
        self._actor = actor
        self._worker = worker
        self._lease = lease
        self._reason = reason
        self._to_queue = to_queue
        self._counted_from = counted_from
        self._limits = limits
        self.is_in_order = is_in_order
        self._given_back: set[int] = set()
        """Messages of an in-order plan that could not be sent in this run."""
        self._place = 0
        self._tokens: dict[int, str] = {}
        self._origins: dict[int, str | None] = {}
        """The keys of the circuit breakers of these rows."""
        self._taken_over: set[int] = set()
        """Rows with an attempt of another apply, whose confirm may still come."""
        self.on_hold: set[int] = set()
        """The rows of the newest `outgoing` whose group is held: they are not published."""
        self._places: dict[int, int] = {}
        """The places in the plan of the rows that are under way."""

    def reserve(self, is_enough: Callable[[], bool] = lambda: False) -> dict[str, int]:
        """The lifecycle leaves the plan's rows alone from now on; what changed since the plan is skipped, by why.

        When it is enough for now it ends before all are reserved; whoever comes next, here or in another run, goes on.
        """
        skipped: Counter[str] = Counter()
        with keeping(self.engine):
            self._mark_sent_before()
            while not is_enough() and (why_not := self._reserve_some()) is not None:
                skipped.update(why_not.values())
        return dict(skipped)

    def _mark_sent_before(self) -> None:
        """What another apply began, and what was confirmed or came back before it could note that."""
        with writing(self.engine) as connection:
            connection.execute(select(_P.state).where(_P.id == self.plan_id).with_for_update())
            row_ids = begun(connection, self.plan_id)
            if row_ids:
                this = (_I.plan_id == self.plan_id, in_list(connection, _I.message_id, row_ids))
                items = connection.execute(select(_I.message_id, _I.place, _I.attempt).where(*this)).all()
                mark_items_sent(connection, self.plan_id, {item.message_id: item.place for item in items}, items)

    def unreserved(self) -> int:
        """Items that wait, and that nobody has reserved yet."""
        with reading(self.engine) as connection:
            progress = connection.scalar(select(_P.progress).where(_P.id == self.plan_id)) or {}
            behind = (_I.state == "waiting", _I.place > progress.get(RESERVED_TO, 0))
            query = select(func.count()).select_from(PLAN_ITEMS).where(_I.plan_id == self.plan_id, *behind)
            return int(connection.scalar(query) or 0)

    def _reserve_some(self) -> Mapping[int, str] | None:
        """Why some of these are skipped; None if there is nothing more to reserve."""
        with writing(self.engine) as connection:
            # Locked: what is taken meanwhile would be found as changed since the plan.
            plan = connection.execute(
                select(_P.state, _P.progress).where(_P.id == self.plan_id).with_for_update()
            ).one_or_none()
            if plan is None or plan.state != "applying":
                return None
            items = waiting_items(connection, self.plan_id, plan.progress.get(RESERVED_TO, 0), _AT_ONCE)
            if not items:
                return None
            progress = {**plan.progress, RESERVED_TO: items[-1].place}
            connection.execute(update(PLANS).where(_P.id == self.plan_id).values(progress=progress))
            places = {item.message_id: item.place for item in items}
            rows = current_rows(connection, list(places), locked=True)
            confirmed = mark_items_sent(connection, self.plan_id, places, items)
            skipped = {
                item.message_id: reason_to_skip(item, rows.get(item.message_id), self.plan_id, self._to_queue)
                for item in items
                if item.message_id not in confirmed
            }
            skipped = {row_id: why for row_id, why in skipped.items() if why}
            free = {row_id for row_id, row in rows.items() if row.plan_id is None}
            mine = free - skipped.keys() - confirmed
            connection.execute(update(MESSAGES).where(in_list(connection, _M.id, mine)).values(plan_id=self.plan_id))
            skip_items(connection, self.plan_id, places, skipped)
        return skipped

    def take(self, limit: int, ceiling: int | None, now: datetime) -> Taken:
        """At most so many more rows, with a lease; `ceiling` bounds how many of the plan may be sent in total.

        When no item waits any more, rows of a killed apply whose leases have ended are taken over.
        """
        with writing(self.engine) as connection:
            # Locked: of two applies at once only one may use up what a canary step allows.
            state = str(connection.scalar(select(_P.state).where(_P.id == self.plan_id).with_for_update()))
            if state != "applying":
                return Taken(state, is_over=True)
            wanted = left = limit
            if ceiling is not None:
                room = ceiling - outcomes_of(connection, self.plan_id, self._counted_from).sent
                wanted = min(limit, room - held_rows(connection, self.plan_id)[0])
                left = min(limit, room - held_rows(connection, self.plan_id, now)[0])
            items = self._next_items(connection, wanted) if wanted > 0 else []
            self._places.update({item.message_id: item.place for item in items})
            taken = self._take(connection, items, now) if items else Taken(state, is_over=True)
        if items:
            self._place = items[-1].place
        elif left > 0 and (sizes := self._take_over(left, now)):
            return Taken(state, sizes, self.begin(sizes, now))
        return taken

    def _next_items(self, connection: Connection, wanted: int) -> Sequence[Row[*tuple[Any, ...]]]:
        if self.is_in_order:
            return next_in_order(connection, self.plan_id, wanted, self._given_back)
        return waiting_items(connection, self.plan_id, self._place, wanted)

    def held_keys(self) -> tuple[list[HeldKey], int]:
        """The keys that only a person can let go on, and how many messages under way other keys wait for."""
        with reading(self.engine) as connection:
            return held_keys(connection, self.plan_id)

    def _take_over(self, limit: int, now: datetime) -> dict[int, int]:
        """Rows of an apply whose lease has ended, and the sizes of their bodies; they keep their attempts."""
        found = leases.take_over(
            self.engine, self._worker, now, limit, self._lease, plan_id=self.plan_id, actor=self._actor
        )
        self._tokens.update({row.row_id: row.token for row in found})
        self._origins.update({row.row_id: self._to_queue or row.origin for row in found})
        self._taken_over.update(row.row_id for row in found if row.has_attempt)
        if found:
            with reading(self.engine) as connection:
                self._places |= places_of(connection, self.plan_id, [row.row_id for row in found])
        return {row.row_id: row.body_size for row in found}

    def _take(self, connection: Connection, items: Sequence[Row[*tuple[Any, ...]]], now: datetime) -> Taken:
        rows = current_rows(connection, [item.message_id for item in items], locked=True)
        confirmed = mark_items_sent(connection, self.plan_id, self._places, items)
        why_not: dict[int, str] = {}
        moves: list[RowMove] = []
        token = secrets.token_hex(16)
        lock = {
            "lock_owner": self._worker,
            "lock_token": token,
            "locked_at": now,
            "lease_until": now + self._lease,
            "plan_id": self.plan_id,
        }
        for item in items:
            row = rows.get(item.message_id)
            if item.message_id in confirmed or (row is not None and is_held(row, self.plan_id)):
                continue
            why = reason_to_skip(item, rows.get(item.message_id), self.plan_id, self._to_queue)
            if why:
                why_not[item.message_id] = why
            else:
                moves.append(RowMove(item.message_id, item.seen_status, Status.PROCESSING, None, self._reason, lock))
        journal.move_locked(connection, moves, now, self._actor)
        skip_items(connection, self.plan_id, self._places, why_not)
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
        """Renew the leases of these rows, and commit their attempts; the numbers of the attempts by row id.

        Rows that another apply has taken over meanwhile, or that are confirmed, are left out.
        """
        tokens = {row_id: self._tokens[row_id] for row_id in row_ids if row_id in self._tokens}
        with writing(self.engine) as connection:
            numbers = attempts.begin(connection, tokens, dict.fromkeys(tokens), self._worker, now, self._lease)
            self._mark_begun(connection, numbers)
        for row_id in tokens.keys() - numbers.keys():
            # Its place stays, since its confirm may still come; the other thread may have dropped the token.
            if self._tokens.get(row_id) == tokens[row_id]:
                self._tokens.pop(row_id, None)
        return numbers

    def outgoing(self, numbers: Mapping[int, int]) -> list[Outgoing] | None:
        """The rows with their bytes; None if the plan is no longer being applied."""
        with reading(self.engine) as connection:
            is_applied = exists().where(_P.id == self.plan_id, _P.state == "applying")
            found = attempts.content_of(connection, numbers, self._to_queue, is_applied)
            self.on_hold = on_hold(connection, list(numbers))
        return found if len(found) == len(numbers) or self.is_applied() else None

    def is_applied(self) -> bool:
        """Nobody has aborted, stopped or paused the plan."""
        return self.control().state == "applying"

    def control(self) -> Control:
        """What people want of the plan now."""
        with reading(self.engine) as connection:
            plan = connection.execute(select(_P.state, _P.progress).where(_P.id == self.plan_id)).one_or_none()
        if plan is None:
            return Control("aborted")
        progress = plan.progress or {}
        return Control(plan.state, PAUSED in progress, progress.get(RATE), progress.get("stopped_why"))

    def sent(self, numbers: Mapping[int, int], now: datetime) -> None:
        """The broker has confirmed these attempts, by row id."""
        with writing(self.engine) as connection:
            # Rows before attempts, in the order of their ids, as everywhere: that avoids deadlocks.
            attempts.lock(connection, numbers)
            marked = [self._origins.get(row.message_id) for row in attempts.confirm(connection, numbers, now)]
            for number, alike in self._by_number(connection, numbers):
                connection.execute(move_items("sent", (*alike, _I.attempt == number)))
            origins = (origin for origin in marked if origin is not None)
            if self._to_queue is not None:
                # It goes there from now on, whoever sends it again.
                place = {"origin_queue": self._to_queue, "origin_exchange": None, "moved_to": self._to_queue}
                moved = (in_list(connection, _M.id, numbers), _M.origin_queue.is_distinct_from(self._to_queue))
                connection.execute(update(MESSAGES).where(*moved).values(place))
            breakers.count_sent(connection, origins, now, self._limits)
        self._forget(numbers)

    def give_back(self, row_ids: Mapping[int, str], now: datetime, *, to_person: bool = False) -> None:
        """Rows that were not sent, by reason, become what they were and wait in the plan again.

        A row that was taken over keeps its lease, since the confirm of the first publish may still come. With
        `to_person` the rows are manual, and skipped by the plan: no later try would send them.
        """
        self._given_back.update(row_ids)
        if not to_person:
            self._back({row_id: why for row_id, why in row_ids.items() if row_id not in self._taken_over}, now, {})
        else:
            moved = self._back(row_ids, now, {"next_retry_at": None, "plan_id": None}, Status.MANUAL)
            with writing(self.engine) as connection:
                why_not = {row_id: why for row_id, why in row_ids.items() if row_id in moved}
                skip_items(connection, self.plan_id, self._places, why_not)
                breakers.release_probes(connection, moved, now)
        self._forget(row_ids)

    def from_the_beginning(self) -> None:
        """Look again at items that were taken and given back, as after a pause."""
        self._place = 0
        self._given_back.clear()

    def outcomes(self) -> Outcomes:
        with reading(self.engine) as connection:
            return outcomes_of(connection, self.plan_id, self._counted_from)

    def _back(
        self, row_ids: Mapping[int, str], now: datetime, columns: Mapping[str, object], to: Status | None = None
    ) -> set[int]:
        tokens = {row_id: self._tokens[row_id] for row_id in row_ids if row_id in self._tokens}
        if not tokens:
            return set()
        with writing(self.engine) as connection:
            return return_to_plan(
                connection, self.plan_id, self._places, tokens, row_ids, now, self._actor, columns, to
            )

    def _items(self, connection: Connection, row_ids: Collection[int]) -> Items:
        return items_of_rows(self.plan_id, self._places, row_ids, connection)

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

    def _mark_begun(self, connection: Connection, numbers: Mapping[int, int]) -> None:
        for number, alike in self._by_number(connection, numbers):
            is_new = _I.attempt.is_distinct_from(number)
            connection.execute(update(PLAN_ITEMS).where(*alike, is_new).values(attempt=number))

    def _mark_confirmed_late(self, connection: Connection, row_ids: Collection[int]) -> None:
        """The plan has sent these rows by an attempt that was abandoned, and confirmed afterwards."""
        if row_ids:
            number = select(ATTEMPTS.c.number).where(ATTEMPTS.c.message_id == _I.message_id, text(IS_OPEN))
            late = move_items("sent", self._items(connection, row_ids))
            connection.execute(late.values(attempt=number.scalar_subquery()))
