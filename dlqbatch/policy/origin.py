"""Where a message on a first-stage source failed, and whose word that is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from dlqbatch.message.deaths import Death, newest_death
from dlqbatch.message.envelope import Envelope, Origin
from dlqbatch.message.headers import (
    MASSTRANSIT_ADDRESS,
    NSERVICEBUS_QUEUE,
    SPRING_EXCHANGE,
    SPRING_KEY,
    Headers,
)
from dlqbatch.message.returns import RETURN_PREFIX, return_exchange
from dlqbatch.message.table import LONGEST_NAME, new, to_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlqbatch.message.table import Field


_LINE_END: Final = re.compile(r"[\r\n]").search
_REPLY_QUEUE: Final = "amq.rabbitmq.reply-to"


@dataclass(frozen=True, slots=True)
class Trust:
    """Whose word counts: our own topology's deaths do not, a client's only for the origins listed."""

    own_queues: frozenset[str] = frozenset()
    own_exchanges: frozenset[str] = frozenset()
    origins_allowed: tuple[str, ...] = ()
    """Queue or exchange names, or wildcards with `*`."""
    last_death: bool = False
    """The broker is 4.0 or later and writes x-last-death-* itself."""

    def allows(self, origin: Origin) -> bool:
        name = origin.name
        return any(_wildcard(pattern).fullmatch(name) for pattern in self.origins_allowed)

    def is_ours(self, origin: Origin) -> bool:
        """It is part of our topology, so that a message returned there would only come back."""
        exchange = origin.exchange
        if origin.queue is None and exchange:
            return exchange in self.own_exchanges or exchange.startswith(RETURN_PREFIX)
        return origin.name in self.own_queues

    def vouched(self, found: Found) -> Origin:
        """The origin, without an exchange or key that only headers name which whoever may publish can write.

        Matters where a message is returned through its exchange, for that would let them publish wherever we may. It is
        as good as the broker's word: before 4.0 that adds to a client's death, and leaves its exchange and keys.
        """
        origin, _, death = found
        exchange = origin.exchange
        if origin.queue is None or exchange is None:
            return origin
        is_told = death is not None and (death.exchange, death.routing_key) == (exchange, origin.key)
        known = is_told or self.allows(Origin(None, exchange, origin.key))
        return origin if known else origin._replace(exchange=None)


class Found(NamedTuple):
    origin: Origin
    same: bool
    """It is where our headers say it failed before."""
    death: Death | None = None


class Unknown(NamedTuple):
    why: str = ""


def find_origin(envelope: Envelope, headers: Headers, recorded: Origin | None, trust: Trust) -> Found | Unknown:
    """The broker's newest death, else what a client claims if that is allowed, else an alternate exchange."""
    death = newest_death(headers, trust.own_queues, trust_last_death=trust.last_death)
    if death is not None:
        found = _from_death(death, recorded)
        return found if is_addressable(found.origin) else Unknown("no queue or exchange can have such a name")
    published_to = envelope.exchange
    claim = _claim(headers.claims, recorded)
    if claim is not None and not is_addressable(claim.origin):
        claim = None
    if claim is not None and trust.is_ours(claim.origin):
        return Unknown(f"'{claim.origin.name}' belongs to dlqbatch itself")
    if claim is not None and trust.allows(claim.origin):
        return claim
    is_foreign = published_to and published_to not in trust.own_exchanges and not published_to.startswith(RETURN_PREFIX)
    if is_foreign and (not headers.claims or (claim is not None and claim.origin.exchange == published_to)):
        # It was unroutable there and came through an alternate exchange; no client says that it failed elsewhere.
        there = Origin(None, published_to, envelope.routing_key)
        return Found(there, recorded == there)
    if claim is not None:
        return Unknown(
            f"'{claim.origin.name}' is named by headers that a client wrote, "
            "and dlqbatch.origins.allowed does not list it"
        )
    return Unknown()


def is_addressable(origin: Origin) -> bool:
    """The broker could hold such names; a forged one would end the run when it is asked for."""
    queue, exchange, key = origin.queue or "", origin.exchange or "", origin.key
    # Line ends are taken out of a name that is declared, and not out of one that is published to.
    if not (queue.isprintable() and exchange.isprintable()) and _LINE_END(f"{queue}{exchange}"):
        return False
    # Asked for one of these, the broker's own process ends, and with it the connection.
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


def from_return_exchange(origin: Origin) -> bool:
    return origin.exchange is not None and origin.exchange.startswith(RETURN_PREFIX)


def place_of(death: Death) -> Origin:
    exchange = None if death.exchange.startswith(RETURN_PREFIX) else death.exchange
    return new(Origin, (death.queue, exchange, death.routing_key))


def _from_death(death: Death, recorded: Origin | None) -> Found:
    place = place_of(death)
    queue, exchange, _ = place
    if recorded is None or not (recorded.queue == queue or (recorded.queue is None and recorded.exchange == exchange)):
        return new(Found, (place, False, death))
    # Recorded before any return: a return through another exchange or key must not overwrite it.
    kept = recorded.exchange if recorded.exchange is not None else exchange
    return Found(Origin(queue, kept, recorded.key), same=True, death=death)


def _claim(claims: Mapping[bytes, Field], recorded: Origin | None) -> Found | None:
    """What a client's headers say; it is the recorded origin if it names that or the way back to it."""
    named = _named(claims)
    if named is None:
        return None if recorded is None else Found(recorded, same=True)
    if recorded is not None:
        through_return = recorded.queue is not None and named.exchange == return_exchange(recorded.queue)
        same_queue = named.queue is not None and named.queue == recorded.queue
        same_exchange = named.queue is None and named.exchange == recorded.exchange
        if through_return or same_queue or same_exchange:
            return Found(recorded, same=True)
    return Found(named, same=False)


def _named(claims: Mapping[bytes, Field]) -> Origin | None:
    exchange = _text(claims, SPRING_EXCHANGE)
    if exchange is not None:
        key = _text(claims, SPRING_KEY) or ""
        # Published to the default exchange, the key is the queue.
        return Origin(None, exchange, key) if exchange else Origin(key, "", key) if key else None
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


_LONGEST_CLAIM: Final = 4096
"""Bytes of an address that is worth taking apart; a name in it is measured on its own."""


@lru_cache(maxsize=256)
def _wildcard(pattern: str) -> re.Pattern[str]:
    # Only `*` is special: brackets and question marks are ordinary characters in a queue's name.
    return re.compile(".*".join(re.escape(part) for part in pattern.split("*")), re.DOTALL)
