"""Where a transfer takes messages from: a queue, by pipelined gets or by a consumer (consume.py), or a store.

A queue has a channel of its own. Its deliveries are read without pika, and only this channel may settle them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import error as StructError  # noqa: N812  (struct names its exception in lower case)
from typing import Final, Protocol

from pika.channel import Channel

from dlqbatch import logs
from dlqbatch.amqp.delivery import Delivery, Offer
from dlqbatch.broker import frames
from dlqbatch.broker.connection import Connection, describe
from dlqbatch.broker.frames import FRAME_END, FRAME_OVERHEAD
from dlqbatch.broker.wire import NOT_AMQP
from dlqbatch.errors import BrokerLost, DlqbatchError

_log = logs.get(__name__)

_LARGEST_BODY: Final = 512 * 1024 * 1024
"""Bytes of a body beyond what any setting of a broker allows."""
AHEAD: Final = 256
"""Messages settled before an earlier message of their queue; at so many, that message's confirm is not waited for."""


class Spare:
    """The messages that a run may still take beyond the limits of its queues, which share them."""

    def __init__(self, messages: int = 0) -> None:
        self._left = messages

    def take(self, wanted: int) -> int:
        given = min(wanted, self._left)
        self._left -= given
        return given


class QueueChannel:
    """The channel of a queue: each message is settled or held here, and acknowledged when `flush` finds it due."""

    def __init__(
        self, connection: Connection, queue: str, limit: int, deliver: Callable[[Delivery], None], spare: Spare
    ) -> None:
        self.queue = queue
        self.limit = limit
        self.taken = 0
        self._spare = spare
        self.lost: str | None = None
        """The broker closed the channel: what it had not seen settled is back in the queue."""
        self._connection = connection
        self._deliver = deliver
        self._wire = connection.wire
        self._coming: Delivery | None = None
        self._address, self._exchange, self._key = b"\x00\x00", "", ""
        """Exchange and key of the previous message, as bytes and as text: the next message mostly has the same."""
        self._left = 0
        self._acked = 0
        self._prefix = 0
        self._ahead: set[int] = set()
        self._settled = 0
        self._holding = False
        self._singles: list[int] = []
        self._channel: Channel = connection.open_channel()
        self._closing = False
        self._channel.add_on_close_callback(self._closed)
        self._number: int = self._channel.channel_number
        self._wire.readers[self._number] = self._read_frame

    def settle(self, tag: int) -> None:
        """The message is where it belongs; `flush` acknowledges it."""
        if self.lost is not None:
            return
        self._settled += 1
        if self._holding:
            self._singles.append(tag)
        elif tag == self._prefix + 1:
            self._prefix = tag
            while self._ahead and self._prefix + 1 in self._ahead:
                self._prefix += 1
                self._ahead.discard(self._prefix)
        else:
            self._ahead.add(tag)
            if len(self._ahead) >= AHEAD:
                self.acknowledge_each()

    def hold(self, tag: int, reason: str | None) -> None:  # noqa: ARG002  (part of a receipt)
        """The message stays with us until `release` puts it back."""
        self._settled += 1
        self.acknowledge_each()

    def flush(self) -> None:
        """Send what acknowledgements are due."""
        self._acknowledge(self._due)

    def release(self) -> None:
        """Acknowledge the last, put back what was not settled and close; done once `is_closed`."""
        if self.lost is not None or self._closing:
            return
        self._closing = True
        self.acknowledge_each()
        self._acknowledge(self._due)
        self._put_back()

    def _put_back(self) -> None:
        self._wire.put(frames.requeue(self._number))
        self._wire.flush()
        if self._channel.is_open:
            self._channel.close()

    @property
    def is_closed(self) -> bool:
        return bool(self._channel.is_closed)

    @property
    def is_receiving(self) -> bool:
        """A message of several frames has come in part."""
        return self._coming is not None

    @property
    def ahead(self) -> int:
        """How many wait to be acknowledged together with an earlier message that is not settled yet."""
        return len(self._ahead)

    @property
    def _due(self) -> int:
        return self._prefix - self._acked + len(self._singles)

    def acknowledge_each(self) -> None:
        """Acknowledge singly from here on: a multiple acknowledgement cannot reach past a message that stays."""
        self._singles.extend(self._ahead)
        self._ahead.clear()
        self._holding = True

    def _acknowledge(self, most: int) -> None:
        if self.lost is not None:
            return
        in_order = min(self._prefix - self._acked, most)
        if in_order > 0:
            self._acked += in_order
            self._wire.put(frames.ack(self._number, self._acked, multiple=True))
        singles = self._singles[: most - in_order]
        if singles:
            self._wire.put(b"".join(frames.ack(self._number, tag, multiple=False) for tag in singles))
            del self._singles[: len(singles)]

    def _closed(self, _channel: Channel, error: Exception) -> None:
        self._wire.forget(self._number)
        self.lost = describe(error)
        if not self._closing and not self._connection.is_closing:
            _log.warning("the broker closed a queue's channel", queue=self.queue, why=self.lost)

    def _begin_message(self, buffer: bytes, position: int) -> int:
        """Where the method goes on behind the routing key."""
        address = position + 9
        try:
            if not buffer.startswith(self._address, address):
                self._exchange, after = frames.read_short_string(buffer, address)
                self._key, end = frames.read_short_string(buffer, after)
                self._address = buffer[address:end]
            tag = frames.delivery_tag(buffer, position)[0]
            redelivered = buffer[position + 8] == 1
        except (IndexError, StructError) as error:
            raise BrokerLost(f"{NOT_AMQP}: {type(error).__name__}") from error
        self._coming = Delivery(self, tag, self._exchange, self._key, redelivered)
        self.taken += 1
        return address + len(self._address)

    def _got_message(self, buffer: bytes, position: int) -> None:
        """A message that a get brought; behind it stands how many more are ready.

        What another channel has just put back may not have been counted when the limit was set. Its flag `redelivered`
        distinguishes it from what arrives only now, which is left to the next run.
        """
        end = self._begin_message(buffer, position)
        if self.taken >= self.limit and self._coming is not None and self._coming.redelivered:
            self.limit += self._spare.take(frames.message_count(buffer, end)[0])

    def _read_frame(self, kind: int, buffer: bytes, start: int, end: int) -> int:
        if kind == frames.METHOD:
            if end - start < frames.SHORTEST_METHOD:
                raise BrokerLost(f"{NOT_AMQP}: a method of {end - start} bytes")
            if not self._read_method(frames.method_id(buffer, start)[0], buffer, start + 4):
                return 0
            return end + 1 if self._coming is None else self._read_content(self._coming, buffer, end + 1)
        coming = self._coming
        if coming is None:
            return 0
        if kind == frames.HEADER:
            self._read_header(coming, buffer, start, end)
        else:
            coming.chunks.append(buffer[start : end + 1])  # type: ignore[union-attr]  # ours until it is handed on
            self._left -= end - start
            if self._left < 0:
                raise BrokerLost(f"{NOT_AMQP}: a message longer than it was said to be")
        if self._left == 0:
            self._coming = None
            if not self._closing:
                self._deliver(coming)
        return end + 1

    def _read_header(self, coming: Delivery, buffer: bytes, start: int, end: int) -> None:
        if end - start < frames.SHORTEST_HEADER:
            raise BrokerLost(f"{NOT_AMQP}: a content header of {end - start} bytes")
        coming.body_size, coming.properties = frames.read_content_header(buffer, start, end)
        self._left = coming.body_size
        if coming.body_size > _LARGEST_BODY:
            raise BrokerLost(f"{NOT_AMQP}: a message of {coming.body_size:,} bytes")

    def _read_content(self, coming: Delivery, buffer: bytes, position: int) -> int:
        """Hand on a message that is here whole; the frames of any other message are read singly."""
        content = frames.read_content(buffer, position, self._number)
        if content is None:
            return position
        properties, chunk, position = content
        coming.properties, coming.body_size, coming.chunks = properties, len(chunk) - 1, [chunk]
        self._coming = None
        if not self._closing:
            self._deliver(coming)
        return position

    def _read_method(self, method: int, buffer: bytes, position: int) -> bool:
        raise NotImplementedError


class Fetch(Protocol):
    """Takes at most `limit` messages from one queue and settles what it issued."""

    @property
    def queue(self) -> str: ...
    @property
    def taken(self) -> int: ...
    @property
    def lost(self) -> str | None:
        """Why the broker closed the channel: what it had not seen settled is back in the queue."""

    @property
    def outstanding(self) -> int: ...
    @property
    def ahead(self) -> int:
        """How many wait to be acknowledged together with one that is not settled yet."""

    @property
    def is_receiving(self) -> bool:
        """A message of several frames has come in part."""

    @property
    def is_finished(self) -> bool: ...
    @property
    def is_waiting(self) -> bool:
        """The broker has not answered a get."""

    def ask(self, room: int) -> None: ...
    def acknowledge_each(self) -> None: ...
    def stop(self) -> None: ...
    def flush(self) -> None: ...
    def release(self) -> None: ...
    @property
    def is_closed(self) -> bool: ...


class Gets(QueueChannel):
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

    def _read_method(self, method: int, buffer: bytes, position: int) -> bool:
        if method == frames.GET_OK:
            self._asked -= 1
            self._got_message(buffer, position)
            return True
        if method == frames.GET_EMPTY:
            self._asked -= 1
            self._exhausted = True
            return True
        return False


class MessageSource(Protocol):
    """A store that has messages to publish, and wants to know which the broker took."""

    def more(self, room: int) -> Sequence[Offer] | None:
        """At most so many; none if there are none at the moment, None if there will be no more."""

    def may_publish(self) -> bool:
        """Called before each publish: false if somebody has stopped the run, or what it sends."""

    def confirmed(self, tag: int) -> None: ...
    def held(self, tag: int, reason: str | None) -> None:
        """The message was not published, or nobody knows whether it was."""

    def flush(self) -> None:
        """Called often: the time to write down what was confirmed."""


class StoreFetch:
    """Messages from a store instead of a queue: nothing has to be acknowledged, so it never waits for the broker."""

    queue = ""
    lost: str | None = None
    outstanding = ahead = 0
    is_receiving = is_waiting = False
    is_closed = True

    def __init__(
        self,
        source: MessageSource,
        frame_max: int,
        deliver: Callable[[Delivery], None],
        failed: Callable[[DlqbatchError], None],
    ) -> None:
        self.taken = 0
        self._source = source
        self._chunk = frame_max - FRAME_OVERHEAD
        self._deliver = deliver
        self._failed = failed
        self._exhausted = False

    @property
    def is_finished(self) -> bool:
        return self._exhausted

    def ask(self, room: int) -> None:
        if self._exhausted or room <= 0:
            return
        try:
            offers = self._source.more(room)
        except DlqbatchError as error:
            self._exhausted = True
            self._failed(error)
            return
        if offers is None:
            self._exhausted = True
            return
        for offer in offers:
            self.taken += 1
            delivery = Delivery(self, offer.tag, offer.exchange, offer.routing_key, redelivered=False)
            delivery.properties, delivery.body_size = offer.properties, len(offer.body)
            cuts = range(0, len(offer.body), self._chunk)
            delivery.chunks = [offer.body[cut : cut + self._chunk] + FRAME_END for cut in cuts]
            self._deliver(delivery)

    def stop(self) -> None:
        self._exhausted = True

    def acknowledge_each(self) -> None:
        """Nothing to do: no message waits for the confirm of another message."""

    def flush(self) -> None:
        try:
            self._source.flush()
        except DlqbatchError as error:
            self._failed(error)

    def release(self) -> None:
        self.flush()

    def settle(self, tag: int) -> None:
        self._source.confirmed(tag)

    def hold(self, tag: int, reason: str | None) -> None:
        self._source.held(tag, reason)
