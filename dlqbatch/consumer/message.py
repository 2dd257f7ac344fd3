"""One delivery, as its worker sees it."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dlqbatch.message import headers as names
from dlqbatch.message.envelope import Envelope, Journey, Origin, journey_so_far, open_envelope, valid_id
from dlqbatch.message.readable import readable
from dlqbatch.message.returns import RETURN_PREFIX
from dlqbatch.message.table import fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlqbatch.message.delivery import Delivery

WORKER_RETRIES: Final = b"dlqbatch-worker-retries"
"""Our own count, on classic queues; the broker counts only on quorum queues."""
_DELIVERY_COUNT: Final = b"x-delivery-count"


@dataclass(frozen=True, slots=True)
class Context:
    """What a handler is told beside the body."""

    routing_key: str
    """As it was published, also after retries."""
    retries: int
    """How often this message was tried before."""
    redelivered: bool
    message_id: str | None
    headers: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Message:
    envelope: Envelope
    journey: Journey
    """As it would be published again."""
    origin: Origin
    context: Context

    @property
    def key(self) -> str:
        return self.origin.key

    @classmethod
    def of(cls, delivery: Delivery, queue: str, *, counts_itself: bool) -> Message:
        """`counts_itself`: the queue is one that counts deliveries."""
        envelope = open_envelope(
            delivery.exchange, delivery.routing_key, delivery.redelivered, delivery.body_size, delivery.properties
        )
        headers = envelope.headers or names.NONE
        journey = journey_so_far(headers)
        recorded = journey.origin if isinstance(journey, Journey) else None
        is_from_elsewhere = False
        if recorded is not None and _is_here(recorded, queue, delivery.exchange):
            origin = recorded._replace(queue=queue)
        else:
            through_return = delivery.exchange.startswith(RETURN_PREFIX)
            origin = Origin(queue, None if through_return else delivery.exchange, delivery.routing_key)
            is_from_elsewhere = recorded is not None
        if not isinstance(journey, Journey):
            journey = Journey(id=valid_id(headers), retries=None)
        elif is_from_elsewhere:
            # It failed elsewhere before, or is a copy of one that did: here it is another message.
            journey = Journey(parent=journey.id or None, trips=journey.trips)
        first = journey.first_failed_at if journey.first_failed_at is not None else int(time.time())
        journey = journey._replace(id=journey.id or uuid.uuid4().hex, origin=origin, first_failed_at=first)
        told = readable(delivery.properties)
        message_id = told.properties.get("message_id")
        counts = [0]
        if counts_itself and _DELIVERY_COUNT in headers.brokers:
            counts.append(headers.brokers[_DELIVERY_COUNT].as_integer() or 0)
        if not is_from_elsewhere:
            counts += [field.as_integer() or 0 for name, field in fields(headers.foreign) if name == WORKER_RETRIES]
        context = Context(
            routing_key=origin.key,
            retries=max(counts),
            redelivered=delivery.redelivered,
            message_id=message_id if isinstance(message_id, str) else None,
            headers=told.headers,
        )
        return cls(envelope, journey, origin, context)


def _is_here(recorded: Origin, queue: str, exchange: str) -> bool:
    """Where only an exchange was known, as for what it could not route, what comes from there has failed before."""
    return recorded.queue == queue or (recorded.queue is None and recorded.exchange == exchange)
