"""A reader of a stream: what it reads stays there, and whoever reads has to know by himself how far he is.

A stream delivers to a consumer with a prefetch, from an offset on, and every acknowledgement lets it deliver one more.
Nothing is taken away by that, and nothing can be put back: basic.get, basic.nack and basic.reject end the connection.
Between the offsets of messages stand entries of the broker's own, so that offsets count messages at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from struct import Struct
from typing import Final

from dlqbatch.amqp.delivery import Delivery, open_envelope
from dlqbatch.amqp.headers import STREAM_OFFSET
from dlqbatch.amqp.properties import split, without_entries
from dlqbatch.amqp.table import first_fields
from dlqbatch.broker import frames
from dlqbatch.broker.connection import Connection
from dlqbatch.broker.consume import CONSUMERS
from dlqbatch.broker.fetch import QueueChannel, Spare
from dlqbatch.errors import BrokerLost

FIRST: Final = "first"
"""The offset of the oldest message that retention has left."""
LAST: Final = "last"
"""The offset of the last chunk: what was written together in the end."""
_ARGUMENT: Final = bytes((len(STREAM_OFFSET),)) + STREAM_OFFSET
_NUMBER: Final = Struct(">cq").pack
_TEXT: Final = Struct(">cI").pack
_EMPTY_AFTER: Final = 5.0
"""Seconds without any message after which a stream is taken for empty. Only a stream that never held one is."""
_MOST_AHEAD: Final = 256
"""Messages that are on their way at once, if they are small."""
_ALL: Final = 1 << 62
_AHEAD_BYTES: Final = 16 * 1024 * 1024


def offset_of(delivery: Delivery) -> int:
    headers = open_envelope("", "", redelivered=False, body_size=0, properties=delivery.properties).headers
    field = first_fields(headers.foreign).get(STREAM_OFFSET) if headers is not None else None
    offset = field.as_integer() if field is not None else None
    if offset is None:
        raise BrokerLost("a message of a stream came without its offset")
    return offset


def without_offset(properties: bytes) -> bytes:
    """The properties as they were published: a message that leaves its stream has no offset."""
    return without_entries(split(properties), (STREAM_OFFSET,))


class StreamFetch(QueueChannel):
    """Reads from an offset to an offset, or to the end of what is there by now."""

    def __init__(
        self,
        connection: Connection,
        queue: str,
        limit: int,
        deliver: Callable[[Delivery], None],
        start: int | str,
        *,
        ends_at: int | None = None,
        prefetch: int = 1,
        wants: Callable[[Delivery, int], bool] = lambda _delivery, _offset: True,
    ) -> None:
        """Without `ends_at` it reads to the end. What it does not want it acknowledges, and does not count."""
        super().__init__(connection, queue, limit, self._arrived, Spare())
        self._hand_on = deliver
        self._wants = wants
        self._start = start
        self._ends_at = ends_at
        self._prefetch = prefetch
        self._began: float | None = None
        self._is_over = limit <= 0
        self._arrivals = 0
        self._asked_at: int | None = None
        """How many had arrived when the channel was asked whether there is more."""
        self.is_deleted = False
        self.largest = 0
        """Bytes of the largest body so far."""

    outstanding = 0

    @property
    def is_finished(self) -> bool:
        return self.lost is not None or (self._is_over and self._coming is None)

    @property
    def is_waiting(self) -> bool:
        return self._began is not None and not self._arrivals and not self.is_deleted

    def ask(self, room: int) -> None:
        """Begin, or find out whether the end is reached."""
        if self._is_over or self.lost is not None:
            return
        if self._began is None:
            if room > 0:
                self._began = time.monotonic()
                consume = frames.consume(self._number, self.queue, CONSUMERS + b"stream", _argument(self._start))
                self._wire.put(frames.qos(self._number, self._prefetch) + consume)
        elif self._ends_at is not None:
            return
        elif not self._arrivals:
            self._is_over = time.monotonic() - self._began > _EMPTY_AFTER
        elif self._asked_at is None and self._settled == self._arrivals and not self._due:
            # An acknowledgement makes the channel read all that there is, before it looks at the next method.
            self._asked_at = self._arrivals
            self._wire.put(frames.passive_declare(self._number, self.queue))

    def stop(self) -> None:
        self._is_over = True

    def hold(self, tag: int, reason: str | None) -> None:  # noqa: ARG002  (part of a receipt)
        """It stays in the stream whatever is done; not to acknowledge it would only end the deliveries."""
        self.settle(tag)

    def _put_back(self) -> None:
        self._wire.flush()
        if self._channel.is_open:
            self._channel.close()

    def _arrived(self, delivery: Delivery) -> None:
        self._arrivals += 1
        if not self._is_over:
            offset = offset_of(delivery)
            self.largest = max(self.largest, delivery.body_size)
            if self._wants(delivery, offset):
                self._is_over = self.taken >= self.limit or (self._ends_at is not None and offset >= self._ends_at)
                self._hand_on(delivery)
                return
            self._is_over = self._ends_at is not None and offset >= self._ends_at
        self.taken -= 1
        self.settle(delivery.tag)

    def _read_method(self, method: int, buffer: bytes, position: int) -> bool:
        if method == frames.DELIVER:
            self._begin_message(buffer, position + 1 + buffer[position])
        elif method == frames.DECLARE_OK and self._asked_at is not None:
            # With something left of the prefetch, the channel has met the end, however much is written meanwhile.
            self._is_over = self._is_over or self._arrivals - self._asked_at < self._prefetch
            self._asked_at = None
        elif method == frames.CANCEL:
            self._is_over = self.is_deleted = True
        else:
            return method in {frames.CONSUME_OK, frames.QOS_OK}
        return True


def _argument(offset: int | str) -> bytes:
    if isinstance(offset, int):
        return _ARGUMENT + _NUMBER(b"l", offset)
    return _ARGUMENT + _TEXT(b"S", len(offset)) + offset.encode()


class End:
    """Where a stream begins and ends by now, and how large its messages are there."""

    def __init__(self, connection: Connection, queue: str, seconds: float) -> None:
        self.first: int | None = None
        """The offset of the oldest message; None if there is none."""
        self.last: int | None = None
        self.prefetch = 1
        """How many messages may be under way at once."""
        largest = look(connection, queue, FIRST, 1, seconds, self._first_is)
        if not self.is_empty:
            largest = max(largest, look(connection, queue, LAST, _ALL, seconds, self._last_is))
        self.prefetch = max(1, min(_MOST_AHEAD, _AHEAD_BYTES // max(largest, 1)))

    @property
    def is_empty(self) -> bool:
        """It holds nothing, or does not say what in time."""
        return self.first is None

    def _first_is(self, _delivery: Delivery, offset: int) -> None:
        self.first = offset

    def _last_is(self, _delivery: Delivery, offset: int) -> None:
        self.last = offset


def look(
    connection: Connection,
    queue: str,
    start: int | str,
    limit: int,
    seconds: float,
    see: Callable[[Delivery, int], None],
) -> int:
    """Show at most so many messages from there to the end; return the size of the largest body."""

    def deliver(delivery: Delivery) -> None:
        see(delivery, offset_of(delivery))
        delivery.receipt.settle(delivery.tag)

    until = time.monotonic() + seconds
    fetch = StreamFetch(connection, queue, limit, deliver, start, prefetch=min(limit, _MOST_AHEAD))
    try:
        while not fetch.is_finished:
            if time.monotonic() > until:
                raise BrokerLost(f"the end of the stream '{queue}' was not found within {seconds:g} s")
            fetch.flush()
            fetch.ask(1)
            connection.wire.flush()
            connection.step()
        if fetch.lost is not None:
            raise BrokerLost(f"'{queue}': {fetch.lost}")
    finally:
        if not connection.is_closing:
            fetch.release()
            connection.wait(lambda: fetch.is_closed, "channel.close")
    return fetch.largest
