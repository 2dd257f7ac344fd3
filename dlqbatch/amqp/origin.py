"""Where a message failed, and whose word that is: read here alone, for every job and for the consumer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple

from dlqbatch.amqp.claims import claimed_origin, is_claimed
from dlqbatch.amqp.delivery import Envelope, open_envelope
from dlqbatch.amqp.headers import DEAD_AT, NONE, RASCAL, Headers
from dlqbatch.amqp.identity import Digest, Identity, identity_of, own_journey
from dlqbatch.amqp.rascal import failed_in
from dlqbatch.amqp.retry_headers import RETURN_PREFIX, UNMARKED, Journey, Origin, journey_so_far, return_exchange
from dlqbatch.amqp.table import LONGEST_NAME, new, to_bytes
from dlqbatch.amqp.x_death import Death, newest_death

_SAME: Final = Identity.SAME
_LINE_END: Final = re.compile(r"[\r\n]").search
_REPLY_QUEUE: Final = "amq.rabbitmq.reply-to"
_NO_NAME: Final = "no queue or exchange can have such a name"


@dataclass(frozen=True, slots=True)
class Trust:
    """Whose word counts: deaths in our own topology do not count, and a client's word only for the origins listed."""

    own_queues: frozenset[str] = frozenset()
    own_exchanges: frozenset[str] = frozenset()
    origins_allowed: tuple[str, ...] = ()
    """Queue or exchange names, or wildcards with `*`."""
    last_death: bool = False
    """The broker is 4.0 or later: it writes x-last-death-* itself, and drops an x-death that a client sent."""
    native_retries: Mapping[str, int] = field(default_factory=dict)
    """For each queue whose retries the broker delays, how many it makes before it gives a message up."""

    def allows(self, origin: Origin) -> bool:
        name = origin.name
        return any(_wildcard(pattern).fullmatch(name) for pattern in self.origins_allowed)

    def is_ours(self, origin: Origin) -> bool:
        """Whether it is part of our topology, so that a message returned there would only come back."""
        exchange = origin.exchange
        if origin.queue is None and exchange:
            return exchange in self.own_exchanges or exchange.startswith(RETURN_PREFIX)
        return origin.name in self.own_queues

    def way_back(self, origin: Origin | None, *, to_queue: bool) -> Origin | None:
        """Where a message that failed there is returned, to its queue or through its exchange; None if nowhere."""
        if origin is None or self.is_ours(origin) or not is_addressable(origin):
            return None
        # Behind the default exchange the key is a queue's name, and behind one of ours is our own retry queue.
        through_exchange = not to_queue and origin.exchange and origin.exchange not in self.own_exchanges
        return origin._replace(queue=None) if through_exchange else origin

    def vouched(self, found: Found) -> Origin:
        """The origin, without an exchange that only headers name which any publisher can write.

        It matters where a message is returned through its exchange: such headers would let a client publish wherever
        we may. Before 4.0 a death is not always the broker's word: it adds to a death that a client sent, and keeps its
        exchange and keys. A message that came back through our return exchange carries what we wrote.
        """
        origin, identity, death = found
        exchange = origin.exchange
        if origin.queue is None or exchange is None:
            return origin
        is_told = death is not None and (death.exchange, death.routing_key) == (exchange, origin.key)
        is_ours = death is not None and identity is Identity.SAME and death.exchange == return_exchange(origin.queue)
        known = is_told or is_ours or self.allows(Origin(None, exchange, origin.key))
        return origin if known else origin._replace(exchange=None)


class Found(NamedTuple):
    origin: Origin
    identity: Identity
    """Whether our headers were written for this message."""
    death: Death | None = None


class Unknown(NamedTuple):
    why: str = ""
    identity: Identity = Identity.SAME


def find_origin(  # noqa: PLR0911  (one return for each way in which an origin is known)
    envelope: Envelope, headers: Headers, journey: Journey, trust: Trust, digest: Digest
) -> Found | Unknown:
    """The broker's newest death, else what a client claims if that is allowed, else an alternate exchange."""
    death = newest_death(headers, trust.own_queues, trust_last_death=trust.last_death)
    if death is not None:
        found = from_death(death, headers, journey, digest)
        if is_addressable(found.origin):
            return found
        return Unknown(_NO_NAME, found.identity)
    published_to = envelope.exchange
    claim, why = _claim(headers, journey, digest), ""
    if claim is not None and not is_addressable(claim.origin):
        claim, why = None, _NO_NAME
    if claim is not None and trust.is_ours(claim.origin):
        return Unknown(f"'{claim.origin.name}' belongs to dlqbatch itself", claim.identity)
    if claim is not None and trust.allows(claim.origin):
        return claim
    is_foreign = published_to and published_to not in trust.own_exchanges and not published_to.startswith(RETURN_PREFIX)
    if is_foreign and (not is_claimed(headers) or (claim is not None and claim.origin.exchange == published_to)):
        # It was unroutable there and came through an alternate exchange; no client says that it failed elsewhere.
        there = Origin(None, published_to, envelope.routing_key)
        is_known = journey.origin is None or journey.origin.queue is None
        identity = identity_of(journey, there, digest) if is_known else Identity.OTHER
        return Found(there, identity)
    if claim is not None:
        return Unknown(
            f"'{claim.origin.name}' is named by headers that a client wrote, "
            "and dlqbatch.origins.allowed does not list it",
            claim.identity,
        )
    return Unknown(why)


def is_addressable(origin: Origin) -> bool:
    """Whether the broker could hold such names; asking it for a forged name would end the run."""
    queue, exchange, key = origin.queue or "", origin.exchange or "", origin.key
    # The broker takes line ends out of a name that is declared, and not out of a name that is published to.
    if not (queue.isprintable() and exchange.isprintable()) and _LINE_END(f"{queue}{exchange}"):
        return False
    # A question about one of these ends the broker's own process, and with it the connection.
    if (queue or exchange or key).startswith(_REPLY_QUEUE):
        return False
    if queue.isascii() and exchange.isascii() and key.isascii():
        # As nearly all are: a character is a byte.
        return len(queue) <= LONGEST_NAME and len(exchange) <= LONGEST_NAME and len(key) <= LONGEST_NAME
    return _is_name(queue) and _is_name(exchange) and len(to_bytes(key)) <= LONGEST_NAME


def _is_name(name: str) -> bool:
    return len(name) <= LONGEST_NAME and (name.isascii() or _is_utf8_name(name))


def _is_utf8_name(name: str) -> bool:
    try:
        return len(name.encode()) <= LONGEST_NAME
    except UnicodeEncodeError:
        return False


def place_of(death: Death) -> Origin:
    exchange = None if death.exchange.startswith(RETURN_PREFIX) else death.exchange
    return new(Origin, (death.queue, exchange, death.routing_key))


def from_death(death: Death, headers: Headers, journey: Journey, digest: Digest) -> Found:
    """Where the broker says that it failed; a message that came back keeps the exchange and key that were recorded."""
    place = place_of(death)
    queue, exchange, key = death.queue, death.exchange, death.routing_key
    if RASCAL in headers.claims and (exchange, key) == ("", queue):
        # rascal published it anew to its own queue, and kept how it was published at first.
        first = failed_in(headers.claims)
        if first is not None and first.queue == queue and first.exchange:
            exchange, key = first.exchange, first.key
            place = place_of(Death(queue, exchange, key))
    if journey is UNMARKED:
        # Most first failures carry no header of ours.
        return new(Found, (place, _SAME, death))
    identity = identity_of(journey, new(Origin, (queue, exchange, key)), digest)
    recorded = journey.origin
    if recorded is not None and identity is Identity.SAME:
        # A return through another exchange or key must not overwrite what was recorded.
        kept = recorded.exchange if recorded.exchange is not None else place.exchange
        place = Origin(queue, kept, recorded.key)
    return Found(place, identity, death)


def _claim(headers: Headers, journey: Journey, digest: Digest) -> Found | None:
    """The origin by a client's headers; the recorded origin if they name that or the way back to it."""
    recorded, named = journey.origin, claimed_origin(headers)
    if named is None:
        if recorded is None:
            return None
        # The claim says no more than our own headers.
        return Found(recorded, identity_of(journey, Origin(recorded.queue, None, ""), digest))
    identity = identity_of(journey, named, digest)
    if recorded is not None and identity is Identity.SAME:
        return Found(recorded, identity)
    if recorded is not None and recorded.queue is not None and named.exchange == return_exchange(recorded.queue):
        named = Origin(named.queue or recorded.queue, None, named.key)
    if named.queue is not None and named.exchange is not None and named.exchange.startswith(RETURN_PREFIX):
        named = named._replace(exchange=None)
    return Found(named, identity)


@lru_cache(maxsize=256)
def _wildcard(pattern: str) -> re.Pattern[str]:
    # Only `*` is special: brackets and question marks are ordinary characters in a queue's name.
    return re.compile(".*".join(re.escape(part) for part in pattern.split("*")), re.DOTALL)


def journey_of_failure(
    journey: Journey, found: Found, by_exchange: Trust | None, now: int | None, new_id: Callable[[], str]
) -> Journey:
    """The journey of a message that has just failed at `found`; `now` is when, if the broker does not say.

    `by_exchange` is whose word counts where it is returned through its exchange, and so to every subscriber; None where
    it is returned to the queue that it failed in.
    """
    death, identity = found.death, found.identity
    expiration = death.original_expiration if death is not None else None
    if journey is UNMARKED:
        failed_at = death.time if death is not None and death.time is not None else now
        origin = found.origin if by_exchange is None else by_exchange.vouched(found)
        return new(Journey, (new_id(), None, 0, 1, origin, failed_at, None, expiration, None, "", False))
    identifier, parent, retries, trips, _, first_failed_at, attempt, recorded_expiration, _, _, _ = journey
    is_new = identity is Identity.OTHER or (identity is Identity.COPY and by_exchange is None)
    if is_new:
        retries, first_failed_at, recorded_expiration = 0, None, None
    if is_new or identity is Identity.COPY:
        # With return_via=exchange a copy keeps the count: else two failing subscribers would set each other's back
        # for ever.
        parent, identifier, attempt = identifier or None, "", None
    if first_failed_at is None:
        first_failed_at = death.time if death is not None and death.time is not None else now
    arrived = (
        identifier or new_id(),
        parent,
        retries,
        trips + 1,
        found.origin if by_exchange is None else by_exchange.vouched(found),
        first_failed_at,
        attempt,
        expiration if expiration is not None else recorded_expiration,
        None,
        "",
        is_new,
    )
    return new(Journey, arrived)


def with_origin_of_deaths(headers: Headers, journey: Journey, trust: Trust, now: int) -> Journey:
    """The journey with the origin that the newest death names: another processor put the message into a delay queue.

    Such a processor writes no origin of ours, and leaves the deaths in the message.
    """
    death = newest_death(headers, trust.own_queues, trust_last_death=trust.last_death)
    if death is None:
        return journey
    return journey._replace(
        origin=place_of(death),
        first_failed_at=journey.first_failed_at or death.time or now,
        expiration=journey.expiration or death.original_expiration,
    )


def at_its_consumer(queue: str, envelope: Envelope, digest: Digest) -> tuple[Journey, Origin]:
    """The journey of a message that a consumer of this queue received, and where it fails if the consumer fails.

    The broker has written no death of it yet.
    """
    journey = journey_so_far(envelope.headers or NONE)
    exchange, key = envelope.exchange, envelope.routing_key
    place = place_of(Death(queue, exchange, key))
    if journey is UNMARKED:
        return journey, place
    if identity_of(journey, Origin(queue, exchange, key), digest) is not Identity.SAME:
        # What failed elsewhere before, or is a copy of that, is another message here.
        return own_journey(journey, Identity.OTHER), place
    return journey, place if journey.origin is None else journey.origin._replace(queue=queue)


def is_malformed(journey: Journey, found: Found | Unknown) -> bool:
    """Whether a count in our headers is not valid, and the headers were written for this message."""
    return bool(journey.invalid_count) and (isinstance(found, Unknown) or found.identity is Identity.SAME)


def salvaged_journey(headers: Headers, journey: Journey, trust: Trust, new_id: Callable[[], str]) -> Journey:
    """The journey of a message with a malformed count: its id and trips, and the origin by the broker's word alone.

    Without retries our headers stay in it as they are, as evidence.
    """
    death = newest_death(headers, trust.own_queues, trust_last_death=trust.last_death)
    origin = place_of(death) if death is not None else None
    is_known = origin is not None and is_addressable(origin)
    return Journey(id=journey.id or new_id(), retries=None, trips=journey.trips, origin=origin if is_known else None)


_FROM_NOWHERE: Final = open_envelope("", "", False, 0, b"")
"""The exchange that a dead-letter queue got a message from is not where it failed."""


class Failed(NamedTuple):
    """What is known of a dead letter."""

    journey: Journey
    """The message's own journey; only the trips count where our headers were written for another message."""
    origin: Origin | None
    death: Death | None
    """The broker's word; None where our own headers say all there is."""


def failed_at(headers: Headers, trust: Trust, digest: Digest) -> Failed:
    """Who it is, and where it failed.

    What a drain or a consumer of ours put into the dead-letter queue is what its headers say: it left the broker's
    deaths behind. A death that it has all the same is newer. With neither, what a client claims counts where the drain
    would honour it.
    """
    journey = journey_so_far(headers)
    death = newest_death(headers, trust.own_queues, trust_last_death=trust.last_death)
    if death is not None:
        found = from_death(death, headers, journey, digest)
        own = own_journey(journey, found.identity)
        return Failed(own, found.origin, death) if is_addressable(found.origin) else Failed(own, own.origin, None)
    if is_claimed(headers) and DEAD_AT not in headers.ours:
        claimed = find_origin(_FROM_NOWHERE, headers, journey, trust, digest)
        own = own_journey(journey, claimed.identity)
        return Failed(own, claimed.origin if isinstance(claimed, Found) else own.origin, None)
    return Failed(journey, journey.origin, None)
