"""A plain consumer's channel, where each message is settled by itself."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from pika.exceptions import ChannelClosedByBroker

from dlqbatch.broker import frames
from dlqbatch.broker.receiving import Receiving, Spare
from dlqbatch.errors import ChannelRefused

if TYPE_CHECKING:
    from collections.abc import Callable

    from pika.channel import Channel

    from dlqbatch.broker.connection import Connection
    from dlqbatch.message.delivery import Delivery

_REJECT: Final = Struct(">BHIHHQBB").pack


class Subscription(Receiving):
    def __init__(self, connection: Connection, queue: str, prefetch: int, deliver: Callable[[Delivery], None]) -> None:
        super().__init__(connection, queue, 0, deliver, Spare())
        self.is_cancelled = False
        self.is_accepted = False
        """The broker has begun to deliver, or would if there was something."""
        self.refusal: ChannelRefused | None = None
        self._consumers = 1
        self._wire.put(frames.qos(self._number, prefetch) + self._consume())

    def settle(self, tag: int) -> None:
        if self.lost is None:
            self._wire.put(frames.ack(self._number, tag, multiple=False))

    def reject(self, tag: int) -> None:
        """Back into the queue; on a quorum queue it counts, on every version of the broker."""
        if self.lost is None:
            self._wire.put(_REJECT(frames.METHOD, self._number, 13, 60, 90, tag, 1, 0xCE))

    def renew(self) -> None:
        """Another consumer in place of this one: what is not settled yet takes no place of its prefetch."""
        if self.lost is None:
            # The new one first: a queue that deletes itself does so when its last consumer goes.
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

    def _method(self, method: int, buffer: bytes, position: int) -> bool:
        if method == frames.DELIVER:
            self._begin(buffer, position + 1 + buffer[position])
        elif method in {frames.CANCEL_OK, frames.CANCEL}:
            # The broker cancels by itself when the queue is deleted; one that was replaced ends without harm.
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
