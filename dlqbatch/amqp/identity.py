"""Whether our headers on a message were written for this message, or copied by a client from another message.

Clients publish follow-ups, polls and copies with the headers that they received, so headers alone prove nothing. A
message is the same message as before if it came by the way that we sent it. Most are sent through a return exchange of
ours, which the next death names. The other ways are open to everybody: there a digest of body and message_id decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from hashlib import sha256
from struct import error as StructError  # noqa: N812  (struct names its exception in lower case)
from typing import Final

from dlqbatch.amqp.headers import RASCAL, Headers
from dlqbatch.amqp.properties import labels, split
from dlqbatch.amqp.retry_headers import RETURN_PREFIX, Journey, Origin, return_exchange
from dlqbatch.amqp.table import UnreadableTable

Digest = Callable[[], str]
"""A function that computes the digest of the message; it is called only where the digest decides."""
NONE_NEEDED: Final = ""
"""The digest header of what is sent through a return exchange of ours: its name in the next death is enough."""
# Hexadecimal characters of the digest that travels in a header.
_SHORT: Final = 16


class Identity(Enum):
    SAME = "same"
    """It is the message that our headers were written for."""
    COPY = "copy"
    """The same content in the queue of another subscriber: we sent it through an exchange."""
    OTHER = "other"
    """Another message, whose publisher passed on the headers that it had received."""


def identity_of(journey: Journey, seen: Origin, digest: Digest) -> Identity:
    """Whether this journey was written for the message that is seen there.

    `seen` is where the message failed or was delivered, with the exchange and key that it came by. The queue is None
    where only exchange and key are known, and the exchange is None where only the queue is known.
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
    """What our headers say of this message; of a copied journey only the parent and the trips, which end a circle."""
    if identity is not Identity.OTHER:
        return journey
    return Journey(parent=journey.id or None, trips=journey.trips, is_new=True)


def _if_it_agrees(identity: Identity, journey: Journey, digest: Digest) -> Identity:
    """This identity if the digest agrees; an earlier version wrote no digest, and the way alone has to do."""
    agrees = journey.digest is None or (journey.digest != NONE_NEEDED and journey.digest == digest())
    return identity if agrees else Identity.OTHER


# --- The digests that tell messages apart


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


def digest_for(exchange: str, headers: Headers | None, digest: Callable[[], str]) -> str:
    """The digest header of a message that is sent to this exchange: empty for a return exchange of ours.

    rascal publishes what it received anew, and no death shows then that it came through our exchange.
    """
    is_hidden = headers is not None and RASCAL in headers.claims
    return NONE_NEEDED if exchange.startswith(RETURN_PREFIX) and not is_hidden else digest()
