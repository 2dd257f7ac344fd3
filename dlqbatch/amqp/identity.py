"""Whether a message that carries our headers is the one that they were written for.

Clients publish follow-ups, polls and copies with the headers that they received. So headers prove nothing: a message is
the one that failed before if it came by a way that we sent that one. Most are sent through a return exchange of ours,
which the next death names. The other ways are open to everybody: there a digest of body and message_id has to agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from hashlib import sha256
from struct import error as StructError  # noqa: N812  (struct names its exception in lower case)
from typing import Final

from dlqbatch.amqp.properties import labels, split
from dlqbatch.amqp.retry_headers import RETURN_PREFIX, Journey, Origin, return_exchange
from dlqbatch.amqp.table import UnreadableTable

Digest = Callable[[], str]
"""A function that makes the digest of the message that is looked at; it is called only where that decides."""
NONE_NEEDED: Final = ""
"""The digest in the header of what is sent through a return exchange of ours: its name in the next death is enough."""
# Hexadecimal characters of the digest that travels in a header.
_SHORT: Final = 16


class Identity(Enum):
    SAME = "same"
    """It is the message that our headers were written for."""
    COPY = "copy"
    """The same content, which we sent through an exchange, in the queue of another subscriber."""
    OTHER = "other"
    """Another message, whose publisher passed on the headers that it had received."""


def identity_of(journey: Journey, seen: Origin, digest: Digest) -> Identity:
    """What the message seen there is to the one that this journey was written for.

    `seen` is where it failed or was delivered from, with the exchange and key that it came by; the queue is None where
    only these are known, the exchange where only the queue is.
    """
    queue, exchange, key = seen
    recorded = journey.origin
    if recorded is None:
        return _if_it_agrees(Identity.SAME, journey, digest)
    is_elsewhere = queue is not None and recorded.queue is not None and queue != recorded.queue
    if recorded.queue is not None and not is_elsewhere and exchange == return_exchange(recorded.queue):
        return Identity.SAME if key == recorded.key else Identity.OTHER
    if exchange is None:
        # The headers of other frameworks name the queue alone, and nothing of the way.
        is_our_way = queue == recorded.queue
        if is_our_way and journey.digest == NONE_NEEDED:
            return Identity.SAME
    else:
        # With the queue's name as key: by the default exchange, or out of a delay queue that leads to this queue alone.
        by_name = not is_elsewhere and key == recorded.queue
        is_our_way = by_name or (exchange, key) == (recorded.exchange, recorded.key)
    if not is_our_way:
        return Identity.OTHER
    return _if_it_agrees(Identity.COPY if is_elsewhere else Identity.SAME, journey, digest)


def own_journey(journey: Journey, identity: Identity) -> Journey:
    """What our headers say of this message itself; of another one that carries them only what ends a circle."""
    if identity is not Identity.OTHER:
        return journey
    return Journey(parent=journey.id or None, trips=journey.trips, is_new=True)


def _if_it_agrees(identity: Identity, journey: Journey, digest: Digest) -> Identity:
    """This identity if the digest agrees; an earlier version wrote no digest, and the way alone has to do."""
    agrees = journey.digest is None or (journey.digest != NONE_NEEDED and journey.digest == digest())
    return identity if agrees else Identity.OTHER


# --- The digests by which messages are told apart


def digest_of(*parts: bytes) -> bytes:
    """A digest of each part with its length: parts that only join to the same bytes differ."""
    digest = sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


def header_digest(message_id: bytes, body_size: int, pieces: Iterable[bytes | memoryview]) -> str:
    """The digest that the header `dlqbatch-digest` holds: of the body, here in pieces, and the message_id."""
    digest = sha256(body_size.to_bytes(8, "big"))
    for piece in pieces:
        digest.update(piece)
    digest.update(len(message_id).to_bytes(8, "big"))
    digest.update(message_id)
    return digest.hexdigest()[:_SHORT]


def message_id_of(properties: bytes) -> bytes:
    """The message_id; this never raises, and is empty if there is none."""
    try:
        return labels(split(properties)).message_id or b""
    except (UnreadableTable, IndexError, StructError):
        return b""


def digest_for(exchange: str, digest: Callable[[], str]) -> str:
    """What the digest's header says of a message that is sent there: ways other than ours leave no trace of us."""
    return NONE_NEEDED if exchange.startswith(RETURN_PREFIX) else digest()
