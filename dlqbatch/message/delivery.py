"""One message as the broker delivered it, and what a run wants done with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from dlqbatch.message.envelope import Origin


class Receipt(Protocol):
    """The channel that issued a delivery tag, and alone may settle it."""

    queue: str

    def settle(self, tag: int) -> None: ...
    def hold(self, tag: int, reason: str | None) -> None: ...


class Delivery:
    """Owned by the transfer until it is settled; the body stays in the frames it came in."""

    __slots__ = (
        "body_size",
        "chunks",
        "exchange",
        "properties",
        "receipt",
        "redelivered",
        "resent",
        "routing_key",
        "tag",
    )

    def __init__(self, receipt: Receipt, tag: int, exchange: str, routing_key: str, redelivered: bool) -> None:
        self.receipt = receipt
        self.tag = tag
        self.exchange = exchange
        self.routing_key = routing_key
        self.redelivered = redelivered
        self.properties = b""
        """Flags and values, as they stood in the content header."""
        self.body_size = 0
        self.chunks: list[bytes] | None = []
        """Payload and end mark of each body frame; None once there was no memory to keep them."""
        self.resent = False

    def body(self) -> bytes:
        """Joined from its frames, each without its end mark."""
        return b"".join(chunk[:-1] for chunk in self.chunks or ())


class Offer(NamedTuple):
    """A message that a store has for the broker, as it was once delivered."""

    tag: int
    """Whatever the store knows it by."""
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
    """The report's count that it adds to once it is confirmed."""
    reason: str | None = None
    origin: Origin | None = None
    """Set on a return, which may be bound and sent once more."""


class Hold(NamedTuple):
    """Keep until the end of the run, then put it back."""

    counts_as: str
    reason: str | None = None


class Gather(NamedTuple):
    """Store together with others, and settle once the store has committed."""

    kept: Any
    """What the store keeps of the message; the body that was delivered is let go."""


class AwaitOrigin(NamedTuple):
    """Ask again once it is known whether the origin is there."""

    origin: Origin


Instruction = Publish | Hold | AwaitOrigin | Gather
