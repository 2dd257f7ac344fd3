"""Publishing with confirms, many at once; the transfer or the worker gets each outcome."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from pika.channel import Channel

from dlqbatch import logs
from dlqbatch.amqp.delivery import STOPPED, Delivery, Publish, Route
from dlqbatch.amqp.headers import ID, scan
from dlqbatch.amqp.properties import split
from dlqbatch.amqp.table import LONGEST_NAME, to_bytes
from dlqbatch.broker import frames
from dlqbatch.broker.connection import Connection, describe
from dlqbatch.broker.refusals import NO_PERMISSION, NOT_FOUND, is_of_one_key

_REFUSED: Final = "publish-refused"
_log = logs.get(__name__)


class Outcome(Protocol):
    """The receiver of what became of each publish; called from within a read."""

    def confirmed(self, delivery: Delivery, publish: Publish) -> None: ...
    def unconfirmed(self, delivery: Delivery, publish: Publish, reason: str) -> None: ...
    def unroutable(self, delivery: Delivery, publish: Publish) -> None: ...


class Publisher:
    """A confirm channel, replaced when the broker closes it because of a message that it does not accept."""

    def __init__(
        self,
        connection: Connection,
        outcome: Outcome,
        retain_bytes: int,
        refused: frozenset[str] = frozenset(),
        may_publish: Callable[[], bool] | None = None,
    ) -> None:
        """`may_publish` is called before each publish, also before a repeated publish; None: always."""
        self._may_publish = may_publish
        self._connection = connection
        self._put = connection.wire.put
        self._outcome = outcome
        self._retain_bytes = retain_bytes
        self._retained = 0
        self._careful = False
        self._pending: dict[int, tuple[Delivery, Publish]] = {}
        self._returned: set[int] = set()
        self._sequence = 0
        self._first = 1
        """The first sequence number that no multiple confirm has answered."""
        self._backlog: deque[tuple[Delivery, Publish]] = deque()
        """What waits until the channel is open and trusted again."""
        self._suspects: deque[tuple[Delivery, Publish]] = deque()
        """What was under way when the broker closed the channel."""
        self._refused: set[str | Route] = set(refused)
        """Exchanges that take nothing from us, and single routes where a topic permission is missing."""
        self._methods: dict[tuple[str, str], bytes] = {}
        self._channel: Channel | None = None
        self._returning: Route | None = None
        self._returning_left = 0
        self._open()

    @property
    def outstanding(self) -> int:
        return len(self._pending) + len(self._suspects) + len(self._backlog)

    @property
    def retained_bytes(self) -> int:
        """Bytes of bodies that are kept until their confirm, so that they could be sent again."""
        return self._retained

    def send(self, delivery: Delivery, publish: Publish) -> None:
        """Publish; exactly one call of the outcome answers it."""
        if self._refused and self._is_refused(publish.route):
            self._outcome.unconfirmed(delivery, publish, _REFUSED)
        elif self._channel is None or self._careful:
            self._backlog.append((delivery, publish))
        else:
            self._emit(delivery, publish)

    def recover(self, seconds: float) -> None:
        """After a refusal: open the channel again, and publish singly to find the message that the broker refuses.

        What was under way may have been enqueued without a confirm. Sending it again can double it, and so would
        leaving it; a run that stopped here would stop here for ever.
        """
        deadline = time.monotonic() + seconds
        self._suspects.extend(self._pending.values())
        self._pending = {}
        self._returned.clear()
        self._retained = 0
        self._careful = True
        self._open()
        while self._suspects:
            delivery, publish = self._suspects.popleft()
            if self._is_refused(publish.route):
                self._outcome.unconfirmed(delivery, publish, _REFUSED)
                continue
            if self._may_publish is not None and not self._may_publish():
                # The broker may have taken it before the channel closed.
                self._outcome.unconfirmed(delivery, publish, "not-confirmed")
                continue
            self._emit(delivery, publish)
            self._connection.wire.flush()
            answer_within = max(deadline - time.monotonic(), 0.0)
            self._connection.wait(lambda: not self._pending or self._channel is None, "a publish", answer_within)
            if self._channel is None:
                self._blame()
                self._open()
        self._careful = False
        backlog, self._backlog = self._backlog, deque()
        for delivery, publish in backlog:
            self.send(delivery, publish)
        self._connection.wire.flush()

    @property
    def is_broken(self) -> bool:
        return self._channel is None

    def abandon(self, reason: str) -> None:
        """Report everything that has no confirm yet as unconfirmed."""
        unanswered = (*self._pending.values(), *self._suspects, *self._backlog)
        self._pending = {}
        self._suspects.clear()
        self._backlog.clear()
        for delivery, publish in unanswered:
            self._outcome.unconfirmed(delivery, publish, reason)

    def close(self) -> None:
        if self._channel is not None and self._channel.is_open:
            # pika does not wait for what is still in the outbox.
            self._connection.wire.flush()
            self._channel.close()

    def _open(self) -> None:
        selected: list[object] = []
        channel = self._connection.open_channel()
        channel.confirm_delivery(ack_nack_callback=lambda _: None, callback=selected.append)
        self._connection.wait(lambda: selected, "confirm.select")
        channel.add_on_close_callback(self._closed)
        self._sequence, self._first = 0, 1
        self._methods.clear()
        self._number: int = channel.channel_number
        self._channel = channel
        self._connection.wire.readers[self._number] = self._read_frame

    def _closed(self, channel: Channel, error: Exception) -> None:
        self._connection.wire.forget(channel.channel_number)
        if channel is self._channel:
            self._channel = None
            self._code, self._text = getattr(error, "reply_code", 0), describe(error)

    def _blame(self) -> None:
        """Blame the only message that was under way when the channel closed, unless it was answered before."""
        if not self._pending:
            return
        delivery, publish = self._pending.popitem()[1]
        self._retained = 0
        _log.warning(
            "the broker refuses a message", exchange=publish.route.exchange, key=publish.route.key, why=self._text
        )
        if self._code in (NO_PERMISSION, NOT_FOUND):
            self._refused.add(publish.route if is_of_one_key(self._text) else publish.route.exchange)
        self._outcome.unconfirmed(delivery, publish, _REFUSED)

    def _is_refused(self, route: Route) -> bool:
        return route.exchange in self._refused or route in self._refused

    def _emit(self, delivery: Delivery, publish: Publish) -> None:
        if self._may_publish is not None and not self._may_publish():
            self._outcome.unconfirmed(delivery, publish, STOPPED)
            return
        chunks = delivery.chunks
        if chunks is None:
            # Its body was dropped to save memory; it stays where it is for the next run.
            self._outcome.unconfirmed(delivery, publish, "not-confirmed")
            return
        method = self._methods.get(publish.route) or self._method(publish.route)
        if not method:
            self._outcome.unconfirmed(delivery, publish, _REFUSED)
            return
        sequence, size = self._sequence + 1, delivery.body_size
        self._sequence = sequence
        self._pending[sequence] = (delivery, publish)
        if size <= _JOINED:
            self._put(frames.content(self._number, method, size, publish.properties, chunks))
        else:
            self._put(frames.content(self._number, method, size, publish.properties, ()))
            for chunk in chunks:
                self._put(frames.body(self._number, chunk))
        if self._retained + size > self._retain_bytes:
            delivery.chunks = None
        else:
            self._retained += size

    def _method(self, route: Route) -> bytes:
        """The encoded basic.publish; empty if no broker could take it."""
        if max(len(to_bytes(name)) for name in route) > LONGEST_NAME:
            return b""
        if len(self._methods) > _METHODS_KEPT:
            self._methods.clear()
        method = self._methods[route] = frames.publish(self._number, *route)
        return method

    def _read_frame(self, kind: int, buffer: bytes, start: int, end: int) -> int:
        if kind == frames.METHOD:
            method = frames.method_id(buffer, start)[0]
            if method == frames.CONFIRM_ACK:
                self._settle(frames.delivery_tag(buffer, start + 4)[0], buffer[start + 12] & 1, taken=True)
            elif method == frames.CONFIRM_NACK:
                self._settle(frames.delivery_tag(buffer, start + 4)[0], buffer[start + 12] & 1, taken=False)
            elif method == frames.RETURN:
                self._returning = _route(buffer, start + 4)
            else:
                return 0
            return end + 1
        if self._returning is None:
            return 0
        if kind == frames.HEADER:
            self._returning_left, properties = frames.read_content_header(buffer, start, end)
            self._mark_returned(self._returning, properties)
        else:
            self._returning_left -= end - start
        if self._returning_left == 0:
            self._returning = None
        return end + 1

    def _settle(self, tag: int, multiple: int, *, taken: bool) -> None:
        if not multiple:
            self._answer(tag, taken)
            return
        # Confirms come in multiples and out of order: some of these may have had a confirm of their own.
        last = min(tag, self._sequence)
        for sequence in range(self._first, last + 1):
            self._answer(sequence, taken)
        self._first = max(self._first, last + 1)

    def _answer(self, sequence: int, taken: bool) -> None:
        found = self._pending.pop(sequence, None)
        if found is None:
            return
        delivery, publish = found
        if delivery.chunks is not None:
            self._retained -= delivery.body_size
        if self._returned and sequence in self._returned:
            # An unroutable message is returned first and then confirmed.
            self._returned.discard(sequence)
            self._outcome.unroutable(delivery, publish)
        elif taken:
            self._outcome.confirmed(delivery, publish)
        else:
            self._outcome.unconfirmed(delivery, publish, "not-confirmed")

    def _mark_returned(self, route: Route, properties: bytes) -> None:
        """A return carries no tag, and copies may share an id: whatever it could be counts as returned.

        At worst a copy that was routed is doubled; taking a returned one for routed would lose it.
        """
        identity = _identity(properties)
        for sequence, (_, publish) in self._pending.items():
            if publish.route == route and identity in (None, publish.id):
                self._returned.add(sequence)


_METHODS_KEPT: Final = 10_000
_JOINED: Final = 16 * 1024
"""Bytes of a body that is copied into one piece with its frames; a larger one is passed on as it came."""


def _route(buffer: bytes, position: int) -> Route:
    """Exchange and routing key of a basic.return; a code and a text stand before them."""
    _, position = frames.read_short_string(buffer, position + 2)
    exchange, position = frames.read_short_string(buffer, position)
    return Route(exchange, frames.read_short_string(buffer, position)[0])


def _identity(properties: bytes) -> str | None:
    cut = split(properties)
    identity = scan(cut.data, cut.table_start, cut.table_end).ours.get(ID)
    return identity and identity.as_text()
