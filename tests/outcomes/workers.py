"""Consumers in threads of their own, and what they really did with the message that is followed."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pika
from pika.exceptions import AMQPError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Truth:
    """What happened to one message, by those who did it; the only source that judges a claim."""

    ticket: bytes
    copies: int = 1
    """How many queues have to handle it."""
    events: list[tuple[float, str, str]] = field(default_factory=list)
    """Time, what (delivered, acknowledged, rejected, requeued, …), and the queue."""
    is_over: bool = False
    """What happens from now on, while everything is taken down, does not count."""

    def note(self, what: str, queue: str) -> None:
        if not self.is_over:
            self.events.append((time.time(), what, queue))

    def first(self, what: str) -> float | None:
        return next((at for at, happened, _ in list(self.events) if happened == what), None)

    @property
    def acknowledged_at(self) -> float | None:
        """When the last of the queues that it went to had it acknowledged."""
        found = {queue: at for at, what, queue in reversed(list(self.events)) if what == "acknowledged"}
        return max(found.values()) if len(found) >= self.copies else None

    @property
    def rejected_at(self) -> float | None:
        return self.first("rejected")


class Worker:
    """One consumer of one queue; `act` says what it does with each message, ours or not."""

    def __init__(
        self,
        url: str,
        queue: str,
        truth: Truth,
        act: Callable[[Hands], None],
        *,
        prefetch: int = 1,
        auto_ack: bool = False,
        polls: bool = False,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        self.url, self.queue, self.truth, self.act = url, queue, truth, act
        self.prefetch, self.auto_ack, self.polls = prefetch, auto_ack, polls
        self.arguments = arguments or {}
        self._stop = threading.Event()
        self.is_consuming = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def join(self) -> None:
        if self._thread.is_alive():
            self._thread.join(20)

    def _run(self) -> None:
        while not self._stop.is_set():
            with suppress(AMQPError, OSError):
                self._serve()
            self._stop.wait(12)

    def _serve(self) -> None:
        connection = pika.BlockingConnection(pika.URLParameters(self.url))
        channel = connection.channel()
        try:
            if self.polls:
                self._poll(connection, channel)
                return
            channel.basic_qos(prefetch_count=self.prefetch)

            def deliver(_: object, method: Any, properties: Any, body: bytes) -> None:
                self._hand(connection, channel, method, properties, body)

            channel.basic_consume(self.queue, deliver, auto_ack=self.auto_ack, arguments=self.arguments)
            self.is_consuming.set()
            while not self._stop.is_set() and channel.is_open:
                connection.process_data_events(0.2)
        finally:
            with suppress(AMQPError):
                connection.close()

    def _poll(self, connection: Any, channel: Any) -> None:
        self.is_consuming.set()
        while not self._stop.is_set():
            method, properties, body = channel.basic_get(self.queue)
            if method is None:
                connection.process_data_events(0.2)
                time.sleep(0.8)
            else:
                self._hand(connection, channel, method, properties, body)

    def _hand(self, connection: Any, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        hands = Hands(self, connection, channel, method, properties, body)
        if hands.is_ours:
            self.truth.note("delivered", self.queue)
            if self.auto_ack:
                self.truth.note("acknowledged", self.queue)
        self.act(hands)


class Crash(OSError):
    """The worker dies of the message."""


@dataclass
class Hands:
    """One delivered message and what can be done with it."""

    worker: Worker
    connection: Any
    channel: Any
    method: Any
    properties: Any
    body: bytes

    @property
    def is_ours(self) -> bool:
        return self.body == self.worker.truth.ticket

    @property
    def times(self) -> int:
        return sum(1 for _, what, _ in self.worker.truth.events if what == "delivered")

    def _note(self, what: str) -> None:
        if self.is_ours:
            self.worker.truth.note(what, self.worker.queue)

    def ack(self) -> None:
        if self.worker.auto_ack:
            return
        # Noted before it is done: what is claimed from this moment on may be true.
        self._note("acknowledged")
        self.channel.basic_ack(self.method.delivery_tag)

    def reject(self) -> None:
        self._note("rejected")
        self.channel.basic_reject(self.method.delivery_tag, requeue=False)

    def put_back(self) -> None:
        self._note("put back")
        self.channel.basic_reject(self.method.delivery_tag, requeue=True)

    def requeue(self) -> None:
        self._note("requeued")
        self.channel.basic_nack(self.method.delivery_tag, requeue=True)

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        self.connection.call_later(seconds, do)

    def crash(self) -> None:
        self._note("crashed")
        raise Crash

    def give_up(self, exchange: str, key: str) -> None:
        """Publish it as it came."""
        self._note("rejected")
        self.channel.basic_publish(exchange, key, self.body, self.properties)
