"""A channel whose deliveries are read without pika, and the receipts that it has issued."""

from __future__ import annotations

from struct import error as StructError  # noqa: N812  (struct names its exception in lower case)
from typing import TYPE_CHECKING, Final

from dlqbatch import logs
from dlqbatch.broker import frames
from dlqbatch.broker.connection import describe
from dlqbatch.broker.wire import NOT_AMQP
from dlqbatch.errors import BrokerLost
from dlqbatch.message.delivery import Delivery

if TYPE_CHECKING:
    from collections.abc import Callable

    from pika.channel import Channel

    from dlqbatch.broker.connection import Connection

_log = logs.get(__name__)

_LARGEST_BODY = 512 * 1024 * 1024
"""Bytes; no setting of a broker allows more."""

AHEAD: Final = 256
"""Messages settled before an earlier one of their queue; with so many that one's confirm is not waited for any more."""


class Spare:
    """What a run may still take beyond the limits of its queues; they share it."""

    def __init__(self, messages: int = 0) -> None:
        self._left = messages

    def take(self, wanted: int) -> int:
        given = min(wanted, self._left)
        self._left -= given
        return given


class Receiving:
    """One queue's channel: each message is settled here or held, and acknowledged when `flush` finds it due."""

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
        """Exchange and key of the message before, as bytes and as text: most often they are those of the next."""
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
        self._wire.busy[self._number] = self._read

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

    def hold(self, tag: int, reason: str | None) -> None:  # noqa: ARG002  (a receipt is always told which, and why)
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
        self._wire.put(frames.requeue_all(self._number))
        self._wire.flush()
        if self._channel.is_open:
            self._channel.close()

    @property
    def is_closed(self) -> bool:
        return bool(self._channel.is_closed)

    @property
    def ahead(self) -> int:
        """How many wait to be acknowledged together with one that is not settled yet."""
        return len(self._ahead)

    @property
    def _due(self) -> int:
        return self._prefix - self._acked + len(self._singles)

    def acknowledge_each(self) -> None:
        """From here on one by one: a multiple acknowledgement cannot reach past a message that stays."""
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

    def _begin(self, buffer: bytes, position: int) -> int:
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

    def _got(self, buffer: bytes, position: int) -> None:
        """A message that was asked for by itself; behind it stands how many more are ready.

        What another channel has just put back may not have been counted when the limit was set. It is told by its
        flag from what arrives only now, which is left to the next run.
        """
        end = self._begin(buffer, position)
        if self.taken >= self.limit and self._coming is not None and self._coming.redelivered:
            self.limit += self._spare.take(frames.message_count(buffer, end)[0])

    def _read(self, kind: int, buffer: bytes, start: int, end: int) -> int:
        if kind == frames.METHOD:
            if end - start < frames.SHORTEST_METHOD:
                raise BrokerLost(f"{NOT_AMQP}: a method of {end - start} bytes")
            if not self._method(frames.method_id(buffer, start)[0], buffer, start + 4):
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
        """A message that is here whole is handed on at once; the frames of any other come one by one."""
        content = frames.read_content(buffer, position, self._number)
        if content is None:
            return position
        properties, chunk, position = content
        coming.properties, coming.body_size, coming.chunks = properties, len(chunk) - 1, [chunk]
        self._coming = None
        if not self._closing:
            self._deliver(coming)
        return position

    def _method(self, method: int, buffer: bytes, position: int) -> bool:
        raise NotImplementedError
