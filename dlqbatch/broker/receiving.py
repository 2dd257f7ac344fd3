"""A channel whose deliveries are read without pika, and the receipts that it has issued."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlqbatch import logs
from dlqbatch.broker import frames
from dlqbatch.broker.connection import describe
from dlqbatch.message.delivery import Delivery

if TYPE_CHECKING:
    from collections.abc import Callable

    from pika.channel import Channel

    from dlqbatch.broker.connection import Connection

_log = logs.get(__name__)


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

    def hold(self, tag: int) -> None:  # noqa: ARG002  (a receipt is always told which)
        """The message stays with us until `release` puts it back."""
        # A multiple ack cannot reach past a message that stays; from here on each is acknowledged on its own.
        self._settled += 1
        self._singles.extend(self._ahead)
        self._ahead.clear()
        self._holding = True

    def flush(self) -> None:
        """Send what acknowledgements are due."""
        self._acknowledge(self._due)

    def release(self) -> None:
        """Acknowledge the last, put back what was not settled and close; done once `is_closed`."""
        if self.lost is not None or self._closing:
            return
        self._closing = True
        self._singles.extend(self._ahead)
        self._ahead.clear()
        self._acknowledge(self._due)
        self._wire.put(frames.requeue_all(self._number))
        self._wire.flush()
        if self._channel.is_open:
            self._channel.close()

    @property
    def is_closed(self) -> bool:
        return bool(self._channel.is_closed)

    @property
    def _due(self) -> int:
        return self._prefix - self._acked + len(self._singles)

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
        tag = frames.delivery_tag(buffer, position)[0]
        exchange, after = frames.read_short_string(buffer, position + 9)
        key, end = frames.read_short_string(buffer, after)
        self._coming = Delivery(self, tag, exchange, key, buffer[position + 8] == 1)
        self.taken += 1
        return end

    def _got(self, buffer: bytes, position: int) -> None:
        """A message that was asked for by itself; behind it stands how many more are ready.

        What another channel has just put back may not have been counted when the limit was set. It is told by its
        flag from what arrives only now, which is left to the next run.
        """
        end = self._begin(buffer, position)
        if self.taken >= self.limit and self._coming is not None and self._coming.redelivered:
            self.limit += self._spare.take(frames.message_count(buffer, end)[0])

    def _read(self, kind: int, buffer: bytes, start: int, end: int) -> bool:
        if kind == frames.METHOD:
            return self._method(frames.method_id(buffer, start)[0], buffer, start + 4)
        coming = self._coming
        if coming is None:
            return False
        if kind == frames.HEADER:
            coming.body_size, coming.properties = frames.read_content_header(buffer, start, end)
            self._left = coming.body_size
        else:
            coming.chunks.append(buffer[start : end + 1])  # type: ignore[union-attr]  # ours until it is handed on
            self._left -= end - start
        if self._left == 0:
            self._coming = None
            if not self._closing:
                self._deliver(coming)
        return True

    def _method(self, method: int, buffer: bytes, position: int) -> bool:
        raise NotImplementedError
