"""Workers in threads of a test, and the queues of their step."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pika
import pytest
from program import HANGS_AFTER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from broker_client import Side

    from dlqbatch.consumer import Consumer

STEP, QUEUE, DEAD, EVENT = "settlements", "settlement", "dlq.settlement", "settlement.requested"
KINDS = pytest.mark.parametrize("kind", ["classic", "quorum"])


def make_step(side: Side, kind: str) -> None:
    side.channel.exchange_declare(STEP, "fanout", durable=True)
    side.channel.exchange_declare(DEAD, "fanout", durable=True)
    limit = {"delivery_limit": 3} if kind == "quorum" else {}
    side.queue(QUEUE, kind, dead_letter_exchange=DEAD, **limit)
    side.queue(DEAD)
    side.channel.queue_bind(QUEUE, STEP)
    side.channel.queue_bind(DEAD, DEAD)


@contextlib.contextmanager
def working(consumer: Consumer) -> Iterator[None]:
    thread = threading.Thread(target=consumer.run)
    thread.start()
    try:
        yield
    finally:
        consumer.stop()
        thread.join(HANGS_AFTER)
        assert not thread.is_alive()


def publish(side: Side, body: bytes = b"1", key: str = EVENT, **properties: Any) -> None:
    side.channel.basic_publish(STEP, key, body, pika.BasicProperties(delivery_mode=2, **properties))
