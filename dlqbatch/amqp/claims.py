"""Where a message failed by the word of a client: what other software and the failure contract write into headers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import unquote, urlsplit

from dlqbatch.amqp.headers import (
    FAILED_EXCHANGE,
    FAILED_KEY,
    FAILED_QUEUE,
    MASSTRANSIT_ADDRESS,
    MOLECULER_CHANNEL,
    MOLECULER_GROUP,
    NSERVICEBUS_QUEUE,
    PLACES,
    RASCAL,
    SPRING_EXCHANGE,
    SPRING_KEY,
    Headers,
)
from dlqbatch.amqp.rascal import failed_in
from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.amqp.table import Field

# A longer address is not parsed; a name in it is measured on its own.
_LONGEST_CLAIM: Final = 4096


def is_claimed(headers: Headers) -> bool:
    """Whether a client says in headers where the message failed."""
    return FAILED_QUEUE in headers.ours or not PLACES.isdisjoint(headers.claims)


def claimed_origin(headers: Headers) -> Origin | None:
    """The failure contract goes before other software's headers, which stay in a message for ever."""
    return _handed_over(headers.ours) or _by_other_software(headers.claims)


def _handed_over(ours: Mapping[bytes, Field]) -> Origin | None:
    """The queue that a client failed in, and how it had received the message there."""
    queue, exchange, key = (_text(ours, name) for name in (FAILED_QUEUE, FAILED_EXCHANGE, FAILED_KEY))
    return Origin(queue, exchange, queue if key is None else key) if queue else None


def _by_other_software(claims: Mapping[bytes, Field]) -> Origin | None:
    exchange = _text(claims, SPRING_EXCHANGE)
    if exchange is not None:
        key = _text(claims, SPRING_KEY) or ""
        # Published to the default exchange, the key is the queue.
        return Origin(None, exchange, key) if exchange else Origin(key, "", key) if key else None
    if RASCAL in claims and (origin := failed_in(claims)) is not None:
        return origin
    channel, group = _text(claims, MOLECULER_CHANNEL), _text(claims, MOLECULER_GROUP)
    if channel and group:
        return Origin(f"{group}.{channel}", None, channel)
    queue = _text(claims, NSERVICEBUS_QUEUE)
    if queue is not None:
        queue = queue.split("@", 1)[0]
    else:
        address = _text(claims, MASSTRANSIT_ADDRESS)
        queue = _queue_of_address(address) if address is not None else None
    return Origin(queue, None, queue) if queue else None


def _queue_of_address(address: str) -> str | None:
    """rabbitmq://host/virtual-host/queue?options, or queue:name."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return None
    return unquote(parts.path.rsplit("/", 1)[-1]) or None


def _text(claims: Mapping[bytes, Field], name: bytes) -> str | None:
    field = claims.get(name)
    return None if field is None or len(field.value) > _LONGEST_CLAIM else field.as_text()
