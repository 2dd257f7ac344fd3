"""Two ways to take messages from one queue, within a limit: pipelined gets, and a consumer that never over-delivers.

Classic queues are fetched by basic.get, many outstanding. On a quorum queue each get is a round through the log, and
acknowledgements still under way are lost when a channel closes; there a consumer is an order of magnitude faster and,
cancelled in the right order, loses none.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

from dlqbatch import logs
from dlqbatch.broker import frames
from dlqbatch.broker.receiving import Receiving

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlqbatch.broker.connection import Connection
    from dlqbatch.broker.receiving import Spare
    from dlqbatch.message.delivery import Delivery

_log = logs.get(__name__)

PREFETCH: Final = 512
_ROUND: Final = 32
"""Prefetches in one round; where memory allowed only a small one, the next round asks again."""
_APPLIED_AT_ONCE: Final = 16
"""Acknowledgements one by one that a channel of a quorum queue hands on whatever comes next; it keeps back what is more
than 32, and forgets that when it is closed."""
_RESERVE: Final = 2
"""Messages that a round's consumer leaves: one for a probe, one for the get at its end."""


class Fetch(Protocol):
    """Takes at most `limit` messages from one queue and settles what it issued."""

    queue: str
    taken: int
    lost: str | None
    """The broker closed the channel: what it had not seen settled is back in the queue."""

    @property
    def outstanding(self) -> int: ...
    @property
    def ahead(self) -> int:
        """How many wait to be acknowledged together with one that is not settled yet."""

    @property
    def is_finished(self) -> bool: ...
    @property
    def is_waiting(self) -> bool:
        """It has asked for a message, and the broker has not answered."""

    def ask(self, room: int) -> None: ...
    def acknowledge_each(self) -> None: ...
    def stop(self) -> None: ...
    def flush(self) -> None: ...
    def release(self) -> None: ...
    @property
    def is_closed(self) -> bool: ...


class Gets(Receiving):
    """Pipelined basic.get; the broker answers them in order."""

    def __init__(
        self, connection: Connection, queue: str, limit: int, deliver: Callable[[Delivery], None], spare: Spare
    ) -> None:
        super().__init__(connection, queue, limit, deliver, spare)
        self._get = frames.get(self._number, queue)
        self._asked = 0
        self._exhausted = limit <= 0

    @property
    def outstanding(self) -> int:
        """Gets that have no answer yet."""
        return 0 if self.lost is not None else self._asked

    @property
    def is_finished(self) -> bool:
        return self.lost is not None or (
            not self._asked and self._coming is None and (self._exhausted or self.taken >= self.limit)
        )

    @property
    def is_waiting(self) -> bool:
        return self._asked > 0

    def ask(self, room: int) -> None:
        more = min(room, self.limit - self.taken - self._asked)
        if more > 0 and not self._exhausted and self.lost is None:
            self._asked += more
            self._wire.put(self._get * more)

    def stop(self) -> None:
        self._exhausted = True

    def _method(self, method: int, buffer: bytes, position: int) -> bool:
        if method == frames.GET_OK:
            self._asked -= 1
            self._got(buffer, position)
            return True
        if method == frames.GET_EMPTY:
            self._asked -= 1
            self._exhausted = True
            return True
        return False


class Consume(Receiving):
    """A consumer with a prefetch, in rounds: consume, cancel, acknowledge the rest, get one.

    As long as what is acknowledged and the prefetch together stay below the limit, the broker cannot deliver more.
    It must have delivered all that it may, or have nothing left, before the consumer is cancelled: what a quorum queue
    has assigned to a consumer by then, but not sent, stays assigned until the channel closes, and counts as delivered.
    The get at the end of a round makes the channel apply the acknowledgements it has put aside, which would be lost
    at its close; and it says whether the queue is empty, which a consumer is never told.
    """

    probes_after: ClassVar[float] = 0.01
    """Seconds without a delivery after which the queue may be empty, or the broker slow: it is asked which."""
    probes_at: ClassVar[int] = 0
    """With at most so many ready a get makes sure. With more it would bring what comes after all that is on its way."""
    gives_up_after: ClassVar[float] = 0.2
    """The same for a round whose one get was used up, and for what is not settled before the next."""

    def __init__(
        self, connection: Connection, queue: str, limit: int, deliver: Callable[[Delivery], None], spare: Spare
    ) -> None:
        super().__init__(connection, queue, limit, deliver, spare)
        self._state = "ready" if limit > 0 else "finished"
        self._stopping = False
        self._rounds = 0
        self._consumer = b""
        self._quota = 0
        """What this round's consumer may deliver."""
        self._delivered = 0
        self._credited = 0
        """Acknowledgements sent in this round; each lets the broker deliver one more."""
        self._prefetch = 0
        self._looking = False
        self._looked = 0.0
        self._probing = False
        self._may_probe = False
        self._probed = 0
        """The tag of what a probe has got."""
        self._before = 0
        """The last tag before this round."""
        self._last_change = 0.0
        """When the broker last delivered something, or was last allowed to."""

    @property
    def outstanding(self) -> int:
        """What the broker may still send without being asked again."""
        if self.lost is not None:
            return 0
        if self._state == "getting":
            return 1
        if self._state in {"consuming", "cancelling"}:
            return self._prefetch + self._credited - self._delivered + self._probing
        return 0

    @property
    def is_finished(self) -> bool:
        return self.lost is not None or (self._state == "finished" and self._coming is None)

    @property
    def is_waiting(self) -> bool:
        return self._state == "getting"

    def ask(self, room: int) -> None:
        """Go one step on, if there is one to go."""
        # The last two are got one by one, at once.
        if self._state == "ready" and room > 0 and (self.limit - self.taken <= _RESERVE or self._has_waited()):
            self._acknowledge_settled()
            self._start_round(room)
        elif self._state == "consuming" and not self._probing:
            self._continue_round()
        elif self._state == "cancelled" and self._has_waited():
            self._acknowledge_settled()
            self._get_one()

    def stop(self) -> None:
        self._stopping = True
        if self._state == "ready":
            self._state = "finished"

    def release(self) -> None:
        """As of any channel; but what was settled after the last round's get wants one of its own.

        It may bring a message too many. That one goes back, which counts as a delivery; without it all those that the
        channel has put aside would come back, and be there twice.
        """
        late = len(self._singles) + len(self._ahead)
        if self.lost is not None or self._closing or late <= _APPLIED_AT_ONCE:
            super().release()
            return
        self._closing = True
        self.acknowledge_each()
        self._acknowledge(self._due)
        self._state = "ending"
        self._wire.put(frames.get(self._number, self.queue))
        self._wire.flush()

    def flush(self) -> None:
        if self._state != "consuming" or self._stopping:
            return
        # Only as many as keep what the broker may deliver within the quota, and not one by one.
        allowed = self._quota - self._prefetch - self._credited
        batch = min(self._due, allowed)
        if batch > 0 and (batch == allowed or batch >= self._prefetch // 8):
            self._last_change = time.monotonic()
            self._credited += batch - self._strangers(batch)
            self._acknowledge(batch)

    def _strangers(self, batch: int) -> int:
        """How many of these were no deliveries to the consumer: to acknowledge one lets the broker deliver nothing."""
        in_order = min(self._prefix - self._acked, batch)
        singles = self._singles[: batch - in_order]
        has_probed = self._acked < self._probed <= self._acked + in_order or self._probed in singles
        return has_probed + sum(tag <= self._before for tag in singles)

    def _has_waited(self) -> bool:
        """All is settled; or something is so late that the others do not wait for it any longer."""
        return self._settled == self.taken or time.monotonic() - self._last_change > self.gives_up_after

    def _acknowledge_settled(self) -> None:
        if self._settled < self.taken:
            self.acknowledge_each()
        self._acknowledge(self._due)

    def _start_round(self, room: int) -> None:
        self._quota = self.limit - self.taken - _RESERVE
        # The very first message is got alone: it tells whether there is one, and how large they are.
        if self._quota < 1 or self.taken == 0:
            self._get_one()
            return
        self._prefetch = min(PREFETCH, self._quota, room)
        self._quota = min(self._quota, self._prefetch * _ROUND)
        self._delivered = self._credited = self._probed = 0
        self._before = self.taken
        self._may_probe = True
        self._looked = 0.0
        # A quorum queue remembers a consumer as long as messages of its are held. Another one of the same name would be
        # sent what the broker takes for missing, and RabbitMQ 3.10 breaks down over that.
        self._rounds += 1
        self._consumer = b"dlqbatch-%d" % self._rounds
        self._state = "consuming"
        self._last_change = time.monotonic()
        self._wire.put(
            frames.qos(self._number, self._prefetch) + frames.consume(self._number, self.queue, self._consumer)
        )

    def _continue_round(self) -> None:
        all_settled = self._settled == self.taken
        if not self.outstanding:
            # With everything settled, the prefetch is used up by messages that stay; or one of it is never confirmed.
            if self._delivered >= self._quota or self._stopping or self._has_waited():
                self._cancel()
        elif all_settled or self._stopping:
            now = time.monotonic()
            if self._looking:
                return
            if now - self._last_change > self.gives_up_after:
                self._cancel()
            elif self._may_probe and now - max(self._last_change, self._looked) > self.probes_after:
                self._looking = True
                self._wire.put(frames.look(self._number, self.queue))

    def _cancel(self) -> None:
        self._state = "cancelling"
        self._wire.put(frames.cancel(self._number, self._consumer))

    def _get_one(self) -> None:
        self._state = "getting"
        self._wire.put(frames.get(self._number, self.queue))

    def _method(self, method: int, buffer: bytes, position: int) -> bool:
        if self._state == "ending":
            if method == frames.GET_OK:
                self._begin(buffer, position)
            if method in {frames.GET_OK, frames.GET_EMPTY}:
                self._put_back()
                return True
        if method == frames.DELIVER:
            self._delivered += 1
            self._last_change = time.monotonic()
            self._begin(buffer, position + 1 + buffer[position])
        elif method == frames.GET_OK:
            self._got(buffer, position)
            self._answered(is_empty=False)
        elif method == frames.GET_EMPTY:
            self._answered(is_empty=True)
        elif method == frames.DECLARE_OK and self._looking:
            self._looked_at(*frames.message_count(buffer, position + 1 + buffer[position]))
        elif method in {frames.CANCEL_OK, frames.CANCEL}:
            # The broker cancels by itself when the queue is deleted.
            self._state = "cancelled"
        else:
            return method in {frames.CONSUME_OK, frames.QOS_OK}
        return True

    def _looked_at(self, ready: int) -> None:
        self._looking, self._looked = False, time.monotonic()
        if ready <= self.probes_at and self._state == "consuming":
            self._may_probe, self._probing = False, True
            self._wire.put(frames.get(self._number, self.queue))

    def _answered(self, *, is_empty: bool) -> None:
        self._last_change = time.monotonic()
        if self._probing:
            self._probing = False
            if not is_empty:
                self._probed = self.taken  # tags count from one
            # The probe went behind our acknowledgements, and what they had assigned is sent before a cancel is read.
            if is_empty and self._state == "consuming":
                self._cancel()
        elif is_empty:
            self._state = "finished"
        else:
            self._state = "finished" if self._stopping or self.taken >= self.limit else "ready"
