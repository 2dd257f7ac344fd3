"""Whether a failed message is delayed, returned or dead-lettered, by the policy and the time.

A first stage delays it in the tier of its next retry, or in the delay queue that its event has for it, or dead-letters
it when its retries are exhausted; after the delay it is returned. Nothing here does I/O or raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from dlqbatch.amqp.delivery import Envelope
from dlqbatch.amqp.headers import Headers
from dlqbatch.amqp.identity import Digest, Identity, own_journey
from dlqbatch.amqp.origin import (
    Found,
    Trust,
    Unknown,
    find_origin,
    is_malformed,
    journey_of_failure,
    salvaged_journey,
    with_origin_of_deaths,
)
from dlqbatch.amqp.retry_headers import Journey, Origin, journey_so_far
from dlqbatch.amqp.table import new
from dlqbatch.amqp.x_death import deaths
from dlqbatch.drain.event_delays import DelayQueues

MALFORMED = "malformed"
ORIGIN_UNKNOWN = "origin-unknown"
ORIGIN_GONE = "origin-gone"
TOO_MANY_TRIPS = "too-many-trips"
ATTEMPT_FAILED = "attempt-failed"
RETRIES_EXHAUSTED = "retries-exhausted"
NOT_CONFIGURED = "not-configured"


class Delay(NamedTuple):
    """Wait in this delay queue, then come back to a drain and be returned."""

    journey: Journey
    event: str
    tier: int
    """Its number: a tier of the ladder, or further on a delay queue of events."""


class Return(NamedTuple):
    """Go back to where it failed."""

    journey: Journey
    origin: Origin


class DeadLetter(NamedTuple):
    """Go to the dead-letter queue."""

    journey: Journey
    reason: str
    detail: str = ""
    """For the log; with `shows_detail` also for the message's reason, which people see in the dead-letter queue."""
    shows_detail: bool = False

    @property
    def text(self) -> str:
        return f"{self.reason}: {self.detail}" if self.shows_detail else self.reason


Decision = Delay | Return | DeadLetter


class Events(Protocol):
    """The policy."""

    def max_retries(self, event: str, /) -> int | None:
        """How often the event is retried; None if it is not configured."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings that decide, apart from the policy."""

    tiers: int
    trust: Trust = field(default_factory=Trust)
    max_trips: int = 100
    return_to_queue: bool = True
    """Return to the queue that a message failed in; otherwise to its exchange, where every subscriber sees it again."""
    home: str | None = None
    """The queue that the delay leads back to; None if each message returns to its own origin."""
    delay_queues: DelayQueues | None = None
    """What else than the tiers decides about a delay; None if nothing does."""


def decide(  # noqa: C901, PLR0911  (one return for each way a message can go)
    envelope: Envelope,
    events: Events,
    rules: Rules,
    *,
    first_stage: bool,
    now: int,
    new_id: Callable[[], str],
    digest: Digest,
) -> Decision:
    """The decision of the first rule that matches; `now` is in seconds since 1970."""
    headers = envelope.headers
    if headers is None:
        return DeadLetter(Journey(id=new_id(), retries=None, trips=1), MALFORMED, "its headers cannot be read")
    journey = journey_so_far(headers)
    if not first_stage:
        if journey.invalid_count:
            return _malformed(headers, journey, rules, new_id)
        return _after_its_delay(headers, journey, rules, now, new_id)
    found = find_origin(envelope, headers, journey, rules.trust, digest)
    if is_malformed(journey, found):
        return _malformed(headers, journey, rules, new_id)
    if isinstance(found, Unknown):
        journey = own_journey(journey, found.identity)
        unknown = journey._replace(id=journey.id or new_id(), trips=journey.trips + 1)
        return DeadLetter(unknown, ORIGIN_UNKNOWN, found.why, shows_detail=bool(found.why))
    if journey.attempt is not None and _repeats_an_attempt(journey, found, rules):
        # Where we sent it through an exchange, it has copies. The origin shows the dead store which copy failed.
        journey = journey._replace(id=journey.id or new_id(), trips=journey.trips + 1, origin=found.origin)
        return DeadLetter(journey, TOO_MANY_TRIPS if journey.trips > rules.max_trips else ATTEMPT_FAILED)
    journey = journey_of_failure(journey, found, None if rules.return_to_queue else rules.trust, now, new_id)
    if journey.trips > rules.max_trips:
        return DeadLetter(journey, TOO_MANY_TRIPS)
    if rules.home is not None and found.origin.queue != rules.home:
        # The delay queue would bring it to a consumer that has never seen it.
        elsewhere = f"it failed in '{found.origin.name}', and from here messages return to '{rules.home}' alone"
        return DeadLetter(journey, ORIGIN_UNKNOWN, elsewhere, shows_detail=True)
    event = found.origin.event
    max_retries = events.max_retries(event)
    if max_retries is None:
        return DeadLetter(journey, NOT_CONFIGURED)
    retries = journey.retries or 0
    if retries >= max_retries:
        return DeadLetter(journey, RETRIES_EXHAUSTED)
    queues = rules.delay_queues
    tier = min(retries + 1, rules.tiers) if queues is None else queues.number(event, retries, headers, now)
    return new(Delay, (_with_retries(journey, retries + 1), event, tier))


def _with_retries(journey: Journey, retries: int) -> Journey:
    # `_replace` would take five times as long, for every message.
    identity, parent, _, trips, origin, failed_at, attempt, expiration, digest, invalid_count, is_new = journey
    changed = (identity, parent, retries, trips, origin, failed_at, attempt, expiration, digest, invalid_count, is_new)
    return new(Journey, changed)


def _repeats_an_attempt(journey: Journey, found: Found, rules: Rules) -> bool:
    """Whether it is a retry of the dead store, or a copy of that retry at which another subscriber failed too."""
    if found.identity is Identity.COPY:
        return not rules.return_to_queue
    return found.identity is Identity.SAME and journey.origin is not None


def _after_its_delay(headers: Headers, journey: Journey, rules: Rules, now: int, new_id: Callable[[], str]) -> Decision:
    trust = rules.trust
    died = deaths(headers)
    if not died or any(death.queue not in trust.own_queues for death in died):
        # What a first stage sent to a delay queue has no other death than that. This message came past every first
        # stage, so no first stage has counted the trip.
        journey = journey._replace(trips=journey.trips + 1)
    if journey.origin is None:
        journey = with_origin_of_deaths(headers, journey, trust, now)
    if not journey.id:
        journey = journey._replace(id=new_id())
    origin = trust.way_back(journey.origin, to_queue=rules.return_to_queue)
    if origin is None:
        return DeadLetter(journey, ORIGIN_UNKNOWN)
    if journey.trips > rules.max_trips:
        return DeadLetter(journey, TOO_MANY_TRIPS)
    return new(Return, (journey, origin))


def origin_gone(decision: Return) -> DeadLetter:
    """The decision where the broker says that the queue or exchange of a return does not exist."""
    return DeadLetter(decision.journey, ORIGIN_GONE)


def _malformed(headers: Headers, journey: Journey, rules: Rules, new_id: Callable[[], str]) -> DeadLetter:
    salvaged = salvaged_journey(headers, journey, rules.trust, new_id)
    return DeadLetter(salvaged._replace(trips=journey.trips + 1), MALFORMED, journey.invalid_count)
