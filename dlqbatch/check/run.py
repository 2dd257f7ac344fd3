"""A check: every message of some queues is looked at once; what failed too often moves, the rest stays in place.

Most messages stay, and a channel keeps what it has delivered in one list, which the broker walks for every single
acknowledgement. With all that stays on one channel, looking through 50,000 messages ran at a twentieth of the speed of
a drain, and slower with every message more. So it is spread over channels that take a part each, one after another.

What stays goes back part by part. A classic queue puts each message into its old place and walks there from its head,
so the last part goes first. A quorum queue takes them in the order they come back, so there the first goes first.
"""

from __future__ import annotations

import itertools
import os
import time
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from operator import attrgetter
from typing import Any, Final

from dlqbatch.amqp.delivery import AwaitOrigin, Delivery, Envelope, Hold, Instruction, Publish, open_envelope
from dlqbatch.amqp.origin import Trust
from dlqbatch.amqp.retry_headers import Journey, Origin
from dlqbatch.amqp.stamp import stamp
from dlqbatch.broker import frames
from dlqbatch.broker.connection import Connection
from dlqbatch.broker.consume import Consume
from dlqbatch.broker.fetch import Gets, Spare
from dlqbatch.broker.session import Session, share
from dlqbatch.broker.transfer import Tally, Transfer
from dlqbatch.check.rules import TOO_MANY_DEATHS, Count, failures, journey_of
from dlqbatch.errors import ChannelRefused, TopologyMissing
from dlqbatch.jobs import FAILURE, LEFT, Report, count, unread

MOVED: Final = "moved"
WITHIN_LIMIT: Final = "within-limit"
UNREADABLE: Final = "headers-unreadable"
HEADERS_TOO_LARGE: Final = "headers-too-large"
NO_TARGET: Final = "target-missing"
_STAYED: Final = (LEFT, WITHIN_LIMIT)
_PREVIEWED: Final = 100
_ASKED_AT_ONCE: Final = 500
"""Queues; each that seems empty may take a channel of its own."""


@dataclass(frozen=True, slots=True)
class Check:
    broker: LookingSession
    targets: Mapping[str, str]
    """The target of each queue to look through."""
    named: frozenset[str]
    """Queues that were named without a wildcard, so that it is an error if one is missing."""
    max_deaths: int
    trust: Trust
    max_messages: int | None = None
    """None for all that is there at the start."""
    dry_run: bool = False

    def run(self) -> Report:
        started = time.monotonic()
        depths, missed = self._depths()
        takes = depths if self.max_messages is None else share(self.max_messages, depths, os.urandom(1)[0])
        handler = _Handler(self)
        results: Counter[tuple[str, str | None]] = Counter()
        by_queue: dict[str, dict[str, object]] = {}
        got, unseen, stopped_by, warnings = 0, 0, "empty", [""] * 0
        # One after the other, so that each is hidden for its own time only; a deep one cannot starve the others.
        for queue in sorted(depths, key=depths.__getitem__):
            if not takes[queue] or stopped_by != "empty":
                unseen += depths[queue]
                continue
            tally = self.broker.look(queue, takes[queue], handler.handle)
            results.update(tally.results)
            got += tally.got
            unseen += max(depths[queue] - tally.got, 0) if tally.stopped_by or takes[queue] < depths[queue] else 0
            missed |= tally.refused
            by_queue[queue] = {"target": self.targets[queue], "got": tally.got} | _counted(tally)
            stopped_by = tally.stopped_by or stopped_by
            if tally.lost is not None:
                warnings.append(f"the connection to the broker was lost: {tally.lost}")
                missed |= {other: "the connection was lost" for other in depths if other not in by_queue}
                # As for a drain: neither a bound nor a signal has ended the run.
                stopped_by, unseen = "time" if stopped_by == "empty" else stopped_by, 0
                break
        if unseen and stopped_by != FAILURE:
            stopped_by = "messages" if stopped_by == "empty" else stopped_by
            warnings.append(
                f"{unseen} message(s) were not looked at. What stays is met first by the next run too: raise the bound "
                f"on {'seconds' if stopped_by == 'time' else stopped_by} (docs/check.md), or check such a queue alone"
            )
        if missed and stopped_by == "empty":
            stopped_by = FAILURE
        counts, reasons = count(results, got)
        is_complete = counts[LEFT] == results[_STAYED] and not missed and not any("was lost" in one for one in warnings)
        return Report(
            "check",
            outcome="ok" if is_complete else "partial",
            stopped_by=stopped_by,
            counts=counts,
            reasons=reasons,
            elapsed_seconds=time.monotonic() - started,
            dry_run=self.dry_run,
            warnings=(*warnings, *self.broker.warnings(), *unread(missed)),
            preview=tuple(handler.preview),
            details={"queues": by_queue},
        )

    def _depths(self) -> tuple[dict[str, int], dict[str, str]]:
        """What is there at the start; a queue that only a wildcard named may have gone since."""
        depths: dict[str, int] = {}
        missed: dict[str, str] = {}
        queues = sorted(self.targets)
        pending = [queues[start : start + _ASKED_AT_ONCE] for start in range(0, len(queues), _ASKED_AT_ONCE)]
        while pending:
            part = pending.pop()
            try:
                found, unknown = self.broker.depths(part, ())
            except TopologyMissing as missing:
                if missing.name in self.named:
                    raise
                pending.append([queue for queue in part if queue != missing.name])
            except ChannelRefused as refused:
                if len(part) == 1:
                    missed[part[0]] = refused.text
                else:
                    # The refusal does not name the queue: each is declared alone.
                    pending += [[queue] for queue in part]
            else:
                depths |= found
                missed |= unknown
        return dict(sorted(depths.items())), missed


def _counted(tally: Tally) -> dict[str, object]:
    counts: Counter[str] = Counter()
    for (counts_as, reason), number in tally.results.items():
        counts[WITHIN_LIMIT if (counts_as, reason) == _STAYED else counts_as] += number
    return {"moved": counts[MOVED], "within_limit": counts[WITHIN_LIMIT], "left": counts[LEFT]}


class _Handler:
    """One message after another; it waits for nothing."""

    def __init__(self, check: Check) -> None:
        self.preview: list[dict[str, str]] = []
        self._check = check
        self._targets = check.broker.origins
        self._login = check.broker.login
        self._size = check.broker.properties_limit
        self._limit = check.max_deaths
        self._destinations = {queue: Origin(target, "", target) for queue, target in check.targets.items()}
        prefix, numbers = os.urandom(12).hex(), itertools.count()
        self._new_id = lambda: f"{prefix}{next(numbers):08x}"

    def handle(self, delivery: Delivery) -> Instruction:
        envelope = open_envelope(
            delivery.exchange, delivery.routing_key, delivery.redelivered, delivery.body_size, delivery.properties
        )
        headers = envelope.headers
        if headers is None:
            return Hold(LEFT, UNREADABLE)
        counted = failures(headers)
        if counted.failures <= self._limit:
            return Hold(LEFT, WITHIN_LIMIT)
        journey = journey_of(envelope, headers, self._check.trust, self._new_id, delivery.digest)
        destination = self._destinations[delivery.receipt.queue]
        if self._check.dry_run:
            self._show(delivery.receipt.queue, destination, journey, counted)
            return Hold(MOVED, counted.by)
        return self._move(delivery, envelope, journey, counted, destination)

    def _move(
        self, delivery: Delivery, envelope: Envelope, journey: Journey, counted: Count, destination: Origin
    ) -> Instruction:
        route = self._targets.route(destination)
        if route is not None:
            why = f"{TOO_MANY_DEATHS}: {counted.failures} by {counted.by}, at most {self._limit} are allowed"
            digest, now = delivery.digest(), int(time.time())
            properties = stamp(
                envelope, journey, login=self._login, limit=self._size, digest=digest, reason=why, dead_at=now
            )
            if properties is None:
                return Hold(LEFT, HEADERS_TOO_LARGE)
            return Publish(journey.id, route, properties, MOVED, counted.by, destination)
        if self._targets.is_gone(destination) or self._targets.is_unclear(destination):
            return Hold(LEFT, NO_TARGET)
        return AwaitOrigin(destination)

    def _show(self, queue: str, destination: Origin, journey: Journey, counted: Count) -> None:
        if len(self.preview) >= _PREVIEWED:
            return
        origin = journey.origin
        event, name = (origin.event, origin.name) if origin is not None else ("", "")
        shown = {"queue": queue, "id": journey.id, "event": event, "origin": name, "decision": MOVED, "exchange": ""}
        self.preview.append(shown | {"key": destination.key, "reason": f"{counted.failures} by {counted.by}"})


PART: Final = 256
"""Messages that one channel takes, unless there would be too many channels."""
_MOST_CHANNELS: Final = 1000
_OTHER_CHANNELS: Final = 8
"""Channels that are kept free for publishing and for questions."""


@dataclass(slots=True)
class _Putting:
    """What the parts of one look share while they put back what they held."""

    seconds_left: float = 10.0
    """Seconds in all that are waited in vain, so that a queue whose messages others take does not cost each part."""
    ready: int = 0
    """Messages in the queue after the part before."""


class _Rounds(Consume):
    """A quorum queue's part; what it puts back keeps its order.

    A channel's one nack of everything goes back consumer by consumer, in no order of theirs, and each get counts as a
    consumer. So there is a nack for each of them, on the last of its messages that is still here.

    It never probes: a get can be answered before what the consumer was assigned earlier arrives, and would go back
    before it.
    """

    probes_after = inf
    gives_up_after = 2.0

    def __init__(
        self,
        putting: _Putting,
        connection: Connection,
        queue: str,
        limit: int,
        deliver: Callable[[Delivery], None],
        spare: Spare,
    ) -> None:
        super().__init__(connection, queue, limit, deliver, spare)
        self._putting = putting
        self._held = array("Q")
        self._ends = array("Q")
        """The last tag of each consumer; tags count from 1."""

    def hold(self, tag: int, reason: str | None) -> None:
        super().hold(tag, reason)
        self._held.append(tag)

    def release(self) -> None:
        if self._held and self.lost is None and not self._closing:
            self._acknowledge(self._due)
            held = sorted(self._held)
            # For a leader that is too busy to answer, the depth is 0.
            back, ready = 0, self._ready() or self._ready() or self._putting.ready
            for end in (*self._ends, self.taken):
                upto = bisect_right(held, end)
                if upto > back:
                    self._wire.put(frames.requeue(self._number, held[upto - 1]))
                    ready += upto - back
                    self._until_back(ready)
                    back = upto
            self._putting.ready = ready
        super().release()

    def _until_back(self, ready: int) -> None:
        """Wait until the depth shows the nack: since RabbitMQ 4, a nack of one message overtakes a nack of many.

        Where others take what comes back, the depth shows nothing, and nobody could notice the order either.
        """
        began = time.monotonic()
        while self.lost is None and self._ready() < ready:
            if time.monotonic() - began > self._putting.seconds_left:
                self._putting.seconds_left = 0.0
                return
            self._connection.step()

    def _ready(self) -> int:
        answers: list[Any] = []
        self._wire.flush()
        if not self._channel.is_open:
            return 0
        self._channel.queue_declare(self.queue, passive=True, callback=answers.append)
        self._connection.wait(lambda: answers or self._channel.is_closed, "queue.declare")
        return int(answers[0].method.message_count) if answers else 0

    def _got_message(self, buffer: bytes, position: int) -> None:
        super()._got_message(buffer, position)
        self._ends.extend((self.taken - 1, self.taken))


class Parts:
    """Several fetches as one; each begins when the one before it has all its answers, which keeps the order."""

    def __init__(self, connection: Connection, queue: str, parts: Sequence[Gets | Consume]) -> None:
        self.queue = queue
        self._connection = connection
        self._parts = parts
        self._current = 0

    @property
    def taken(self) -> int:
        return sum(part.taken for part in self._parts)

    @property
    def lost(self) -> str | None:
        return next((part.lost for part in self._parts if part.lost is not None), None)

    @property
    def outstanding(self) -> int:
        return self._parts[self._current].outstanding

    @property
    def is_receiving(self) -> bool:
        return self._parts[self._current].is_receiving

    @property
    def ahead(self) -> int:
        return sum(part.ahead for part in self._at_work)

    @property
    def is_finished(self) -> bool:
        """The last part is through, or one has met the end of the queue."""
        part = self._parts[self._current]
        return part.is_finished and (part.taken < part.limit or self._current + 1 == len(self._parts))

    @property
    def is_waiting(self) -> bool:
        return self._parts[self._current].is_waiting

    def ask(self, room: int) -> None:
        if self._parts[self._current].is_finished and not self.is_finished:
            self._current += 1
        self._parts[self._current].ask(room)

    def stop(self) -> None:
        for part in self._parts[self._current :]:
            part.stop()

    def acknowledge_each(self) -> None:
        max(self._at_work, key=attrgetter("ahead")).acknowledge_each()

    def flush(self) -> None:
        for part in self._at_work:
            part.flush()

    @property
    def _at_work(self) -> Sequence[Gets | Consume]:
        # What is confirmed late may belong to a part before.
        return self._parts[max(self._current - 3, 0) : self._current + 1]

    def release(self) -> None:
        """Wait for each channel to close before the next one puts its part back, or they would overtake each other."""
        ordered = self._parts if isinstance(self._parts[0], Consume) else self._parts[::-1]
        for part in ordered:
            part.release()
            if part.taken:
                self._connection.wait(partial(getattr, part, "is_closed"), "channel.close")

    @property
    def is_closed(self) -> bool:
        return all(part.is_closed for part in self._parts)


@dataclass(frozen=True, slots=True)
class LookingSession(Session):
    """The session of a run that leaves most of what it sees."""

    def look(self, queue: str, limit: int, handle: Callable[[Delivery], Instruction]) -> Tally:
        """At most so many from one queue; what is held stays away from others until the call returns."""
        if self.origins.is_blocked():
            return self.blocked([queue])
        report = self.bounds.progress
        bounds = replace(self.bounds, progress=lambda taken, _: report(taken, limit))
        transfer = Transfer(self.connection, self.origins, handle, bounds)
        transfer.fetches.append(in_parts(transfer, self.connection, queue, limit, is_quorum=queue in self.quorum))
        return transfer.run()


def in_parts(transfer: Transfer, connection: Connection, queue: str, limit: int, *, is_quorum: bool) -> Parts:
    kind: Callable[..., Gets | Consume] = partial(_Rounds, _Putting()) if is_quorum else Gets
    channels = min(_MOST_CHANNELS, int(connection.wire.params.channel_max) - _OTHER_CHANNELS)
    size, spare = max(PART, -(-limit // channels)), Spare()
    limits = [min(size, limit - start) for start in range(0, limit, size)]
    return Parts(connection, queue, [kind(connection, queue, part, transfer.deliver, spare) for part in limits])
