"""One message as the broker delivered it, opened to be read, and what a run wants done with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from struct import error as StructError  # noqa: N812  (struct names its exception in lower case)
from typing import Any, Final, NamedTuple, Protocol

from dlqbatch.amqp.headers import Headers, scan
from dlqbatch.amqp.identity import header_digest, message_id_of
from dlqbatch.amqp.properties import Properties, split
from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.amqp.table import UnreadableTable, new

STOPPED: Final = "stopped"
"""Why a message was not published: its run, or the plan that it belongs to, was stopped just before."""


class Receipt(Protocol):
    """The channel that issued a delivery tag, and alone may settle it."""

    queue: str

    def settle(self, tag: int) -> None: ...
    def hold(self, tag: int, reason: str | None) -> None: ...


@dataclass(slots=True, eq=False)
class Delivery:
    """Owned by the transfer until it is settled; the body stays in the frames it came in."""

    receipt: Receipt
    tag: int
    exchange: str
    routing_key: str
    redelivered: bool
    properties: bytes = b""
    """Flags and values, as they stood in the content header."""
    body_size: int = 0
    chunks: list[bytes] | None = field(default_factory=list)
    """Payload and end mark of each body frame; None once there was no memory to keep them."""
    resent: bool = False

    def body(self) -> bytes:
        """Joined from its frames, each without its end mark."""
        return b"".join(chunk[:-1] for chunk in self.chunks or ())

    def digest(self) -> str:
        """The digest of body and message_id, as our header of that name holds it; the body is not copied."""
        pieces = (memoryview(chunk)[:-1] for chunk in self.chunks or ())
        return header_digest(message_id_of(self.properties), self.body_size, pieces)


class Envelope(NamedTuple):
    """An immutable view of a delivered message, without its body."""

    exchange: str
    """The exchange it was delivered from, by the broker's word."""
    routing_key: str
    redelivered: bool
    body_size: int
    properties: Properties
    headers: Headers | None
    """None when the broker delivered a table that cannot be read."""


def open_envelope(exchange: str, routing_key: str, redelivered: bool, body_size: int, properties: bytes) -> Envelope:
    """Open a message; this never raises: one that cannot be read is an envelope without headers."""
    try:
        cut = split(properties)
        headers = scan(cut.data, cut.table_start, cut.table_end)
    except (UnreadableTable, IndexError, StructError):
        cut = Properties(properties, 0, 2, 2, 2, len(properties), None, None)
        return Envelope(exchange, routing_key, redelivered, body_size, cut, None)
    return new(Envelope, (exchange, routing_key, redelivered, body_size, cut, headers))


class Offer(NamedTuple):
    """A message that a store has for the broker, as it was once delivered."""

    tag: int
    """The name that the store knows it by."""
    exchange: str
    routing_key: str
    properties: bytes
    body: bytes


class Route(NamedTuple):
    """What a message is published with."""

    exchange: str
    key: str


class Publish(NamedTuple):
    """Publish, and settle the original once the broker has confirmed."""

    id: str
    route: Route
    properties: bytes
    counts_as: str
    """The count of the report that it adds to once it is confirmed."""
    reason: str | None = None
    origin: Origin | None = None
    """Set on a return, which may be bound and sent once more."""


class Hold(NamedTuple):
    """Keep until the end of the run, then put it back."""

    counts_as: str
    reason: str | None = None


class Gather(NamedTuple):
    """Store in a batch, and settle once the store has committed."""

    kept: Any
    """What the store keeps of the message; the body that was delivered is let go."""


class AwaitOrigin(NamedTuple):
    """Decide again once it is known whether the origin is there."""

    origin: Origin


Instruction = Publish | Hold | AwaitOrigin | Gather
