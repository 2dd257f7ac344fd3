"""A plan's rows as the broker's side asks for them: taken in batches, offered at a pace, marked as confirms come.

While one batch is being sent the next one is taken beside it. What is taken is written down, and has a lease; nothing
is offered that has not got here.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from dlqbatch.errors import DatabaseUnreadable
from dlqbatch.runs.resend import NEEDS_A_PERSON, NOBODY_KNOWS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Executor, Future
    from datetime import datetime

    from dlqbatch.message.delivery import Offer
    from dlqbatch.policy.replay import Pace
    from dlqbatch.runs.replay import Manner
    from dlqbatch.runs.resend import Resend, Row

_AT_ONCE: Final = 256
"""Rows that are marked in one transaction."""
_MARKED_AFTER: Final = 0.1
"""Seconds that a confirm waits to be written down with others."""
_BYTES_AT_ONCE: Final = 8 * 1024 * 1024
_FAILURES_ASKED_EVERY: Final = 2.0
_ASKING_TAKES_AT_MOST: Final = 1 / 20
"""Of the time: to count what came back of a million takes a second."""
_TRIES: Final = 4
_NOT_SENT_YET: Final = "the apply ended before it was sent"


class Taken(Protocol):
    @property
    def sizes(self) -> Mapping[int, int]: ...
    @property
    def numbers(self) -> Mapping[int, int]: ...
    @property
    def skipped(self) -> Mapping[str, int]: ...
    @property
    def is_over(self) -> bool: ...


class Items(Protocol):
    """The items of one plan, as one apply sees them; `take` may be under way while the others are called."""

    def take(self, limit: int, ceiling: int | None, now: datetime) -> Taken: ...
    def begin(self, row_ids: Iterable[int], now: datetime) -> Mapping[int, int]: ...
    def outgoing(self, numbers: Mapping[int, int]) -> Sequence[Row]: ...
    def sent(self, numbers: Mapping[int, int], now: datetime) -> None: ...
    def give_back(self, row_ids: Mapping[int, str], now: datetime, *, to_person: bool = False) -> None: ...


class Batches:
    """The source of one transfer; `close` it when the transfer is over."""

    def __init__(
        self,
        items: Items,
        resend: Resend,
        pace: Pace,
        manner: Manner,
        ceiling: int | None,
        is_too_much: Callable[[], bool],
        aside: Executor,
    ) -> None:
        self.skipped: Counter[str] = Counter()
        self._items = items
        self._resend = resend
        self._pace = pace
        self._manner = manner
        self._ceiling = ceiling
        self._is_too_much = is_too_much
        self._aside = aside
        self._asks_at = time.monotonic()
        self._next: Future[Taken] | None = None
        """The batch that is being taken."""
        self._is_last = False
        """There is no batch after those that are here."""
        self._is_over = False
        """Nothing more is to be offered, whatever is here."""
        self._has_failed = False
        self._queue: deque[int] = deque()
        self._numbers: dict[int, int] = {}
        """Attempts of the rows in the queue, and of those that are under way."""
        self._under_way: set[int] = set()
        self._sizes: dict[int, int] = {}
        """Of the bodies of the rows in the queue."""
        self._has_begun = False
        self._renew_at = 0.0
        self._pause_until: float | None = None
        self._confirmed: dict[int, int] = {}
        self._held: dict[int, str] = {}
        self._oldest = self._heard_at = time.monotonic()
        self._batch_size = _batch_size(manner)

    def more(self, room: int) -> Sequence[Offer] | None:
        if self._is_over:
            return None
        self._renew_in_time()
        if room < len(self._under_way):
            return ()  # many at once, for each trip to the database costs the same
        if 2 * self._unmarked > room:
            self._note()
        room -= self._unmarked  # what a cut would send twice is no more than what may be under way
        self._take_ahead()
        self._look_at_next(wait=not self._queue and not self._under_way)
        if self._has_ended:
            return None
        now = time.monotonic()
        some: dict[int, int] = {}
        size = 0
        for _ in range(min(self._pace.allowed(now, room), len(self._queue))):
            size += self._sizes[self._queue[0]]
            if some and size > _BYTES_AT_ONCE:
                break
            row_id = self._queue.popleft()
            del self._sizes[row_id]
            some[row_id] = self._numbers[row_id]
        if not some:
            return ()
        self._pace.took(len(some))
        self._take_ahead()
        rows = self._items.outgoing(some)
        if not self._under_way:
            self._heard_at = now
        self._under_way.update(row.row_id for row in rows)
        return self._resend.offers(rows)

    @property
    def _has_ended(self) -> bool:
        return self._is_over or (self._is_last and not self._queue)

    def is_stuck(self) -> bool:
        """The broker lives, and confirms nothing."""
        return bool(self._under_way) and time.monotonic() - self._heard_at > self._manner.patience

    def confirmed(self, tag: int) -> None:
        self._answered(tag)
        if (number := self._numbers.pop(tag, None)) is not None:
            self._confirmed[tag] = number

    def held(self, tag: int, reason: str | None) -> None:
        self._answered(tag)
        self._numbers.pop(tag, None)
        if reason not in NOBODY_KNOWS:
            self._held[tag] = reason or "not sent"
        # Else its lease stays, and whoever takes over sends it again under the same number.

    def flush(self) -> None:
        self._look_at_next(wait=False)
        self._renew_in_time()
        if self._unmarked >= _AT_ONCE or time.monotonic() - self._oldest >= _MARKED_AFTER:
            self._note()

    @property
    def _unmarked(self) -> int:
        return len(self._confirmed) + len(self._held)

    def _note(self) -> None:
        if self._unmarked and not self._has_failed:
            try:
                self._mark()
            except DatabaseUnreadable:
                # Asked again at the end, and not with every read until then.
                self._has_failed = True
                raise

    def close(self) -> None:
        """Write down what became of everything that was taken; tried a few times, for else it would be sent again."""
        with suppress(DatabaseUnreadable):  # whether it has them or not, their leases end
            self._look_at_next(wait=True)
        for row_id in self._queue:
            self._held[row_id] = _NOT_SENT_YET
        self._queue.clear()
        again = Retrying(
            stop=stop_after_attempt(_TRIES),
            wait=wait_random_exponential(multiplier=0.2, max=2),
            retry=retry_if_exception_type(DatabaseUnreadable),
            reraise=True,
        )
        again(self._mark)

    def _answered(self, tag: int) -> None:
        if not self._confirmed and not self._held:
            self._oldest = time.monotonic()
        self._heard_at = time.monotonic()
        self._resend.answered(tag)
        self._under_way.discard(tag)

    def _mark(self) -> None:
        now = self._manner.clock()
        if self._confirmed:
            self._items.sent(self._confirmed, now)
            self._confirmed = {}
        lasting = {row_id: why for row_id, why in self._held.items() if why in NEEDS_A_PERSON}
        passing = {row_id: why for row_id, why in self._held.items() if row_id not in lasting}
        if lasting:
            self._items.give_back(lasting, now, to_person=True)
        if passing:
            self._items.give_back(passing, now)
        self._held = {}

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
        self._next = self._aside.submit(self._items.take, self._batch_size, self._ceiling, self._manner.clock())

    def _look_at_next(self, *, wait: bool) -> None:
        """What has been taken meanwhile stands in the queue from here on, where its leases are renewed."""
        if self._next is None or not (wait or self._next.done()):
            return
        future, self._next = self._next, None
        taken = future.result()
        self.skipped.update(taken.skipped)
        self._is_last = taken.is_over
        # Taken over from ourselves, not noted within our own lease: it waits here, is on its way, or is answered for.
        known = self._numbers.keys() | self._under_way | self._confirmed.keys() | self._held.keys()
        found = [row_id for row_id in taken.sizes if row_id in taken.numbers and row_id not in known]
        if not found:
            return
        if not self._under_way and not self._queue:
            self._renew_at = time.monotonic() + self._manner.lease / 2
        self._queue.extend(found)
        self._sizes |= {row_id: taken.sizes[row_id] for row_id in found}
        self._numbers |= {row_id: taken.numbers[row_id] for row_id in found}
        self._has_begun, self._pause_until = True, None

    def _is_time(self) -> bool:
        """Between two batches lies the pause, counted from when the last one was answered for."""
        if not self._manner.pause or not self._has_begun:
            return len(self._queue) < self._batch_size
        if self._under_way or self._queue:
            return False
        if self._pause_until is None:
            self._pause_until = time.monotonic() + self._manner.pause
        return time.monotonic() >= self._pause_until

    def _renew_in_time(self) -> None:
        """The leases of what waits here and of what is on its way start anew; what was lost is not offered.

        Looked at before anything is offered: the process may have stood still, and others have taken over.
        """
        if time.monotonic() < self._renew_at or not (self._queue or self._under_way):
            return
        self._renew_at = time.monotonic() + self._manner.lease / 2
        numbers = self._items.begin([*self._queue, *self._under_way], self._manner.clock())
        self._queue = deque(row_id for row_id in self._queue if row_id in numbers)


def _batch_size(manner: Manner) -> int:
    if manner.per_second is not None:
        # What a slow pace would hold longer than its lease is not taken yet.
        return max(1, min(manner.batch_size, int(manner.per_second * manner.lease / 6)))
    return manner.batch_size
