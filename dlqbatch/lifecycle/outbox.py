"""Rows of the dead store on their way to the broker: each is marked as sent, or given back.

`Outbox` is for lifecycle and replay: it writes what became of each row. `Sending` claims the rows of a lifecycle run;
`DryRun` shows what a run would do. The rows of a replay are in `dlqbatch.replay.batches`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import islice
from typing import ClassVar, Final

from sqlalchemy import Engine
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, stop_after_delay, stop_any, wait_exponential

from dlqbatch.amqp.delivery import STOPPED, Delivery, Hold, Instruction, Offer, Publish
from dlqbatch.errors import DlqbatchError, so_far
from dlqbatch.jobs import LEFT
from dlqbatch.lifecycle import attempts, breaker, leases
from dlqbatch.lifecycle import breaker_rows as breakers
from dlqbatch.lifecycle.put_off import PutOff, by_origin
from dlqbatch.lifecycle.resend import NEEDS_A_PERSON, NOBODY_KNOWS, SENT, Resend
from dlqbatch.lifecycle.strategy import MANUAL, Back, Choice, Claimed
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.states import Status, Strategy

NOT_REACHED: Final = "not-reached"
TAKEN_OVER: Final = "taken-over"
NOT_NOTED: Final = "not-noted"
REFUSED: Final = "publish-refused"
NOT_SENT: Final = "not-sent"
# Rows that are left for these reasons do not make a run partial.
HARMLESS: Final = frozenset({NOT_REACHED, TAKEN_OVER})

_NOT_REACHED: Final = "not reached by this run"
_AT_ONCE: Final = 256  # rows of one transaction
_BYTES_AT_ONCE: Final = 8 * 1024 * 1024
_TRIES: Final = 4
_SHOWN: Final = 100  # rows of a dry run's preview
_LOOKED_AT: Final = 1000  # rows that a dry run decides about


def fitting(sizes: Iterable[int], most: int) -> int:
    """How many of these bodies are fetched at once: the first one always, the others as memory allows."""
    number = total = 0
    for size in islice(sizes, most):
        total += size
        if number and total > _BYTES_AT_ONCE:
            break
        number += 1
    return number


class Outbox(ABC):
    """The source of one transfer: it writes what became of each row that it offered.

    Confirmed rows and rows to give back are collected, since each transaction costs the same. What was not marked when
    a run is killed is sent again; so it is never more than may be under way.
    """

    MARKED_AFTER: ClassVar[float]
    """Seconds that a confirm waits to be marked together with others."""
    TRIES_FOR: ClassVar[float]
    """Seconds, at the end of a run, after which a database that does not answer is not tried again."""

    def __init__(self, resend: Resend, clock: Callable[[], datetime]) -> None:
        self._resend = resend
        self._clock = clock
        self._confirmed: dict[int, int] = {}
        """Attempts that the broker has confirmed, by row id."""
        self._held: dict[int, tuple[int, str]] = {}
        """Attempts that were not published, by row id, and why."""
        self._waits_since = 0.0
        self._has_failed = False
        """The database failed: what has to be written waits for the end of the run."""

    @abstractmethod
    def _mark_sent(self, numbers: Mapping[int, int], now: datetime) -> None:
        """Mark these attempts as sent, in one transaction that may be repeated."""

    @abstractmethod
    def _give_back(self, rows: Mapping[int, tuple[int, str]], now: datetime) -> None:
        """Give these rows back, with their attempts and why; it may be repeated."""

    def _leave(self, row_id: int, reason: str) -> None:  # noqa: B027  (a replay has nothing to do then)
        """Write nothing: the broker may have this row."""

    def handle(self, delivery: Delivery) -> Instruction:
        return self._resend.handle(delivery)

    def confirmed(self, tag: int) -> None:
        row = self._answered(tag)
        if row is not None:
            self._confirmed[tag] = row.attempt

    def held(self, tag: int, reason: str | None) -> None:
        row = self._answered(tag)
        if row is not None and reason in NOBODY_KNOWS:
            # The lease stays. Whoever takes the row over sends it under the same attempt number, so that either copy
            # is recognised when it comes back.
            self._leave(tag, reason)
        elif row is not None:
            self._held[tag] = row.attempt, reason or NOT_SENT

    def _answered(self, tag: int) -> attempts.Outgoing | None:
        if not self._unwritten:
            self._waits_since = time.monotonic()
        return self._resend.answered(tag)

    @property
    def _unwritten(self) -> int:
        return len(self._confirmed) + len(self._held)

    def _free(self, room: int) -> int:
        """How many rows to offer now: many or none, since each round trip to the database costs the same."""
        if room < len(self._resend.unanswered):
            return 0
        if 2 * self._unwritten > room:
            self._note()
        return max(room - self._unwritten, 0)

    def flush(self) -> None:
        if self._unwritten >= _AT_ONCE or time.monotonic() - self._waits_since >= self.MARKED_AFTER:
            self._note()

    def _note(self) -> None:
        if self._unwritten and not self._has_failed:
            try:
                self._write_down()
            except DlqbatchError:
                self._has_failed = True
                raise

    def _write_down(self) -> None:
        """Write all that is collected; safe to repeat."""
        now = self._clock()
        while self._confirmed:
            numbers = dict(islice(self._confirmed.items(), _AT_ONCE))
            self._mark_sent(numbers, now)
            for row_id in numbers:
                del self._confirmed[row_id]
        while self._held:
            rows = dict(islice(self._held.items(), _AT_ONCE))
            self._give_back(rows, now)
            for row_id in rows:
                del self._held[row_id]

    def _write_the_rest(self) -> None:
        """Write with retries, at the end of the run: what is not marked is sent again."""
        Retrying(
            stop=stop_any(stop_after_attempt(_TRIES), stop_after_delay(self.TRIES_FOR)),
            wait=wait_exponential(multiplier=0.2, max=2),
            retry=retry_if_exception_type(DlqbatchError),
            reraise=True,
        )(self._write_down)


class Sending(Outbox):
    """The rows of a lifecycle run, taken over and claimed as there is room; `results` counts each of them."""

    MARKED_AFTER = 0.05
    # Each try on a database that does not answer takes the whole timeout of a statement.
    TRIES_FOR = 10.0

    def __init__(
        self,
        engine: Engine,
        choice: Choice,
        resend: Resend,
        clock: Callable[[], datetime],
        *,
        worker: str,
        lease: timedelta,
        limits: breaker.Limits,
        max_messages: int,
        max_attempts: int,
        stopped: Callable[[], bool],
    ) -> None:
        super().__init__(resend, clock)
        self.got = 0
        self.results: Counter[tuple[str, str | None]] = Counter()
        self.preview: list[dict[str, str]] = []
        self.is_empty = False
        """No more rows were due."""
        self._engine = engine
        self._choice = choice
        self._worker = worker
        self._lease = lease
        self._limits = limits
        self._max_messages = max_messages
        self._max_attempts = max_attempts
        self._stopped = stopped
        self._put_off = PutOff(choice, limits)
        self._takes_over = True
        self._mine: dict[int, Claimed] = {}
        """Rows that were taken and are not counted yet."""
        self._ready: deque[tuple[Claimed, Strategy | None]] = deque()

    def more(self, room: int) -> Sequence[Offer] | None:
        now = self._clock()
        if not self._ready and not self.is_empty and self.got < self._max_messages:
            self._take(now)
        if self._ready:
            return self._begin(number, now) if (number := self._free(room)) else ()
        return None if self.is_empty or self.got >= self._max_messages else ()

    def may_publish(self) -> bool:
        return not self._stopped()

    def _take(self, now: datetime) -> None:
        limit = min(self._max_messages - self.got, leases.LIMIT)
        rows: Sequence[Claimed] = ()
        if self._takes_over:
            rows = leases.take_over(self._engine, self._worker, now, limit, self._lease)
            self._takes_over = bool(rows)
        if not rows:
            before = self._put_off.counted.total()
            rows = leases.claim(self._engine, self._worker, now, limit, self._lease, hold_back=self._put_off)
            self.is_empty = not rows and self._put_off.counted.total() == before
        # Taken over from this run itself, after its own lease ended: it is under way, and was counted.
        known, self._mine = self._mine, self._mine | {row.row_id: row for row in rows}
        rows = [row for row in rows if row.row_id not in known]
        self.got += len(rows)
        send, back = self._choice.decide(rows, lambda those: admit(self._engine, those, now, self._limits), now)
        self._put_back(back, now)
        self._ready.extend((row, send[row.row_id]) for row in rows if row.row_id in send)

    def _begin(self, room: int, now: datetime) -> Sequence[Offer]:
        """Begin the attempts of the rows that are published next, and of no others; their leases start anew."""
        number = fitting((row.body_size for row, _ in self._ready), min(room, _AT_ONCE))
        rows = [self._ready.popleft() for _ in range(number)]
        tokens = {row.row_id: row.token for row, _ in rows}
        strategies = {row.row_id: strategy for row, strategy in rows}
        with writing(self._engine) as connection:
            numbers = attempts.begin(connection, tokens, strategies, self._worker, now, self._lease)
            begun = attempts.content_of(connection, {row_id: numbers[row_id] for row_id in tokens if row_id in numbers})
        for row_id in tokens.keys() - {row.row_id for row in begun}:
            self._account(row_id, LEFT, TAKEN_OVER)
        return self._resend.offers(begun)

    def _mark_sent(self, numbers: Mapping[int, int], now: datetime) -> None:
        attempts.mark_sent(self._engine, numbers, now, self._limits)
        for row_id in numbers:
            self._account(row_id, SENT, None)

    def _give_back(self, rows: Mapping[int, tuple[int, str]], now: datetime) -> None:
        self._put_back({each: self._back(self._mine[each], *why, now) for each, why in rows.items()}, now)

    def _back(self, row: Claimed, attempt: int, reason: str, now: datetime) -> tuple[Back, str, str]:
        if reason == STOPPED:
            return _as_it_was(row)
        never_sent = attempt - row.failed_attempts
        if reason in NEEDS_A_PERSON or (reason == REFUSED and never_sent >= self._max_attempts):
            # A body that the broker does not take would cost a channel in every run there will ever be.
            return Back(row.token, Status.MANUAL, f"could not be sent: {reason}"), MANUAL, reason
        return Back(row.token, Status.PENDING, f"was not sent: {reason}", self._choice.again(now)), LEFT, reason

    def _put_back(self, rows: Mapping[int, tuple[Back, str, str]], now: datetime) -> None:
        gone = leases.give_back(self._engine, {row_id: back for row_id, (back, *_) in rows.items()}, now)
        for row_id, (_, counts_as, reason) in rows.items():
            if row_id in gone:
                self._account(row_id, counts_as, reason)
            else:
                self._account(row_id, LEFT, TAKEN_OVER)

    def _leave(self, row_id: int, reason: str) -> None:
        self._account(row_id, LEFT, reason)

    def _account(self, row_id: int, counts_as: str, reason: str | None) -> None:
        del self._mine[row_id]
        self.results[counts_as, reason] += 1

    def finish(self) -> list[str]:
        """Write what is still unwritten; a row that cannot be written waits for its lease to end."""
        # They are no part of `max_messages`: others go in their place.
        self.got += self._put_off.counted.total()
        self.results.update(self._put_off.counted)
        for row_id in list(self._resend.unanswered):
            self.held(row_id, "connection-lost")
        try:
            self._write_the_rest()
            # Rows that were never offered go back, but not those with an attempt that another worker began.
            untouched = {row.row_id: _as_it_was(row) for row in self._mine.values() if not row.has_attempt}
            self._put_back(untouched, self._clock())
        except DlqbatchError as error:
            warnings = [f"the end of the run could not be written: {so_far(error)}"]
            if self._confirmed:
                warnings.append(
                    f"{len(self._confirmed)} sent message(s) could not be marked as sent: a later run sends them again "
                    "under the same attempt number when their lease has ended"
                )
            for row_id in list(self._confirmed):
                self._account(row_id, SENT, NOT_NOTED)
            for row_id in list(self._mine):
                self._account(row_id, LEFT, NOT_NOTED)
            return warnings
        for row_id in list(self._mine):
            self._account(row_id, LEFT, NOT_REACHED)
        return []


def _as_it_was(row: Claimed) -> tuple[Back, str, str]:
    return Back(row.token, Status.PENDING, _NOT_REACHED, row.next_retry_at), LEFT, NOT_REACHED


class DryRun:
    """The source of a dry run: the same rows and decisions, but nothing is claimed, sent or written."""

    def __init__(
        self,
        engine: Engine,
        choice: Choice,
        resend: Resend,
        clock: Callable[[], datetime],
        *,
        limits: breaker.Limits,
        max_messages: int,
    ) -> None:
        now = clock()
        self.results: Counter[tuple[str, str | None]] = Counter()
        self.preview: list[dict[str, str]] = []
        self._resend = resend
        self._engine = engine
        limit = min(max_messages, _LOOKED_AT)
        rows = leases.due(engine, limit, now)
        self.got = len(rows)
        self.is_empty = len(rows) < limit
        self._rows = {row.row_id: row for row in rows}
        # No breaker is asked to let a probe through.
        send, back = choice.decide(rows, lambda those: admit(engine, those, now, limits, keep=False), now)
        self._waiting = deque(row.row_id for row in rows if row.row_id in send)
        for row_id, (decided, counts_as, reason) in back.items():
            self.results[counts_as, reason] += 1
            self._show(row_id, counts_as, decided.reason)

    def handle(self, delivery: Delivery) -> Instruction:
        instruction = self._resend.handle(delivery)
        if not isinstance(instruction, Publish):
            return instruction
        origin = instruction.origin.name if instruction.origin is not None else ""
        self._show(delivery.tag, SENT, "", origin, instruction.route.exchange, instruction.route.key)
        return Hold(SENT)

    def more(self, room: int) -> Sequence[Offer] | None:
        if not self._waiting:
            return None
        page = [self._waiting.popleft() for _ in range(min(room, _AT_ONCE, len(self._waiting)))]
        with reading(self._engine) as connection:
            return self._resend.offers(attempts.without_bodies(connection, page))

    def may_publish(self) -> bool:
        return False

    def confirmed(self, tag: int) -> None:
        raise AssertionError(f"a dry run has sent {tag}")

    def held(self, tag: int, reason: str | None) -> None:
        if self._resend.answered(tag) is None:
            return
        counts_as = SENT if reason is None else MANUAL if reason in NEEDS_A_PERSON else LEFT
        self.results[counts_as, reason] += 1
        if reason is not None:
            self._show(tag, counts_as, reason)

    def flush(self) -> None:
        """There is nothing to write."""

    def finish(self) -> list[str]:
        # Deleted while this run looked, or not looked at before its end.
        if missing := self.got - self.results.total():
            self.results[LEFT, NOT_REACHED] += missing
        return []

    def _show(
        self, row_id: int, decision: str, reason: str, origin: str = "", exchange: str = "", key: str = ""
    ) -> None:
        if len(self.preview) < _SHOWN:
            row = self._rows[row_id]
            shown = {"queue": f"message {row_id}", "id": row.identity, "event": row.event or ""}
            shown |= {"origin": origin or row.origin or "", "decision": decision}
            self.preview.append(shown | {"exchange": exchange, "key": key, "reason": reason})


def admit(
    engine: Engine, rows: Iterable[Claimed], now: datetime, limits: breaker.Limits, *, keep: bool = True
) -> set[int]:
    """The ids of the rows that the circuit breakers of their origins let through; `keep` changes the breakers."""
    with (writing if keep else reading)(engine) as connection:
        return breakers.admit(connection, by_origin(rows), now, limits, keep=keep)
