"""The rows of a plan are taken in batches, published at the rate of the plan, and marked as confirms come.

While a batch is sent the next one is taken. Rows that are taken have a lease and a committed attempt before they are
offered.

A publish needs a permission: the database has answered a query, begun less than `PERMISSION` seconds ago, that the plan
is still being applied. An abort waits until no apply holds a row, or for longer than a permission lasts. So nothing of
the plan is published after the abort has returned, whatever the clocks say and however slow the database is.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Final

from dlqbatch.amqp.delivery import Offer
from dlqbatch.errors import DatabaseUnreadable
from dlqbatch.lifecycle.attempts import Outgoing
from dlqbatch.lifecycle.outbox import Outbox, fitting
from dlqbatch.lifecycle.resend import NEEDS_A_PERSON, Resend
from dlqbatch.replay.canary_and_rate import MAX_FAILURE_RATE, Pace, rate_of
from dlqbatch.replay.items import LEASE, PlanItems, Taken
from dlqbatch.store.holds import ON_HOLD

_FAILURES_ASKED_EVERY: Final = 2.0
_ASKING_TAKES_AT_MOST: Final = 1 / 20
"""The share of the time that counting may take: to count what came back of a million takes a second."""
PERMISSION: Final = 5.0
"""Seconds that a permission to publish lasts, from when the database is asked for it."""
_LOOKS_EVERY: Final = 0.5
"""Seconds between two looks whether the plan is still being applied, while nothing is offered."""
_NOT_SENT_YET: Final = "the apply ended before it was sent"


@dataclass(frozen=True, slots=True)
class ApplyOptions:
    """How a plan is applied; a rate that is none is refused."""

    batch_size: int = 100
    pause: float = 0.0
    """Seconds between two batches."""
    rate: str | None = None
    """At most so many, such as 50/s or 600/min."""
    canary: bool = True
    max_failure_rate: float = MAX_FAILURE_RATE
    wait: float = 0.0
    """Seconds that this run may wait at once for outcomes, for a person, or for what a cut apply still holds."""
    settle: bool = False
    """Run the drain and the ingest that prove the outcomes while it waits for them."""
    guard: bool = True
    """Watch the queues that are sent to, and stop when one says that the replay does harm."""
    resume_stopped: bool = False
    lease: float = LEASE.total_seconds()
    """Seconds that a row stays this apply's without being sent."""
    confirm_timeout: float = 60.0
    """Seconds without any confirm after which a run gives up."""

    def __post_init__(self) -> None:
        if self.rate is not None:
            rate_of(self.rate)

    @property
    def per_second(self) -> float | None:
        return rate_of(self.rate) if self.rate is not None else None


class Batches(Outbox):
    """The source of one transfer; `close` it when the transfer is over."""

    MARKED_AFTER = 0.1
    TRIES_FOR = math.inf

    def __init__(
        self,
        items: PlanItems,
        resend: Resend,
        pace: Pace,
        options: ApplyOptions,
        clock: Callable[[], datetime],
        ceiling: int | None,
        is_too_much: Callable[[], bool],
        executor: Executor,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(resend, clock)
        self.skipped: Counter[str] = Counter()
        self._items = items
        self._pace = pace
        self._options = options
        self._ceiling = ceiling
        self._is_too_much = is_too_much
        self._executor = executor
        self._stopped = stopped
        self._may_until = 0.0
        """When the permission to publish ends, on the monotonic clock."""
        self._looks_at = self._asks_at = time.monotonic()
        self._next: Future[Taken] | None = None
        """The batch that is being taken."""
        self._is_last = False
        """The plan has no further batch."""
        self._is_over = False
        """Nothing more may be offered."""
        self._queue: dict[int, tuple[int, int]] = {}
        """The attempts and body sizes of rows that wait to be offered, by row id in the plan's order."""
        self._has_begun = False
        self._renew_at = 0.0
        self._pause_until: float | None = None
        self._heard_at = time.monotonic()

    def more(self, room: int) -> Sequence[Offer] | None:
        if self._is_over:
            return None
        self._renew_in_time()
        if not (room := self._free(room)):
            return ()
        self._take_ahead()
        self._look_at_next(wait=not self._queue and not self._resend.unanswered)
        if self._has_ended:
            return None
        now = time.monotonic()
        sizes = (size for _, size in self._queue.values())
        number = fitting(sizes, self._pace.allowed(now, room))
        some = {row_id: self._queue.pop(row_id)[0] for row_id in list(islice(self._queue, number))}
        if not some:
            return ()
        self._pace.took(len(some))
        self._take_ahead()
        asked_at = time.monotonic()
        # `_take_ahead` counts what came back, which may end the run.
        rows = self._items.outgoing(some) if self._goes_on else None
        if rows is None:
            self._held |= {row_id: (attempt, _NOT_SENT_YET) for row_id, attempt in some.items()}
            self._end()
            return None
        self._permitted(asked_at)
        if held := self._items.on_hold:
            # It was held after it was taken; the next apply skips it.
            self._held |= {row.row_id: (row.attempt, ON_HOLD) for row in rows if row.row_id in held}
            rows = [row for row in rows if row.row_id not in held]
        if not self._resend.unanswered:
            self._heard_at = now
        return self._resend.offers(rows)

    def may_publish(self) -> bool:
        if self._stopped() or self._is_over:
            return False
        if time.monotonic() < self._may_until:
            return True
        # It is published later than it was offered: its origin was checked first, or it was returned as unroutable.
        try:
            self._look()
        except DatabaseUnreadable:
            return False
        return time.monotonic() < self._may_until

    def _look(self) -> None:
        asked_at = time.monotonic()
        control = self._items.control()
        self._pace.per_second = control.per_second
        if control.state == "applying":
            self._permitted(asked_at)
        else:
            self._end()

    @property
    def _goes_on(self) -> bool:
        return not self._is_over

    def _permitted(self, asked_at: float) -> None:
        self._may_until, self._looks_at = asked_at + PERMISSION, asked_at + _LOOKS_EVERY

    def _end(self) -> None:
        """Nothing more of the plan is published, and the rows that wait here are given back at once."""
        self._is_over, self._may_until = True, 0.0
        self._hold_the_queue()
        self._note()

    def _hold_the_queue(self) -> None:
        self._held |= {row_id: (attempt, _NOT_SENT_YET) for row_id, (attempt, _) in self._queue.items()}
        self._queue = {}

    @property
    def _has_ended(self) -> bool:
        return self._is_over or (self._is_last and not self._queue)

    def is_stuck(self) -> bool:
        """Whether the broker has confirmed nothing for too long, though its connection lives."""
        return bool(self._resend.unanswered) and time.monotonic() - self._heard_at > self._options.confirm_timeout

    def flush(self) -> None:
        self._look_at_next(wait=False)
        if time.monotonic() >= self._looks_at and not self._is_over:
            self._look()
        self._renew_in_time()
        super().flush()

    def close(self) -> None:
        """Write what became of every row that was taken, with retries: what is not written is sent again."""
        with suppress(DatabaseUnreadable):  # taken or not, their leases end
            self._look_at_next(wait=True)
        self._hold_the_queue()
        self._write_the_rest()

    def _answered(self, tag: int) -> Outgoing | None:
        self._heard_at = time.monotonic()
        return super()._answered(tag)

    def _mark_sent(self, numbers: Mapping[int, int], now: datetime) -> None:
        self._items.sent(numbers, now)

    def _give_back(self, rows: Mapping[int, tuple[int, str]], now: datetime) -> None:
        for to_person in (True, False):
            these = {row_id: why for row_id, (_, why) in rows.items() if (why in NEEDS_A_PERSON) is to_person}
            if these:
                self._items.give_back(these, now, to_person=to_person)

    def _take_ahead(self) -> None:
        """Begin to take the next batch when the one before is on its way."""
        if self._next is not None or self._is_over or self._is_last or not self._is_time():
            return
        now = time.monotonic()
        if now >= self._asks_at:
            self._is_over = self._is_too_much()
            seconds = time.monotonic() - now
            self._asks_at = now + max(_FAILURES_ASKED_EVERY, seconds / _ASKING_TAKES_AT_MOST)
            if self._is_over:
                return
        self._next = self._executor.submit(self._items.take, self._batch_size(), self._ceiling, self._clock())

    def _look_at_next(self, *, wait: bool) -> None:
        """Add the batch that was taken meanwhile to the queue, where its leases are renewed."""
        if self._next is None or not (wait or self._next.done()):
            return
        future, self._next = self._next, None
        taken = future.result()
        self.skipped.update(taken.skipped)
        self._is_last = taken.is_over
        if taken.state != "applying" and not self._is_over:
            self._end()
        # Taken over from this apply itself, after its own lease ended: it waits here, is under way, or was answered.
        known = self._queue.keys() | self._resend.unanswered.keys() | self._confirmed.keys() | self._held.keys()
        found = {
            row_id: (taken.numbers[row_id], size)
            for row_id, size in taken.sizes.items()
            if row_id in taken.numbers and row_id not in known
        }
        if not found:
            return
        if not self._resend.unanswered and not self._queue:
            self._renew_at = time.monotonic() + self._options.lease / 2
        self._queue |= found
        self._has_begun, self._pause_until = True, None

    def _is_time(self) -> bool:
        """Whether the next batch may be taken; the pause counts from the last answer to the batch before."""
        if not self._options.pause or not self._has_begun:
            return len(self._queue) < self._batch_size()
        if self._resend.unanswered or self._queue:
            return False
        if self._pause_until is None:
            self._pause_until = time.monotonic() + self._options.pause
        return time.monotonic() >= self._pause_until

    def _renew_in_time(self) -> None:
        """Renew the leases of rows that wait here or are under way; rows that were lost are not offered.

        This comes before each offer: the process may have been suspended, and another apply has taken rows over.
        """
        if time.monotonic() < self._renew_at or not (self._queue or self._resend.unanswered):
            return
        self._renew_at = time.monotonic() + self._options.lease / 2
        numbers = self._items.begin([*self._queue, *self._resend.unanswered], self._clock())
        self._queue = {row_id: self._queue[row_id] for row_id in self._queue if row_id in numbers}

    def _batch_size(self) -> int:
        if (per_second := self._pace.per_second) is not None:
            # A slow rate takes no more rows than it sends within their lease.
            return max(1, min(self._options.batch_size, int(per_second * self._options.lease / 6)))
        return self._options.batch_size
