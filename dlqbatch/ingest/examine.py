"""A message from a dead-letter queue, examined: who it is, where and why it failed, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from dlqbatch.amqp.delivery import Delivery, Envelope, open_envelope
from dlqbatch.amqp.fields import Fields
from dlqbatch.amqp.headers import DEAD_AT, DELIVERY_COUNTS, NONE, REASON, WORKERS_REASONS, Headers
from dlqbatch.amqp.identity import digest_of
from dlqbatch.amqp.origin import Trust, failed_at
from dlqbatch.amqp.properties import labels, without_entries
from dlqbatch.amqp.retry_after import seconds_asked
from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.amqp.table import to_bytes
from dlqbatch.amqp.x_death import LATEST_TIME, Death, deaths, past_deaths
from dlqbatch.ingest.dialects import Failure, broker_failure, failure, framework_id, kind_of_work, read_dramatiq
from dlqbatch.ingest.fingerprint import fingerprint

# The largest number that a column of integers holds; a client may have written a larger one.
_LARGEST_COUNT: Final = 2**31 - 1
_FIELDS: Final = Fields()
_DELIVERY_LIMIT: Final = "delivery_limit"


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
    """The digest of body and message_id: with another one it is another message under the same id."""
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
    trips: int = 0
    """How often it came through here, or the messages whose headers were passed on to it."""
    fields: tuple[tuple[str, str], ...] = ()
    """Names and values by which people look for it."""
    framework_id: str | None = None
    """What stays in its body when Dramatiq, remoulade or taskiq publishes it anew."""
    asked: int = 0
    """Seconds that the client which failed asks to wait with `Retry-After`."""
    needs_person: bool = False
    """A person has taken it; nothing sends it again by itself."""


def examine(delivery: Delivery, trust: Trust, now: datetime, fields: Fields = _FIELDS) -> Examined:
    """Never raises, whatever the message holds."""
    envelope = open_envelope(
        delivery.exchange, delivery.routing_key, delivery.redelivered, delivery.body_size, delivery.properties
    )
    headers = envelope.headers if envelope.headers is not None else NONE
    journey, origin, death = failed_at(headers, trust, delivery.digest)
    label = labels(envelope.properties)
    body = delivery.body()
    told = deaths(headers) if journey.is_new else past_deaths(headers)
    past = [each for each in told if each.queue not in trust.own_queues]
    if death in past:
        # What came after it only made the message wait.
        past = past[past.index(death) :]
    reason = None if journey.is_new else headers.ours.get(REASON)
    is_workers = reason is not None and reason.as_text() in WORKERS_REASONS
    dramatiq = read_dramatiq(body)
    why = failure(headers.foreign, past, dramatiq, is_given_up_by_worker=is_workers)
    kind = ""
    if why == broker_failure(past):
        event = origin.event if origin is not None else None
        kind = kind_of_work(headers.foreign, label.message_type, dramatiq, body, event)
    # Messages of unrelated queues are no group, only because nobody says a word about them.
    place = origin.name if origin is not None else "" if any(why) else delivery.receipt.queue
    last_failed_at = _moment(_last_time(past, headers), now, now)
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
        full_digest=digest_of(
            body, _as_published(envelope), to_bytes(delivery.exchange), to_bytes(delivery.routing_key)
        ),
        message_id=label.message_id,
        app_id=label.app_id,
        priority=label.priority,
        origin=origin,
        reason=reason.as_text() if reason is not None else None,
        failure=why,
        fingerprint=fingerprint(why, place, kind),
        retries=min(
            journey.retries
            or (dramatiq.retries if dramatiq is not None else 0)
            or _brokers_retries(headers, past, trust),
            _LARGEST_COUNT,
        ),
        first_failed_at=min(_moment(journey.first_failed_at, last_failed_at, now), last_failed_at),
        last_failed_at=last_failed_at,
        trips=min(journey.trips, _LARGEST_COUNT),
        fields=fields.read(body, delivery.properties),
        framework_id=framework_id(body, dramatiq),
        asked=seconds_asked(headers, int(now.timestamp())),
    )


def _as_published(envelope: Envelope) -> bytes:
    """The properties without what a quorum queue adds when it delivers once more: they are equal at every delivery."""
    properties, headers = envelope.properties, envelope.headers
    is_empty = properties.table_start == properties.table_end
    if headers is None or not (is_empty or any(name in headers.brokers for name in DELIVERY_COUNTS)):
        return properties.data
    return without_entries(properties, DELIVERY_COUNTS)


def _brokers_retries(headers: Headers, past: Sequence[Death], trust: Trust) -> int:
    """The retries that a quorum queue made before it gave a message up; 0 where that is not known.

    x-death counts deaths only. A quorum queue of dead letters keeps the count of failures from RabbitMQ 4.3 on; before,
    that count is of its own deliveries. A classic queue has no count; there the settings know it.
    """
    if not past or past[0].reason != _DELIVERY_LIMIT:
        return 0
    failures, acquired = (headers.brokers.get(name) for name in DELIVERY_COUNTS)
    if failures is None or acquired is None:
        return trust.native_retries.get(past[0].queue, 0)
    counted: int = failures.as_integer() or 0
    return max(counted - 1, 0)


def _last_time(past: Sequence[Death], headers: Headers) -> int | None:
    """When it died by the broker's word, else when it was dead-lettered by ours."""
    known = next((death.time for death in past if death.time is not None), None)
    dead_at = headers.ours.get(DEAD_AT)
    return dead_at.as_timestamp() if known is None and dead_at is not None else known


def _moment(seconds: int | None, otherwise: datetime, now: datetime) -> datetime:
    """The time of these seconds, but never after `now`: a client can write any time, also one that nobody can show."""
    return otherwise if seconds is None else min(datetime.fromtimestamp(min(seconds, LATEST_TIME), UTC), now)
