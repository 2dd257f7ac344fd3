"""The main loop of a run: take, decide, publish, confirm, acknowledge, with many messages under way at once."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any, Final, NamedTuple

from dlqbatch.amqp.delivery import AwaitOrigin, Delivery, Gather, Hold, Instruction, Publish
from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.broker.connection import Connection, PublishingBlocked
from dlqbatch.broker.consume import Consume
from dlqbatch.broker.fetch import AHEAD, Fetch, Gets, MessageSource, Spare, StoreFetch
from dlqbatch.broker.publisher import Publisher
from dlqbatch.broker.refusals import explained
from dlqbatch.broker.return_exchanges import Origins
from dlqbatch.broker.traced import TracedMessages
from dlqbatch.errors import BrokerLost, DlqbatchError

WINDOW: Final = 512
"""Messages under way at once: requested, taken, published, or confirmed before an earlier message."""
MEMORY: Final = 28 * 1024 * 1024
"""Bytes of bodies under way at once, unless a single body is larger; a smaller limit makes large bodies slower."""
_FIRST_GUESS: Final = 1024 * 1024
"""The assumed size in bytes of the first body."""
_SECOND_GUESS: Final = 32 * 1024
"""The assumed size in bytes of the second body, unless the first was larger."""

_BATCH: Final = 256
"""Messages that are stored in one transaction."""
_BATCH_BYTES: Final = MEMORY // 2
_BATCH_AGE: Final = 0.05
"""Seconds that a gathered message waits for others to be stored with it."""

LEFT: Final = "left"
NOT_STORED: Final = "not-stored"
PUBLISHING_BLOCKED: Final = "publishing-blocked"
FAILURE: Final = "failure"


Store = Callable[[Sequence[Any]], Sequence[tuple[str, str | None]]]
"""Commits what was gathered, and says for each what it counts as and why; a DlqbatchError: none was stored."""


def stores_nothing(_: Sequence[Any]) -> Sequence[tuple[str, str | None]]:
    raise AssertionError("this run stores nothing")


class Take(NamedTuple):
    """At most `limit` messages from one queue."""

    queue: str
    limit: int
    is_quorum: bool = False


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far a run may go: when it stops taking, and when it stops waiting; both on the monotonic clock."""

    stop_at: float
    give_up_after: float
    """Seconds that confirms may still take once nothing more is taken."""
    max_bytes: int
    stopped: Callable[[], bool]
    """Whether a signal has requested the end."""
    progress: Callable[[int, int], None] = lambda _taken, _of: None
    """Called now and then with the messages taken so far, and with how many will be taken."""
    last_answers: float = 5.0
    """Seconds after that in which the broker may still answer the close of channels; then the connection is dropped."""
    traced: TracedMessages | None = None

    @property
    def end_at(self) -> float:
        """When nothing is waited for any more."""
        return self.stop_at + self.give_up_after + self.last_answers


@dataclass(slots=True)
class Tally:
    """What became of the messages that a transfer took."""

    got: int = 0
    bytes: int = 0
    results: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    stopped_by: str | None = None
    """bytes, time, signal or failure; None when everything that was wanted was taken."""
    lost: str | None = None
    """Why the connection went away, if it did."""
    failure: DlqbatchError | None = None
    """Why the store took no more."""
    taken: dict[str, int] = field(default_factory=dict)
    """How many came from each queue."""
    refused: dict[str, str] = field(default_factory=dict)
    """Queues that the broker refused to go on with, or did not answer for, and why."""


class Transfer:
    """A single pass over some queues, or over a store; `handle` says for each delivery what is to be done with it."""

    def __init__(
        self,
        connection: Connection,
        origins: Origins,
        handle: Callable[[Delivery], Instruction],
        bounds: Bounds,
        store: Store = stores_nothing,
        refused: frozenset[str] = frozenset(),
        source: MessageSource | None = None,
    ) -> None:
        """`refused` are exchanges known to take nothing from us; `source` is a store that has messages too."""
        self.tally = Tally()
        self._connection = connection
        self._origins = origins
        self._traced = bounds.traced
        self._handle = handle if bounds.traced is None else bounds.traced.watching(handle)
        self._bounds = bounds
        self._max_bytes = bounds.max_bytes
        self._bytes_end = bounds.max_bytes
        """The bound on bytes; 0 while a body is under way that is as large as the bound by itself."""
        self.fetches: list[Fetch] = []
        self._parked: defaultdict[Origin, list[Delivery]] = defaultdict(list)
        self._parked_bytes = 0
        self._store = store
        self._gathered: list[tuple[Delivery, Any]] = []
        self._gathered_bytes = 0
        self._gathered_since = 0.0
        self._expected_size = float(_FIRST_GUESS)
        self._give_up_at = bounds.stop_at + bounds.give_up_after
        self._has_signal = False
        self._wanted = 0
        self._unanswered = 0
        """The number of messages taken that were neither counted nor put back yet."""
        self._source = source
        self._publisher = Publisher(connection, self, MEMORY, refused, source.may_publish if source else None)

    def run(self, takes: Sequence[Take] = (), spare: int = 0) -> Tally:
        """Every message taken is counted once, whatever happens; a lost connection is reported, not raised.

        `spare` is what may be taken beyond the limits, of messages that were there already when a limit was set.
        """
        self._wanted = sum(take.limit for take in takes)
        shared = Spare(spare)
        try:
            for take in takes:
                kind = Consume if take.is_quorum else Gets
                self.fetches.append(kind(self._connection, take.queue, take.limit, self.deliver, shared))
            if self._source is not None:
                self.fetches.append(StoreFetch(self._source, self._connection.frame_max, self.deliver, self._fail))
            self._connection.wire.after_read = self._go_on
            self._until_settled()
            self._finish()
        except BrokerLost as error:
            self.tally.lost = error.why
            self._leave_the_rest("connection-lost")
            if not self._connection.is_closing:
                # Only an answer was missing: what is settled may still arrive, and will not be doubled.
                with suppress(BrokerLost):
                    for fetch in self.fetches:
                        fetch.release()
        finally:
            self._connection.wire.after_read = None
        return self.tally

    def _until_settled(self) -> None:
        self._go_on()
        self._connection.wire.flush()
        while not self._is_done() and self._time_left() > 0:
            self._connection.step()
            self._bounds.progress(self.tally.got, self._wanted)
            self._stop_if_due()
            if self._publisher.is_broken:
                self._publisher.recover(self._time_left())
            if self._parked:
                self._prepare_origins()
            if self._gathered and self._is_batch_due():
                self._store_batch()
            self._go_on()
            self._connection.wire.flush()
        # Connecting and reading the policy may have used up the time before the loop began.
        self._stop_if_due()

    def _is_done(self) -> bool:
        is_idle = not self._parked and not self._gathered and not self._publisher.outstanding
        return is_idle and all(fetch.is_finished for fetch in self.fetches)

    def _time_left(self) -> float:
        """Seconds until what is under way is abandoned."""
        return self._give_up_at - time.monotonic()

    def _stop_if_due(self) -> None:
        """Stop taking when the time is over or a signal asks for it; after a signal, waiting ends soon as well."""
        is_taking = not all(fetch.is_finished for fetch in self.fetches)
        if not self._has_signal and self._bounds.stopped():
            self._has_signal = True
            self._give_up_at = min(self._give_up_at, time.monotonic() + self._bounds.give_up_after)
            self._connection.end_by(self._give_up_at + self._bounds.last_answers)
            if is_taking:
                self._stop("signal")
        elif is_taking and time.monotonic() >= self._bounds.stop_at:
            self._stop("time")

    def _stop(self, why: str) -> None:
        if self.tally.stopped_by is None:
            self.tally.stopped_by = why
            for fetch in self.fetches:
                fetch.stop()

    def _go_on(self) -> None:
        """Acknowledge what is due and ask for more, each queue a fair part of the room there is."""
        active = [fetch for fetch in self.fetches if not fetch.is_finished]
        if sum(fetch.ahead for fetch in self.fetches) >= AHEAD:
            # Each of several queues may wait for one message, so that together they would fill the window.
            max(self.fetches, key=attrgetter("ahead")).acknowledge_each()
        room = self._room() // len(active) if active else 0
        for fetch in self.fetches:
            fetch.flush()
        # A message that is never confirmed, however large, leaves room for a message of each queue.
        has_room = self._unanswered <= 1
        for fetch in active:
            fetch.ask(max(room, 1 if has_room and not fetch.outstanding and self._room_to_bound() > 0 else 0))

    def _room(self) -> int:
        """How many more messages may be requested within the window, the memory and the bound on bytes."""
        asked = sum(fetch.outstanding for fetch in self.fetches)
        confirmed = sum(fetch.ahead for fetch in self.fetches)
        kept = self._publisher.retained_bytes + self._parked_bytes + self._gathered_bytes
        memory = (MEMORY - kept) / self._expected_size - asked
        return max(int(min(WINDOW - asked - self._unanswered - confirmed, memory, self._room_to_bound())), 0)

    def _room_to_bound(self) -> int:
        """How many more may be requested, so that at most one body is larger than what is left of the bound."""
        if not self._bytes_end:
            return 0
        left = (self._bytes_end - self.tally.bytes) / self._expected_size
        return int(left) + 1 - sum(fetch.outstanding + fetch.is_receiving for fetch in self.fetches)

    def deliver(self, delivery: Delivery) -> None:
        size, tally = delivery.body_size, self.tally
        tally.bytes += size
        if tally.bytes >= self._bytes_end and self._is_beyond(delivery):
            return
        tally.got += 1
        self._unanswered += 1
        if size != self._expected_size:
            # Falls slowly and rises at once: after a large body, more of its size are expected.
            before = _SECOND_GUESS if tally.got == 1 else self._expected_size * 0.75
            self._expected_size = max(size, before, 1024.0)
        self._follow(delivery)

    def _is_beyond(self, delivery: Delivery) -> bool:
        """Whether the bound on bytes was reached before this message, so that it goes back at the end of the run."""
        size = delivery.body_size
        if self.tally.bytes - size >= self._bytes_end and isinstance(delivery.receipt, Gets):
            # What a consumer brings is taken all the same: put back, it would have one delivery more.
            self.tally.bytes -= size
            delivery.chunks = None
            return True
        if size >= self._max_bytes:
            # It alone reaches the bound. The run ends once it has moved: a refused message comes first in every run.
            self.tally.bytes -= size
            self._bytes_end = 0
        elif self.tally.bytes >= self._max_bytes:
            self._stop("bytes")
        return False

    def _follow(self, delivery: Delivery) -> None:
        instruction = self._handle(delivery)
        if isinstance(instruction, Publish):
            self._publisher.send(delivery, instruction)
        elif isinstance(instruction, AwaitOrigin):
            self._parked[instruction.origin].append(delivery)
            self._parked_bytes += delivery.body_size
        elif isinstance(instruction, Gather):
            self._gather(delivery, instruction.kept)
        else:
            self._hold(delivery, instruction)

    def _gather(self, delivery: Delivery, kept: Any) -> None:
        if self.tally.failure is not None:
            self._hold(delivery, Hold(LEFT, NOT_STORED))
            return
        if not self._gathered:
            self._gathered_since = time.monotonic()
        delivery.chunks = None
        self._gathered.append((delivery, kept))
        self._gathered_bytes += delivery.body_size

    def _is_batch_due(self) -> bool:
        is_full = len(self._gathered) >= _BATCH or self._gathered_bytes >= _BATCH_BYTES
        return is_full or time.monotonic() - self._gathered_since >= _BATCH_AGE

    def _store_batch(self) -> None:
        """Commit first, acknowledge afterwards: a cut between the two stores a message twice, and loses none."""
        batch, self._gathered = self._gathered[:_BATCH], self._gathered[_BATCH:]
        self._gathered_since = time.monotonic()
        try:
            results = self._store([kept for _, kept in batch])
        except DlqbatchError as error:
            self._fail(error)
            for delivery, _ in (*batch, *self._gathered):
                self._hold(delivery, Hold(LEFT, NOT_STORED))
            self._gathered, self._gathered_bytes = [], 0
            return
        for (delivery, _), (counts_as, reason) in zip(batch, results, strict=True):
            self._gathered_bytes -= delivery.body_size
            self._count(delivery, counts_as, reason)
            delivery.receipt.settle(delivery.tag)

    def _fail(self, error: DlqbatchError) -> None:
        self.tally.failure = error
        for fetch in self.fetches:
            fetch.stop()

    def _hold(self, delivery: Delivery, hold: Hold) -> None:
        delivery.chunks = None
        self._count(delivery, hold.counts_as, hold.reason)
        delivery.receipt.hold(delivery.tag, hold.reason)

    def _count(self, delivery: Delivery, counts_as: str, reason: str | None) -> None:
        self._unanswered -= 1
        self.tally.results[counts_as, reason] += 1
        if self._traced is not None:
            self._traced.settled(delivery, counts_as, reason)
        if delivery.body_size >= self._max_bytes:
            self._bytes_end = self._max_bytes
            if counts_as != LEFT:
                self.tally.bytes += delivery.body_size
                self._stop("bytes")

    def confirmed(self, delivery: Delivery, publish: Publish) -> None:
        self._count(delivery, publish.counts_as, publish.reason)
        delivery.receipt.settle(delivery.tag)

    def unconfirmed(self, delivery: Delivery, publish: Publish, reason: str) -> None:  # noqa: ARG002  (part of the outcome)
        self._hold(delivery, Hold(LEFT, reason))

    def unroutable(self, delivery: Delivery, publish: Publish) -> None:
        if publish.origin is None or delivery.resent:
            if publish.origin is not None and self._origins.unroutable(publish.origin):
                self._follow(delivery)
            else:
                self._hold(delivery, Hold(LEFT, "unroutable"))
            return
        # The queue may have been deleted and declared again, which loses the binding: bind and send once more.
        delivery.resent = True
        self._origins.forget(publish.origin)
        self._parked[publish.origin].append(delivery)
        self._parked_bytes += delivery.body_size

    def _prepare_origins(self) -> None:
        for origin in list(self._parked):
            if self._time_left() <= 0:
                return
            try:
                self._origins.prepare(origin)
            except PublishingBlocked:
                self._stop(FAILURE)
                self._leave_parked(PUBLISHING_BLOCKED)
                return
            self._stop_if_due()
            for delivery in self._parked.pop(origin):
                self._parked_bytes -= delivery.body_size
                self._follow(delivery)

    def _leave_parked(self, reason: str) -> None:
        for delivery in chain.from_iterable(self._parked.values()):
            self._parked_bytes -= delivery.body_size
            self._hold(delivery, Hold(LEFT, reason))
        self._parked.clear()

    def _finish(self) -> None:
        """Nothing more is taken and what is settled is known; now the broker must know it too."""
        self._connection.wire.after_read = None
        self.tally.taken = {fetch.queue: fetch.taken for fetch in self.fetches}
        for fetch in self.fetches:
            if fetch.lost is not None or fetch.is_waiting:
                self.tally.refused[fetch.queue] = explained(fetch.lost or "the broker did not answer in time")
        self._leave_the_rest("not-confirmed")
        for fetch in self.fetches:
            fetch.release()
        self._publisher.close()
        self._connection.wait(lambda: all(fetch.is_closed for fetch in self.fetches), "channel.close")

    def _leave_the_rest(self, reason: str) -> None:
        self._publisher.abandon(reason)
        self._leave_parked("origin-check-failed")
        for delivery, _ in self._gathered:
            self._hold(delivery, Hold(LEFT, NOT_STORED))
        self._gathered = []
        # What had not been handed over completely when the connection went away.
        if self._unanswered:
            self.tally.results[LEFT, reason] += self._unanswered
            self._unanswered = 0
