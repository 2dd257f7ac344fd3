"""What queues are declared with, by what becomes of their messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

Arguments = Mapping[str, str | int]

DEAD_LETTER_EXCHANGE: Final = "x-dead-letter-exchange"
DEAD_LETTER_KEY: Final = "x-dead-letter-routing-key"
TTL: Final = "x-message-ttl"
QUEUE_TYPE: Final = "x-queue-type"
DELIVERY_LIMIT: Final = "x-delivery-limit"

QUORUM: Final[dict[str, str | int]] = {QUEUE_TYPE: "quorum"}
AT_LEAST_ONCE: Final[dict[str, str | int]] = {
    "x-dead-letter-strategy": "at-least-once",
    "x-overflow": "reject-publish",
}
"""What makes the broker's own hop to the dead-letter exchange safe; only quorum queues know it."""


def queue_read(queue_type: str, *, unlimited_deliveries: bool) -> dict[str, str | int]:
    """Of a queue that dlqbatch takes from.

    From 4.0 a quorum queue drops a message after 20 deliveries unless told otherwise; older brokers refuse to be told.
    """
    if queue_type != "quorum":
        return {}
    return {**QUORUM, DELIVERY_LIMIT: -1} if unlimited_deliveries else dict(QUORUM)


def queue_worked_on(queue_type: str) -> dict[str, str | int]:
    """Of a queue whose messages the broker itself moves on when they fail or expire."""
    return QUORUM | AT_LEAST_ONCE if queue_type == "quorum" else {}
