"""The messages that every contender works on: failed ones, as a broker and Spring would leave them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import pika

if TYPE_CHECKING:
    from pika.adapters.blocking_connection import BlockingChannel

FAILED_AT: Final = datetime(2026, 1, 1, tzinfo=UTC)
ORIGIN: Final = "bench-orders"
EVENTS: Final = [f"orders.{region}.created" for region in ("eu", "us", "asia", "africa")]
STACK: Final = (
    "java.lang.IllegalStateException: time-out\n" + "\tat com.example.orders.Service.place(Service.java:42)\n" * 4
)


def properties(number: int) -> pika.BasicProperties:
    event = EVENTS[number % len(EVENTS)]
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


def fill(channel: BlockingChannel, queue: str, number: int, size: int) -> None:
    """Publish failed messages straight into a queue, and wait until they are all there."""
    body = b"x" * size
    for each in range(number):
        channel.basic_publish("", queue, body, properties(each))
    # Publishes and this method are answered in order, but a queue enqueues on its own time.
    while channel.queue_declare(queue, passive=True).method.message_count < number:
        channel.connection.process_data_events(0.01)


def connect(url: str) -> pika.BlockingConnection:
    parts = urlsplit(url)
    if parts.hostname not in {"127.0.0.1", "localhost", "::1"}:
        raise SystemExit(f"a benchmark only ever loads a broker on this machine, not {parts.hostname}")
    return pika.BlockingConnection(pika.URLParameters(url))
