"""A message from a dead-letter queue, examined: who it is, where and why it failed, and when."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from dlqbatch.message.deaths import LATEST_TIME, newest_death, past_deaths
from dlqbatch.message.dialects import Failure, failure
from dlqbatch.message.envelope import journey_so_far, open_envelope
from dlqbatch.message.fingerprint import fingerprint
from dlqbatch.message.headers import DEAD_AT, NONE, REASON
from dlqbatch.message.properties import labels
from dlqbatch.message.table import to_bytes
from dlqbatch.policy.origin import Found, find_origin, is_addressable, place_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlqbatch.message.deaths import Death
    from dlqbatch.message.delivery import Delivery
    from dlqbatch.message.envelope import Journey, Origin
    from dlqbatch.message.headers import Headers
    from dlqbatch.policy.origin import Trust

_LARGEST_COUNT: Final = 2**31 - 1
"""What a column of integers holds; a client may have written more."""
_FROM_NOWHERE: Final = open_envelope("", "", False, 0, b"")
"""The exchange that a dead-letter queue got a message from is not where it failed."""


@dataclass(frozen=True, slots=True)
class Examined:
    """Everything that the dead store keeps of a message as it arrived."""

    source_queue: str
    exchange: str
    routing_key: str
    redelivered: bool
    properties: bytes
    body: bytes
    id: str
    """Empty if it brought none."""
    parent: str | None
    attempt: int | None
    digest: bytes
    """Of body and message_id: what makes it another message under the same id."""
    full_digest: bytes
    message_id: bytes | None
    app_id: bytes | None
    priority: int
    origin: Origin | None
    reason: str | None
    failure: Failure
    fingerprint: str
    retries: int
    first_failed_at: datetime
    last_failed_at: datetime


def examine(delivery: Delivery, trust: Trust, now: datetime) -> Examined:
    """Never raises, whatever the message holds."""
    envelope = open_envelope(
        delivery.exchange, delivery.routing_key, delivery.redelivered, delivery.body_size, delivery.properties
    )
    headers = envelope.headers if envelope.headers is not None else NONE
    journey = salvaged_journey(headers)
    label = labels(envelope.properties)
    body = delivery.body()
    past = [each for each in past_deaths(headers) if each.queue not in trust.own_queues]
    origin = failed_at(headers, journey, trust)[0]
    why = failure(headers.foreign, past, body)
    last_failed_at = _moment(_last_time(past, headers), now, now)
    reason = headers.ours.get(REASON)
    return Examined(
        source_queue=delivery.receipt.queue,
        exchange=delivery.exchange,
        routing_key=delivery.routing_key,
        redelivered=delivery.redelivered,
        properties=delivery.properties,
        body=body,
        id=journey.id,
        parent=journey.parent,
        attempt=journey.attempt,
        digest=digest_of(body, label.message_id or b""),
        full_digest=digest_of(body, delivery.properties, to_bytes(delivery.exchange), to_bytes(delivery.routing_key)),
        message_id=label.message_id,
        app_id=label.app_id,
        priority=label.priority,
        origin=origin,
        reason=reason.as_text() if reason is not None else None,
        failure=why,
        fingerprint=fingerprint(why, origin.name if origin is not None else ""),
        retries=min(journey.retries or 0, _LARGEST_COUNT),
        first_failed_at=min(_moment(journey.first_failed_at, last_failed_at, now), last_failed_at),
        last_failed_at=last_failed_at,
    )


def salvaged_journey(headers: Headers) -> Journey:
    """What of our own headers is valid: one that somebody spoilt must not cost a message its id or its attempt."""
    while isinstance(journey := journey_so_far(headers), str):
        spoilt = journey.encode()
        headers = headers._replace(ours={name: field for name, field in headers.ours.items() if name != spoilt})
    return journey


def failed_at(headers: Headers, journey: Journey, trust: Trust) -> tuple[Origin | None, Death | None]:
    """Where it failed, and the death that says so or agrees; without one it is our own headers' word.

    The broker's newest death overrides what was recorded, unless it is the same queue. With neither, what a client
    claims counts where the drain would honour it.
    """
    recorded = journey.origin
    death = newest_death(headers, trust.own_queues, trust_last_death=trust.last_death)
    if death is None and recorded is None and headers.claims:
        found = find_origin(_FROM_NOWHERE, headers, None, trust)
        return (found.origin if isinstance(found, Found) else None), None
    if death is None or (recorded is not None and recorded.queue == death.queue):
        return recorded, death
    place = place_of(death)
    return (place, death) if is_addressable(place) else (recorded, None)


def digest_of(*parts: bytes) -> bytes:
    """Of each part with its length: parts that only join to the same bytes differ."""
    digest = sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


def _last_time(past: Sequence[Death], headers: Headers) -> int | None:
    """When it died by the broker's word, else when it was dead-lettered by ours."""
    known = next((death.time for death in past if death.time is not None), None)
    dead_at = headers.ours.get(DEAD_AT)
    return dead_at.as_timestamp() if known is None and dead_at is not None else known


def _moment(seconds: int | None, otherwise: datetime, now: datetime) -> datetime:
    """Never after `now`: a client can write any time there is, and not every reader can show the year 9999."""
    return otherwise if seconds is None else min(datetime.fromtimestamp(min(seconds, LATEST_TIME), UTC), now)
