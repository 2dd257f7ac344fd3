"""The main loop of a worker on a connection: take messages, run handlers, publish copies, settle."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from pika.channel import Channel
from pika.exceptions import ChannelClosedByBroker

from dlqbatch import logs
from dlqbatch.amqp.delivery import Delivery, Publish, Route
from dlqbatch.amqp.headers import UNKNOWN_EVENT, WORKER_FAILED
from dlqbatch.broker import frames
from dlqbatch.broker.connection import Connection
from dlqbatch.broker.fetch import QueueChannel, Spare
from dlqbatch.broker.publisher import Publisher
from dlqbatch.broker.queue_types import quorum_queues
from dlqbatch.broker.return_exchanges import Origins
from dlqbatch.broker.session import depths
from dlqbatch.consumer.message import Copies, Message, failure_of
from dlqbatch.errors import BrokerLost, ChannelRefused
from dlqbatch.ingest.dialects import Failure

if TYPE_CHECKING:
    from dlqbatch.consumer import Consumer  # which imports this module

log = logs.get(__name__)

_MOST_UNSETTLED, _MOST_BYTES = 100, 64 * 1024 * 1024
"""Messages whose copies are not confirmed, and bytes of their bodies; beyond that no handler is started."""
_RETAINED: Final = 1 << 40
"""Bytes: no body is dropped, because what could not be published is published again."""
_STUCK_AFTER: Final = 1.0
"""Seconds in which no message comes because the whole prefetch waits for confirms of copies."""
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0
"""Seconds between two attempts to publish what was held."""
_RECOVERED_WITHIN: Final = 30.0
_ANSWERED_WITHIN: Final = 20.0
"""Seconds that the broker has for the last confirms once the worker stops."""
_APPLIED_WITHIN: Final = 0.2
"""Seconds in which a quorum queue applies the last acknowledgements; the close of a channel loses the rest."""


@dataclass(frozen=True, slots=True)
class _AtWork:
    delivery: Delivery
    message: Message
    outcome: Future[Failure | None]


@dataclass(slots=True)
class _Copy:
    """A message whose handler has finished; it is acknowledged once its copy is confirmed."""

    delivery: Delivery
    make: Callable[[], Publish | str]
    """Makes the copy, or says why there can be none now."""
    was_held: bool = False


class Link:
    def __init__(self, consumer: Consumer, connection: Connection, thread: ThreadPoolExecutor) -> None:
        self._consumer = consumer
        self._connection = connection
        self._thread = thread
        depths(connection, [consumer.queue], [consumer.dead_letters])  # TopologyMissing says which is not there
        self._counts_itself = bool(quorum_queues(connection, [consumer.queue], otherwise=False))
        self._copies = Copies(connection.login, frames.properties_limit(connection.frame_max))
        self._origins = Origins(connection)
        self._publisher = Publisher(connection, self, _RETAINED)
        self._waiting: deque[Delivery] = deque()
        self._at_work: _AtWork | None = None
        self._unsettled: dict[int, _Copy] = {}
        """The messages whose copy is not confirmed, by delivery tag."""
        self._held: list[_Copy] = []
        """The unsettled messages whose copy could not be published."""
        self._due: deque[_Copy] = deque()
        """The held messages that are published again now."""
        self._wait = _FIRST_WAIT
        self._again_at = self._alone_until = self._busy_at = self._over_at = time.monotonic()
        self._renewed_at = 0
        """The last delivery tag before the consumer was renewed."""
        self._is_ending = False
        self._subscription = Subscription(connection, consumer.queue, consumer.prefetch, self._waiting.append)

    @property
    def has_begun(self) -> bool:
        """The broker let it consume."""
        return self._subscription.is_accepted

    def serve(self) -> None:
        """Work until the consumer stops; BrokerLost when connection or queue are lost."""
        try:
            self._serve()
        finally:
            if self._at_work is not None:
                # It waits behind a handler of a lost connection; nobody would read its result.
                self._at_work.outcome.cancel()

    def _serve(self) -> None:
        wire, subscription = self._connection.wire, self._subscription
        wire.flush()
        while not self._is_over():
            self._connection.step()
            if subscription.refusal is not None and not subscription.is_accepted:
                raise subscription.refusal
            if subscription.lost is not None or (subscription.is_cancelled and not self._is_ending):
                raise BrokerLost(subscription.lost or f"the queue '{self._consumer.queue}' was deleted")
            if self._consumer.is_stopping and not self._is_ending:
                self._end()
            if self._publisher.is_broken:
                self._publisher.recover(_RECOVERED_WITHIN)
            if not self._publisher.outstanding or time.monotonic() > self._alone_until:
                self._go_on()
            self._publish_again()
            self._make_room()
            wire.flush()
        if self._unsettled:
            log.warning("messages go back unpublished", queue=self._consumer.queue, messages=len(self._unsettled))
        if self._counts_itself:
            self._connection.pause(_APPLIED_WITHIN)

    def _end(self) -> None:
        self._is_ending = True
        self._subscription.cancel()
        if self._at_work is not None and self._at_work.outcome.cancel():
            self._at_work = None

    def _is_over(self) -> bool:
        if not self._is_ending or self._at_work is not None:
            self._over_at = time.monotonic() + _ANSWERED_WITHIN
            return False
        is_answered = self._subscription.is_cancelled and not self._publisher.outstanding
        return is_answered or time.monotonic() > self._over_at

    def _go_on(self) -> None:
        work = self._at_work
        if work is not None and work.outcome.done():
            self._at_work = None
            failure = work.outcome.result()
            if failure is None:
                self._subscription.settle(work.delivery.tag)
            else:
                self._failed(work.delivery, work.message, failure)
        while self._waiting and self._at_work is None and not self._is_ending and not self._is_full():
            delivery = self._waiting.popleft()
            message = Message.of(delivery, self._consumer.queue, counts_itself=self._counts_itself)
            handler = self._consumer.handler_of(message.key)
            if handler is None:
                why = f"no handler of this worker takes '{message.key}'"
                self._give_up(delivery, message, UNKNOWN_EVENT, Failure("UnknownEvent", why))
                continue
            outcome = self._thread.submit(failure_of, handler, delivery.body(), message.context)
            outcome.add_done_callback(self._wake)
            self._at_work = _AtWork(delivery, message, outcome)

    def _wake(self, _: Future[Failure | None]) -> None:
        # The connection may be lost by now; then nobody waits for the result.
        with suppress(Exception):
            self._connection.wire.ioloop.add_callback_threadsafe(lambda: None)

    def _failed(self, delivery: Delivery, message: Message, failure: Failure) -> None:
        queue, retries, most = self._consumer.queue, message.context.retries, self._consumer.max_retries
        why = f"{failure.type}: {failure.message}"
        log.warning("a handler failed", queue=queue, key=message.key, retries=retries, of=most, why=why)
        if retries >= most:
            self._give_up(delivery, message, WORKER_FAILED, failure)
        elif self._counts_itself:
            self._subscription.reject(delivery.tag)
        elif (properties := self._copies.counted(message)) is not None:
            self._publish(_Copy(delivery, partial(self._back, message, properties)))
        else:
            # Without a count it would be tried for ever.
            log.warning("its headers leave no room for a count, so it is given up", queue=queue, key=message.key)
            self._give_up(delivery, message, WORKER_FAILED, failure)

    def _give_up(self, delivery: Delivery, message: Message, reason: str, failure: Failure) -> None:
        made = self._copies.given_up(message, reason, failure)
        if made is None:
            self._publish(_Copy(delivery, lambda: "its headers are too large"))
            return
        identity, properties = made
        publish = Publish(identity, Route(self._consumer.dead_letters, message.key), properties, "")
        self._publish(_Copy(delivery, lambda: publish))

    def _back(self, message: Message, properties: bytes) -> Publish | str:
        """A copy for the end of its queue, with its routing key; or why there is none."""
        self._origins.prepare(message.origin)
        route = self._origins.route(message.origin)
        if route is None:
            return f"no way back to '{message.origin.name}'"
        return Publish(message.journey.id, route, properties, "", None, message.origin)

    def _publish(self, copy: _Copy) -> None:
        self._unsettled[copy.delivery.tag] = copy
        made = copy.make()
        if isinstance(made, str):
            self._hold(copy, made)
        else:
            self._publisher.send(copy.delivery, made)

    def _hold(self, copy: _Copy, why: str) -> None:
        """Keep the message until its copy can be published; other messages go on, and its handler is not run again.

        It is not rejected for the broker to dead-letter: a worker cannot know whether its queue has a dead-letter
        exchange with a queue behind it, and without these the broker drops a rejected message.
        """
        if not self._held:
            self._again_at = time.monotonic() + self._wait
            self._wait = min(self._wait * 2, _LONGEST_WAIT)
        self._held.append(copy)
        if not copy.was_held:
            copy.was_held = True
            log.warning("a message cannot be published, and is held", queue=self._consumer.queue, why=why)

    def _publish_again(self) -> None:
        """Publish each held copy alone: a message that is refused again could double what is under way with it."""
        now = time.monotonic()
        if self._publisher.outstanding:
            return
        if self._held and not self._due and now > self._again_at:
            log.warning("publishes again what it holds", queue=self._consumer.queue, messages=len(self._held))
            # What was missing or refused may be there by now.
            self._origins = Origins(self._connection)
            self._publisher.close()
            self._publisher = Publisher(self._connection, self, _RETAINED)
            self._due.extend(self._held)
            self._held.clear()
        if self._due:
            self._alone_until = now + _STUCK_AFTER
            self._publish(self._due.popleft())

    def _make_room(self) -> None:
        """Renew the consumer where the whole prefetch waits for confirms, so that the messages behind it can come."""
        now = time.monotonic()
        is_idle = not (self._is_ending or self._waiting or self._at_work or self._is_full())
        taking_room = sum(tag > self._renewed_at for tag in self._unsettled) if is_idle else 0
        if taking_room < self._consumer.prefetch:
            self._busy_at = now
        elif now - self._busy_at > _STUCK_AFTER:
            self._subscription.renew()
            self._renewed_at, self._busy_at = self._subscription.taken, now

    def _is_full(self) -> bool:
        sizes = [copy.delivery.body_size for copy in self._unsettled.values()]
        # A single message, however large, does not stop the rest.
        return len(sizes) >= _MOST_UNSETTLED or sum(sizes) - max(sizes, default=0) > _MOST_BYTES

    # What became of each publish.

    def confirmed(self, delivery: Delivery, publish: Publish) -> None:  # noqa: ARG002  (part of the outcome)
        if self._unsettled.pop(delivery.tag).was_held:
            self._wait = _FIRST_WAIT
        self._subscription.settle(delivery.tag)

    def unconfirmed(self, delivery: Delivery, publish: Publish, reason: str) -> None:
        self._hold(self._unsettled[delivery.tag], f"{reason} by exchange '{publish.route.exchange}'")

    def unroutable(self, delivery: Delivery, publish: Publish) -> None:
        why = f"no queue takes it from exchange '{publish.route.exchange}'"
        self._hold(self._unsettled[delivery.tag], why)


class Subscription(QueueChannel):
    def __init__(self, connection: Connection, queue: str, prefetch: int, deliver: Callable[[Delivery], None]) -> None:
        super().__init__(connection, queue, 0, deliver, Spare())
        self.is_cancelled = False
        self.is_accepted = False
        """The broker has accepted the consumer."""
        self.refusal: ChannelRefused | None = None
        self._consumers = 1
        self._wire.put(frames.qos(self._number, prefetch) + self._consume())

    def settle(self, tag: int) -> None:
        if self.lost is None:
            self._wire.put(frames.ack(self._number, tag, multiple=False))

    def reject(self, tag: int) -> None:
        if self.lost is None:
            self._wire.put(frames.reject(self._number, tag))

    def renew(self) -> None:
        """Replace this consumer: what is not settled yet takes no place in the prefetch of the new consumer."""
        if self.lost is None:
            # The new consumer comes first: an auto-delete queue is deleted when its last consumer goes.
            cancel = frames.cancel(self._number, self._name)
            self._consumers += 1
            self._wire.put(self._consume() + cancel)

    def cancel(self) -> None:
        if self.lost is None:
            self._wire.put(frames.cancel(self._number, self._name))

    @property
    def _name(self) -> bytes:
        return b"dlqbatch-%d" % self._consumers

    def _consume(self) -> bytes:
        return frames.consume(self._number, self.queue, self._name)

    def _read_method(self, method: int, buffer: bytes, position: int) -> bool:
        if method == frames.DELIVER:
            self._begin_message(buffer, position + 1 + buffer[position])
        elif method in {frames.CANCEL_OK, frames.CANCEL}:
            # The broker cancels when the queue is deleted; the end of a replaced consumer means nothing.
            if buffer.startswith(self._name, position + 1):
                self.is_cancelled = True
        elif method == frames.CONSUME_OK:
            self.is_accepted = True
        else:
            return method == frames.QOS_OK
        return True

    def _closed(self, channel: Channel, error: Exception) -> None:
        super()._closed(channel, error)
        if isinstance(error, ChannelClosedByBroker):
            self.refusal = ChannelRefused(error.reply_code, error.reply_text)
