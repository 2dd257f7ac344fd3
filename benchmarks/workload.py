"""The messages that every contender works on: failed ones, as a broker and Spring would leave them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import pika
from pika import frame, spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pika.adapters.blocking_connection import BlockingChannel

FAILED_AT: Final = datetime(2026, 1, 1, tzinfo=UTC)
ORIGIN: Final = "bench-orders"
EVENTS: Final = [f"orders.{region}.created" for region in ("eu", "us", "asia", "africa")]
STACK: Final = (
    "java.lang.IllegalStateException: time-out\n" + "\tat com.example.orders.Service.place(Service.java:42)\n" * 4
)
PER_SECOND: Final = 10
"""Of so many messages the failures died in the same second."""
SECONDS: Final = 500
"""Deaths of so many seconds; then they begin anew, so that not every message has to be written by the library."""
PIECE: Final = 131_072 - 8
WRITTEN_AT_ONCE: Final = 1 << 20
_NUMBER: Final = b"0000000000"


def properties(number: int, event: str | None = None) -> pika.BasicProperties:
    event = EVENTS[number % len(EVENTS)] if event is None else event
    death = {
        "count": 1,
        "reason": "rejected",
        "queue": ORIGIN,
        "time": FAILED_AT,
        "exchange": "orders",
        "routing-keys": [event],
    }
    headers = {
        "x-death": [death],
        "x-first-death-exchange": "orders",
        "x-first-death-queue": ORIGIN,
        "x-first-death-reason": "rejected",
        "x-exception-message": "time-out after 5000 ms",
        "x-exception-stacktrace": STACK,
        "x-original-exchange": "orders",
        "x-original-routingKey": event,
        "tenant": "acme",
    }
    return pika.BasicProperties(
        content_type="application/json",
        delivery_mode=2,
        headers=headers,
        message_id=f"message-{number}",
        correlation_id=f"order-{number}",
    )


def fill(
    channel: BlockingChannel, queue: str, number: int, size: int, *, there: int = 0, events: Sequence[str] = EVENTS
) -> None:
    """Publish failed messages straight into a queue that holds `there` already, and wait until they are all there."""
    # The library writes a message more slowly than the broker takes it: what differs in the ids alone is written once.
    heads: dict[tuple[int, str], bytes] = {}
    bodies = _body(channel.channel_number, b"x" * size)
    parts: list[bytes] = []
    gathered = 0
    for each in range(number):
        kind = (each // PER_SECOND % SECONDS, events[each % len(events)])
        head = heads.get(kind)
        if head is None:
            head = heads[kind] = _head(channel.channel_number, queue, size, *kind)
        parts += (head.replace(_NUMBER, b"%010d" % each), bodies)
        gathered += len(head) + len(bodies)
        if gathered > WRITTEN_AT_ONCE or each == number - 1:
            _write(channel, b"".join(parts))
            parts, gathered = [], 0
    # Publishes and this method are answered in order, but a queue enqueues on its own time.
    while channel.queue_declare(queue, passive=True).method.message_count < there + number:
        channel.connection.process_data_events(0.01)


def _head(channel: int, queue: str, size: int, second: int, event: str) -> bytes:
    found = properties(0, event)
    found.headers["x-death"][0]["time"] += timedelta(seconds=second)
    found.message_id, found.correlation_id = f"message-{_NUMBER.decode()}", f"order-{_NUMBER.decode()}"
    publish = frame.Method(channel, spec.Basic.Publish(exchange="", routing_key=queue))
    return bytes(publish.marshal() + frame.Header(channel, size, found).marshal())


def _body(channel: int, body: bytes) -> bytes:
    return b"".join(frame.Body(channel, body[start : start + PIECE]).marshal() for start in range(0, len(body), PIECE))


def _write(channel: BlockingChannel, data: bytes) -> None:
    channel.connection._impl._adapter_emit_data(data)  # noqa: SLF001  (what pika itself writes frames with)
    channel.connection._flush_output()  # noqa: SLF001  (what pika itself writes frames with)


def connect(url: str) -> pika.BlockingConnection:
    parts = urlsplit(url)
    if parts.hostname not in {"127.0.0.1", "localhost", "::1"}:
        raise SystemExit(f"a benchmark only ever loads a broker on this machine, not {parts.hostname}")
    return pika.BlockingConnection(pika.URLParameters(url))
