"""Looking through a deep queue: most messages stay, and each that leaves is acknowledged at the same price.

A channel keeps what it has delivered in one list, and the broker walks it for every single acknowledgement. With all
that stays on one channel, looking through 50,000 messages ran at a twentieth of the speed of a drain, and slower with
every message more. So what stays is spread over channels that take a part each, one after another.

What stays goes back part by part. A classic queue puts each message into its old place and walks there from its head,
so the last part goes first. A quorum queue takes them in the order they come back, so there the first goes first.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from operator import attrgetter
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, cast

from dlqbatch.broker.fetch import Consume, Gets
from dlqbatch.broker.receiving import Spare
from dlqbatch.broker.session import Session
from dlqbatch.broker.transfer import Transfer
from dlqbatch.errors import BrokerLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlqbatch.broker.connection import Connection
    from dlqbatch.broker.fetch import Fetch
    from dlqbatch.broker.transfer import Tally
    from dlqbatch.message.delivery import Delivery, Instruction

PART: Final = 256
"""Messages that one channel takes, unless there would be too many channels."""
_MOST_CHANNELS: Final = 1000
_OTHER_CHANNELS: Final = 8
"""Kept free for publishing and for asking."""


_PATIENCE: Final = 10.0
"""Seconds in all that one look waits in vain for messages to be back."""
_NACK: Final = Struct(">BHIHHQBB").pack


def _requeue(channel: int, tag: int) -> bytes:
    """Everything on the channel up to this tag, which must be there: for another one the broker closes the channel."""
    return _NACK(1, channel, 13, 60, 120, tag, 0b11, 0xCE)


class _Patience:
    """Shared by the parts of a look, so that a queue whose messages others take does not cost it for every part."""

    def __init__(self) -> None:
        self.left = _PATIENCE
        self.ready = 0
        """What the part before has left in the queue."""


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
        patience: _Patience,
        connection: Connection,
        queue: str,
        limit: int,
        deliver: Callable[[Delivery], None],
        spare: Spare,
    ) -> None:
        super().__init__(connection, queue, limit, deliver, spare)
        self._patience = patience
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
            # A leader that is too busy to answer is told of as a depth of 0.
            back, ready = 0, self._ready() or self._ready() or self._patience.ready
            for end in (*self._ends, self.taken):
                upto = bisect_right(held, end)
                if upto > back:
                    self._wire.put(_requeue(self._number, held[upto - 1]))
                    ready += upto - back
                    self._until_back(ready)
                    back = upto
            self._patience.ready = ready
        super().release()

    def _until_back(self, ready: int) -> None:
        """From RabbitMQ 4 on a nack of one message overtakes one of many; only the queue's depth tells that it is in.

        Where others take what comes back, the depth tells nothing, and nobody could tell the order either.
        """
        began = time.monotonic()
        while self.lost is None and self._ready() < ready:
            if time.monotonic() - began > self._patience.left:
                self._patience.left = 0.0
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

    def _got(self, buffer: bytes, position: int) -> None:
        super()._got(buffer, position)
        self._ends.extend((self.taken - 1, self.taken))


def _is_closed(part: Gets | Consume) -> bool:
    return part.is_closed


class Parts:
    """A fetch made of fetches; the next one asks when the one before it has all its answers, so the order is kept."""

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
        """What is confirmed late may belong to a part before."""
        return self._parts[max(self._current - 3, 0) : self._current + 1]

    def release(self) -> None:
        """Wait for each channel to close before the next one puts its part back, or they would overtake each other."""
        ordered = self._parts if isinstance(self._parts[0], Consume) else self._parts[::-1]
        for part in ordered:
            part.release()
            if part.taken:
                self._connection.wait(partial(_is_closed, part), "channel.close")

    @property
    def is_closed(self) -> bool:
        return all(part.is_closed for part in self._parts)


class _Look(Transfer):
    """A transfer from one queue, in parts."""

    def look(self, queue: str, limit: int, *, is_quorum: bool) -> Tally:
        kind: Callable[..., Gets | Consume] = partial(_Rounds, _Patience()) if is_quorum else Gets
        connection, none = self._connection, Spare()
        channels = min(_MOST_CHANNELS, int(connection.wire.params.channel_max) - _OTHER_CHANNELS)
        size = max(PART, -(-limit // channels))
        starts = range(0, limit, size)
        parts = [kind(connection, queue, min(size, limit - start), self._take, none) for start in starts]
        # It reads like a fetch; that nobody can set its numbers from outside is no loss.
        self._fetches.append(cast("Fetch", Parts(connection, queue, parts)))
        return self.run(())

    def _last_words(self) -> None:
        with suppress(BrokerLost):
            super()._last_words()


@dataclass(frozen=True, slots=True)
class LookingSession(Session):
    """One run's connection, for a run that leaves most of what it sees."""

    def look(self, queue: str, limit: int, handle: Callable[[Delivery], Instruction]) -> Tally:
        """At most so many from one queue; what is held stays away from others until the call returns."""
        told = self.bounds.progress
        bounds = replace(self.bounds, progress=lambda taken, _: told(taken, limit))
        return _Look(self.connection, self.origins, handle, bounds).look(queue, limit, is_quorum=queue in self.quorum)
