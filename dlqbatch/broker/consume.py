"""A consumer of a quorum queue that never delivers more than it may, in rounds.

On a quorum queue each get is a round through the log, and acknowledgements still under way are lost when a channel
closes. A consumer is an order of magnitude faster and, cancelled in the right order, loses none. Its states:

    READY -> CONSUMING -> CANCELLING -> CANCELLED -> GETTING -> READY       one round
    READY -> GETTING                                                        the first message, and the last two
    CONSUMING -> CANCELLED                                                  the broker cancels: the queue was deleted
    GETTING -> FINISHED, READY -> FINISHED                                  the queue is empty, the limit is reached, or
                                                                            the run stops
    any state -> ENDING                                                     what was settled late wants one more get
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from typing import ClassVar, Final

from dlqbatch.amqp.delivery import Delivery
from dlqbatch.broker import frames
from dlqbatch.broker.connection import Connection
from dlqbatch.broker.fetch import QueueChannel, Spare

PREFETCH: Final = 512
CONSUMERS: Final = b"dlqbatch-"
"""The beginning of the tags of all our consumers."""
_ROUND: Final = 32
"""Prefetches in a round; where memory allowed only a small prefetch, the next round computes it again."""
# A channel of a quorum queue keeps back single acknowledgements beyond 32, and loses them when it is closed; up to this
# many it always hands on.
_APPLIED_AT_ONCE: Final = 16
_RESERVE: Final = 2
"""Messages that a round's consumer leaves: for a probe, and for the get at its end."""


class State(Enum):
    READY = "a round may begin"
    CONSUMING = "the broker delivers"
    CANCELLING = "the cancel is sent"
    CANCELLED = "what was delivered is waited for"
    GETTING = "one get is sent"
    ENDING = "the last get is sent"
    FINISHED = "nothing more is taken"


class Event(Enum):
    CONSUME = "a consumer is started"
    CANCEL = "the consumer is cancelled"
    CANCELLED = "the broker says that there is no consumer any more"
    GET = "one message is asked for by itself"
    MORE = "there may be more to take"
    END = "there is nothing more to take"
    RELEASE = "the channel is to be closed, with many late acknowledgements"


MOVES: Final = {
    Event.CONSUME: {State.READY: State.CONSUMING},
    Event.CANCEL: {State.CONSUMING: State.CANCELLING},
    Event.CANCELLED: {State.CONSUMING: State.CANCELLED, State.CANCELLING: State.CANCELLED},
    Event.GET: {State.READY: State.GETTING, State.CANCELLED: State.GETTING},
    Event.MORE: {State.GETTING: State.READY},
    Event.END: {State.GETTING: State.FINISHED, State.READY: State.FINISHED},
    Event.RELEASE: dict.fromkeys(State, State.ENDING),
}
"""The next state by event and state; in any other state an event changes nothing."""


class Consume(QueueChannel):
    """A consumer with a prefetch, in rounds: consume, cancel, acknowledge the rest, get a single message.

    As long as what is acknowledged and the prefetch together stay below the limit, the broker cannot deliver more.
    It must have delivered all that it may, or have nothing left, before the consumer is cancelled: what a quorum queue
    has assigned to a consumer by then, but not sent, stays assigned until the channel closes, and counts as delivered.
    The get at the end of a round makes the channel apply the acknowledgements it has put aside, which would be lost
    at its close; and it says whether the queue is empty, which a consumer never learns.
    """

    probes_after: ClassVar[float] = 0.01
    """Seconds without a delivery after which a passive declaration shows whether the queue is empty."""
    probes_at: ClassVar[int] = 0
    """Ready messages up to which a get makes sure that the queue is empty; with more, deliveries are on their way."""
    gives_up_after: ClassVar[float] = 0.2
    """Seconds after which a round ends without another probe, or begins although messages are not settled."""

    def __init__(
        self, connection: Connection, queue: str, limit: int, deliver: Callable[[Delivery], None], spare: Spare
    ) -> None:
        super().__init__(connection, queue, limit, deliver, spare)
        self._state = State.READY if limit > 0 else State.FINISHED
        self._stopping = False
        self._rounds = 0
        self._consumer = b""
        self._quota = 0
        """What this round's consumer may deliver."""
        self._delivered = 0
        self._credited = 0
        """Acknowledgements sent in this round; each lets the broker deliver one message more."""
        self._prefetch = 0
        self._has_asked_depth = False
        self._depth_asked_at = 0.0
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
        """Messages that the broker may still send without another request."""
        if self.lost is not None:
            return 0
        if self._state is State.GETTING:
            return 1
        if self._state in {State.CONSUMING, State.CANCELLING}:
            return self._prefetch + self._credited - self._delivered + self._probing
        return 0

    @property
    def is_finished(self) -> bool:
        return self.lost is not None or (self._state is State.FINISHED and self._coming is None)

    @property
    def is_waiting(self) -> bool:
        return self._state is State.GETTING

    def ask(self, room: int) -> None:
        """Take the next step of the round, if there is a step to take."""
        # The last two messages are got singly, at once.
        if self._state is State.READY and room > 0 and (self.limit - self.taken <= _RESERVE or self._has_waited()):
            self._acknowledge_settled()
            self._start_round(room)
        elif self._state is State.CONSUMING and not self._probing:
            self._continue_round()
        elif self._state is State.CANCELLED and self._has_waited():
            self._acknowledge_settled()
            self._get_one()

    def stop(self) -> None:
        self._stopping = True
        if self._state is State.READY:
            self._move(Event.END)

    def release(self) -> None:
        """Close as any channel does; messages that were settled after the last round's get need another get first.

        That get may bring a message too many, which goes back and counts as delivered. Without the get, all messages
        whose acknowledgements the channel keeps back would come back, and be there twice.
        """
        late = len(self._singles) + len(self._ahead)
        if self.lost is not None or self._closing or late <= _APPLIED_AT_ONCE:
            super().release()
            return
        self._closing = True
        self.acknowledge_each()
        self._acknowledge(self._due)
        self._move(Event.RELEASE)
        self._wire.put(frames.get(self._number, self.queue))
        self._wire.flush()

    def flush(self) -> None:
        if self._state is not State.CONSUMING or self._stopping:
            return
        # Only as many as keep the deliveries within the quota, and in batches.
        allowed = self._quota - self._prefetch - self._credited
        batch = min(self._due, allowed)
        if batch > 0 and (batch == allowed or batch >= self._prefetch // 8):
            self._last_change = time.monotonic()
            self._credited += batch - self._not_consumed(batch)
            self._acknowledge(batch)

    def _not_consumed(self, batch: int) -> int:
        """How many of these came by a get: their acknowledgement lets the broker deliver nothing more."""
        in_order = min(self._prefix - self._acked, batch)
        singles = self._singles[: batch - in_order]
        has_probed = self._acked < self._probed <= self._acked + in_order or self._probed in singles
        return has_probed + sum(tag <= self._before for tag in singles)

    def _move(self, event: Event) -> None:
        self._state = MOVES[event].get(self._state, self._state)

    def _has_waited(self) -> bool:
        """All is settled; or something is so late that the others do not wait for it any longer."""
        return self._settled == self.taken or time.monotonic() - self._last_change > self.gives_up_after

    def _acknowledge_settled(self) -> None:
        if self._settled < self.taken:
            self.acknowledge_each()
        self._acknowledge(self._due)

    def _start_round(self, room: int) -> None:
        self._quota = self.limit - self.taken - _RESERVE
        # The very first message is got alone: it shows whether there is any, and how large the messages are.
        if self._quota < 1 or self.taken == 0:
            self._get_one()
            return
        self._prefetch = min(PREFETCH, self._quota, room)
        self._quota = min(self._quota, self._prefetch * _ROUND)
        self._delivered = self._credited = self._probed = 0
        self._before = self.taken
        self._may_probe = True
        self._depth_asked_at = 0.0
        # A quorum queue remembers a consumer as long as it holds messages. Another consumer of the same name would get
        # what the broker takes for missing, and RabbitMQ 3.10 breaks down over that.
        self._rounds += 1
        self._consumer = b"%b%d" % (CONSUMERS, self._rounds)
        self._move(Event.CONSUME)
        self._last_change = time.monotonic()
        self._wire.put(
            frames.qos(self._number, self._prefetch) + frames.consume(self._number, self.queue, self._consumer)
        )

    def _continue_round(self) -> None:
        all_settled = self._settled == self.taken
        if not self.outstanding:
            # With everything settled, the prefetch is used up by messages that stay, or by a message without a confirm.
            if self._delivered >= self._quota or self._stopping or self._has_waited():
                self._cancel()
        elif all_settled or self._stopping:
            now = time.monotonic()
            if self._has_asked_depth:
                return
            if now - self._last_change > self.gives_up_after:
                self._cancel()
            elif self._may_probe and now - max(self._last_change, self._depth_asked_at) > self.probes_after:
                self._has_asked_depth = True
                self._wire.put(frames.passive_declare(self._number, self.queue))

    def _cancel(self) -> None:
        self._move(Event.CANCEL)
        self._wire.put(frames.cancel(self._number, self._consumer))

    def _got_message(self, buffer: bytes, position: int) -> None:
        """The first get also says how many messages there are, and raises a limit that was counted too low.

        A get goes through the queue's log, behind everything that was published before. A declare does not: right after
        a restart it counts only what the queue has read of its log so far.
        """
        if self.taken:
            super()._got_message(buffer, position)
            return
        ready = frames.message_count(buffer, self._begin_message(buffer, position))[0]
        self.limit += self._spare.take(max(ready + 1 - self.limit, 0))

    def _get_one(self) -> None:
        self._move(Event.GET)
        self._wire.put(frames.get(self._number, self.queue))

    def _read_method(self, method: int, buffer: bytes, position: int) -> bool:
        if method == frames.DELIVER:
            self._delivered += 1
            self._last_change = time.monotonic()
            self._begin_message(buffer, position + 1 + buffer[position])
        elif self._state is State.ENDING and method in {frames.GET_OK, frames.GET_EMPTY}:
            if method == frames.GET_OK:
                self._begin_message(buffer, position)
            self._put_back()
        elif method == frames.GET_OK:
            self._got_message(buffer, position)
            self._answered(is_empty=False)
        elif method == frames.GET_EMPTY:
            self._answered(is_empty=True)
        elif method == frames.DECLARE_OK and self._has_asked_depth:
            self._depth_told(*frames.message_count(buffer, position + 1 + buffer[position]))
        elif method in {frames.CANCEL_OK, frames.CANCEL}:
            # The broker cancels by itself when the queue is deleted.
            self._move(Event.CANCELLED)
        else:
            return method in {frames.CONSUME_OK, frames.QOS_OK}
        return True

    def _depth_told(self, ready: int) -> None:
        self._has_asked_depth, self._depth_asked_at = False, time.monotonic()
        if ready <= self.probes_at and self._state is State.CONSUMING:
            self._may_probe, self._probing = False, True
            self._wire.put(frames.get(self._number, self.queue))

    def _answered(self, *, is_empty: bool) -> None:
        self._last_change = time.monotonic()
        if self._probing:
            self._probing = False
            if not is_empty:
                self._probed = self.taken  # tags count from one
            # The probe went behind our acknowledgements, and what they had assigned is sent before a cancel is read.
            if is_empty and self._state is State.CONSUMING:
                self._cancel()
        else:
            self._move(Event.END if is_empty or self._stopping or self.taken >= self.limit else Event.MORE)
