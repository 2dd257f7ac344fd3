"""One message, the policy and the time in; one decision out. No I/O, never an exception."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from dlqbatch.message.deaths import deaths, newest_death
from dlqbatch.message.envelope import Envelope, Journey, journey_so_far, valid_id
from dlqbatch.message.headers import TRIPS, Headers
from dlqbatch.message.table import new
from dlqbatch.policy.decision import DeadLetter, Decision, Delay, Return
from dlqbatch.policy.origin import (
    Found,
    Trust,
    Unknown,
    find_origin,
    from_return_exchange,
    is_addressable,
    place_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

MALFORMED = "malformed"
ORIGIN_UNKNOWN = "origin-unknown"
ORIGIN_GONE = "origin-gone"
TOO_MANY_TRIPS = "too-many-trips"
ATTEMPT_FAILED = "attempt-failed"
RETRIES_EXHAUSTED = "retries-exhausted"
NOT_CONFIGURED = "not-configured"


class Events(Protocol):
    """The policy: how often an event is retried; None if it is not configured."""

    def max_retries(self, event: str, /) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Rules:
    """What else decides, apart from the policy."""

    tiers: int
    trust: Trust = field(default_factory=Trust)
    max_trips: int = 100
    return_to_queue: bool = True
    """Return to the one queue a message failed in; otherwise to its exchange, where every subscriber sees it again."""
    home: str | None = None
    """The one queue that the delay leads back to; None if the way back is the message's own."""


def decide(  # noqa: C901, PLR0911  (one return for each row of the contract's table)
    envelope: Envelope, events: Events, rules: Rules, *, first_stage: bool, now: int, new_id: Callable[[], str]
) -> Decision:
    """The first row of the contract's table that matches; `now` in seconds since 1970."""
    headers = envelope.headers
    if headers is None:
        return DeadLetter(Journey(id=new_id(), retries=None, trips=1), MALFORMED, "its headers cannot be read")
    journey = journey_so_far(headers)
    if isinstance(journey, str):
        return DeadLetter(_salvaged(headers, rules, new_id), MALFORMED, journey)
    recorded = journey.origin
    if recorded is not None and from_return_exchange(recorded):
        # Ours are a way back, never a place where a message failed.
        recorded = None if recorded.queue is None else recorded._replace(exchange=None)
        journey = journey._replace(origin=recorded)
    if not first_stage:
        return _after_a_tier(headers, journey, rules, new_id)
    found = find_origin(envelope, headers, recorded, rules.trust)
    if isinstance(found, Unknown):
        unknown = journey._replace(id=journey.id or new_id(), trips=journey.trips + 1)
        return DeadLetter(unknown, ORIGIN_UNKNOWN, found.why, told=bool(found.why))
    attempt, journey = journey.attempt, _arrived(journey, found, rules, now, new_id)
    if journey.trips > rules.max_trips:
        return DeadLetter(journey, TOO_MANY_TRIPS)
    if attempt is not None and found.same:
        return DeadLetter(journey, ATTEMPT_FAILED)
    if rules.home is not None and found.origin.queue != rules.home:
        # Its delay queue would bring it to a consumer that has never seen it.
        elsewhere = f"it failed in '{found.origin.name}', and from here messages return to '{rules.home}' alone"
        return DeadLetter(journey, ORIGIN_UNKNOWN, elsewhere, told=True)
    event = found.origin.key
    max_retries = events.max_retries(event)
    if max_retries is None:
        return DeadLetter(journey, NOT_CONFIGURED)
    retries = journey.retries or 0
    if retries >= max_retries:
        return DeadLetter(journey, RETRIES_EXHAUSTED)
    return new(Delay, (journey.retried(retries + 1), event, min(retries + 1, rules.tiers)))


def _after_a_tier(headers: Headers, journey: Journey, rules: Rules, new_id: Callable[[], str]) -> Decision:
    origin, trust = journey.origin, rules.trust
    told = deaths(headers)
    if not told or any(death.queue not in trust.own_queues for death in told):
        # What a first stage sends to a delay queue has died there alone when it is here. This one came past every first
        # stage, so that none has counted the trip.
        journey = journey._replace(trips=journey.trips + 1)
    if not journey.id:
        journey = journey._replace(id=new_id())
    if origin is None or trust.is_ours(origin) or not is_addressable(origin):
        return DeadLetter(journey, ORIGIN_UNKNOWN)
    if journey.trips > rules.max_trips:
        return DeadLetter(journey, TOO_MANY_TRIPS)
    if origin.queue is None:
        return new(Return, (journey, origin))
    # Behind the default exchange the key is a queue's name, and behind one of ours is our own retry queue.
    through_exchange = not rules.return_to_queue and origin.exchange and origin.exchange not in trust.own_exchanges
    return Return(journey, origin._replace(queue=None) if through_exchange else origin)


def _arrived(journey: Journey, found: Found, rules: Rules, now: int, new_id: Callable[[], str]) -> Journey:
    """The journey of a message that has just failed at `found`."""
    death = found.death
    is_new_place = journey.origin is not None and not found.same
    # With return_via=exchange two failing subscribers would set each other's count back for ever.
    starts_anew = is_new_place and rules.return_to_queue
    first_failed_at = None if starts_anew else journey.first_failed_at
    if first_failed_at is None:
        first_failed_at = death.time if death is not None and death.time is not None else now
    expiration = death.original_expiration if death is not None else None
    arrived = (
        new_id() if is_new_place or not journey.id else journey.id,
        journey.id or None if is_new_place else journey.parent,
        0 if starts_anew else journey.retries,
        journey.trips + 1,
        found.origin if rules.return_to_queue else rules.trust.vouched(found),
        first_failed_at,
        None if is_new_place else journey.attempt,
        expiration if expiration is not None else journey.expiration,
    )
    return new(Journey, arrived)


def origin_gone(decision: Return) -> DeadLetter:
    """What becomes of a return whose queue or exchange the broker says does not exist."""
    return DeadLetter(decision.journey, ORIGIN_GONE)


def _salvaged(headers: Headers, rules: Rules, new_id: Callable[[], str]) -> Journey:
    """What can be said of a message whose own headers are not valid; the others of them stay in it as they are."""
    death = newest_death(headers, rules.trust.own_queues, trust_last_death=rules.trust.last_death)
    trips = headers.ours[TRIPS].as_integer() if TRIPS in headers.ours else 0
    origin = place_of(death) if death is not None else None
    return Journey(
        id=valid_id(headers) or new_id(),
        retries=None,
        trips=max(trips or 0, 0) + 1,
        origin=origin if origin is not None and is_addressable(origin) else None,
    )
