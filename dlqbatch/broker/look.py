"""A look at the messages at the head of a queue, which puts them back where they were.

What keeps the order was measured on RabbitMQ 3.10.8 and 4.3.6, with some hundred messages out of more:

- a classic queue takes each message back into its place, however it was taken;
- a quorum queue takes back what one consumer holds in its order; what single gets hold comes back in any order;
- before RabbitMQ 4 a quorum queue without a delivery limit puts what is rejected by a nack at its end; what a closed
  channel held goes to its head, on every version, and counts as delivered;
- from RabbitMQ 4.3 on a nack does not count as delivered.

A consumer would make an auto-delete queue go when it is cancelled; those are classic, and gets are no consumers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from dlqbatch.amqp.delivery import Delivery
from dlqbatch.broker import frames
from dlqbatch.broker.connection import Connection
from dlqbatch.broker.consume import CONSUMERS
from dlqbatch.broker.fetch import Gets, QueueChannel, Spare
from dlqbatch.broker.streams import FIRST, StreamFetch
from dlqbatch.broker.versions import DELAYS_RETRIES

_QUIET: Final = 2.0
"""Seconds without a delivery after which what was counted is taken to be with somebody else."""
_TAG: Final = CONSUMERS + b"peek"


class QuorumHead(QueueChannel):
    """A consumer that may hold so many messages, and gives all of them back at once."""

    def __init__(
        self, connection: Connection, queue: str, limit: int, deliver: Callable[[Delivery], None], *, nacks: bool
    ) -> None:
        super().__init__(connection, queue, limit, deliver, Spare())
        self._nacks = nacks
        self._changed: float | None = None
        self._is_over = False

    @property
    def is_finished(self) -> bool:
        return self.lost is not None or (self._is_over and self._coming is None)

    def ask(self, _room: int) -> None:
        now = time.monotonic()
        if self._changed is None:
            self._changed = now
            consume = frames.consume(self._number, self.queue, _TAG)
            self._wire.put(frames.qos(self._number, self.limit) + consume)
        elif now - self._changed > _QUIET and self._coming is None:
            self._is_over = True

    def release(self) -> None:
        if self.lost is not None or self._closing:
            return
        self._closing = True
        if self._nacks and self.taken:
            # Cancelled first, or the queue would deliver them again at once.
            self._wire.put(frames.cancel(self._number, _TAG))
            self._wire.flush()
            return
        self._close()

    def _close(self) -> None:
        self._wire.flush()
        if self._channel.is_open:
            self._channel.close()

    def _read_method(self, method: int, buffer: bytes, position: int) -> bool:
        if method == frames.DELIVER:
            self._begin_message(buffer, position + 1 + buffer[position])
            self._changed = time.monotonic()
            self._is_over = self.taken >= self.limit
        elif method == frames.CANCEL_OK:
            self._wire.put(frames.requeue(self._number))
            self._close()
        elif method == frames.CANCEL:
            self._is_over = True
        else:
            return method in {frames.CONSUME_OK, frames.QOS_OK}
        return True


def look_at_head(
    connection: Connection,
    queue: str,
    kind: str,
    limit: int,
    see: Callable[[Delivery], None],
    stopped: Callable[[], bool],
) -> str | None:
    """Show so many messages, put them back, and wait until the broker has them; why the broker ended it, if it did."""
    if limit < 1:
        return None

    def deliver(delivery: Delivery) -> None:
        see(delivery)
        delivery.chunks = None

    fetch: Gets | QuorumHead | StreamFetch
    if kind == "stream":

        def shown(delivery: Delivery) -> None:
            deliver(delivery)
            delivery.receipt.settle(delivery.tag)

        fetch = StreamFetch(connection, queue, limit, shown, FIRST, prefetch=min(limit, 16))
    elif kind == "quorum":
        fetch = QuorumHead(connection, queue, limit, deliver, nacks=connection.version >= DELAYS_RETRIES)
    else:
        fetch = Gets(connection, queue, limit, deliver, Spare())
    try:
        while not fetch.is_finished and not stopped():
            fetch.flush()
            fetch.ask(limit)
            connection.wire.flush()
            connection.step()
        return fetch.lost
    finally:
        if not connection.is_closing:
            fetch.release()
            connection.wait(lambda: fetch.is_closed, "channel.close")
