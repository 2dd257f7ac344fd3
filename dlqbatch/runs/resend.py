"""Dead messages on their way back to where they failed: what the lifecycle and a replay publish, and where to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from dlqbatch import logs
from dlqbatch.message.delivery import AwaitOrigin, Delivery, Hold, Instruction, Offer, Publish
from dlqbatch.message.envelope import Origin, open_envelope
from dlqbatch.message.headers import NONE
from dlqbatch.message.stamp import stamp
from dlqbatch.message.table import LONGEST_NAME, to_bytes
from dlqbatch.policy.decide import ORIGIN_GONE, ORIGIN_UNKNOWN
from dlqbatch.policy.examine import failed_at, salvaged_journey
from dlqbatch.policy.origin import Found, Trust, from_return_exchange, is_addressable
from dlqbatch.runs.drain import HEADERS_TOO_LARGE, ORIGIN_UNCLEAR
from dlqbatch.runs.report import LEFT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dlqbatch.message.envelope import Journey
    from dlqbatch.message.headers import Headers
    from dlqbatch.runs.ports import Origins

log = logs.get(__name__)

SENT: Final = "sent"
MANUAL: Final = "manual"
UNREADABLE: Final = "unreadable"
NEEDS_A_PERSON: Final = frozenset({ORIGIN_GONE, ORIGIN_UNKNOWN, HEADERS_TOO_LARGE, UNREADABLE})
"""Reasons to hold a row that no later try would change by itself."""

NOBODY_KNOWS: Final = frozenset({"connection-lost", "not-confirmed"})
"""Reasons after which the broker may hold the message all the same."""


class Row(Protocol):
    """One dead message with an open attempt, as it is to be published."""

    @property
    def row_id(self) -> int: ...
    @property
    def identity(self) -> str: ...
    @property
    def parent(self) -> str | None: ...
    @property
    def attempt(self) -> int: ...
    @property
    def exchange(self) -> str:
        """Exchange and routing key as it was delivered to the dead-letter queue."""

    @property
    def routing_key(self) -> str: ...
    @property
    def properties(self) -> bytes:
        """Exactly as delivered, like the body."""

    @property
    def body(self) -> bytes: ...
    @property
    def to_queue(self) -> str | None:
        """Send it there and not to its origin, under the same event."""


@dataclass(slots=True)
class Resend:
    """Says for each row where it goes and what it carries; the hot path, it waits for nothing.

    Offer only rows whose attempt is committed. One object serves one `Sender.send`.
    """

    origins: Origins
    trust: Trust
    login: bytes
    limit: int
    """The sender's `login` and `properties_limit`."""
    return_to_queue: bool = True
    _rows: dict[int, Row] = field(default_factory=dict)

    def offers(self, rows: Iterable[Row]) -> list[Offer]:
        """The rows as a source's `more` returns them; a tag is the row's id."""
        found = []
        for row in rows:
            self._rows[row.row_id] = row
            found.append(Offer(row.row_id, row.exchange, row.routing_key, row.properties, row.body))
        return found

    def answered(self, row_id: int) -> Row | None:
        """The row that was confirmed or held, which is forgotten with it; None if it was before."""
        return self._rows.pop(row_id, None)

    @property
    def unanswered(self) -> tuple[Row, ...]:
        return tuple(self._rows.values())

    def handle(self, delivery: Delivery) -> Instruction:
        """Publish to its origin, or hold it with a reason; those in NEEDS_A_PERSON count as `manual`."""
        try:
            return self._instruct(self._rows[delivery.tag], delivery)
        except Exception as error:  # noqa: BLE001  (one row that nobody foresaw must not stop the others)
            log.warning("a dead message cannot be read", row=delivery.tag, why=f"{type(error).__name__}: {error}")
            return Hold(MANUAL, UNREADABLE)

    def _instruct(self, row: Row, delivery: Delivery) -> Instruction:
        envelope = open_envelope(row.exchange, row.routing_key, False, delivery.body_size, row.properties)
        headers = envelope.headers if envelope.headers is not None else NONE
        journey = salvaged_journey(headers)
        recorded, origin = self._ways(row, headers, journey)
        if origin is None:
            return Hold(MANUAL, ORIGIN_UNKNOWN)
        route = self.origins.route(origin)
        if route is None:
            if self.origins.is_gone(origin):
                return Hold(MANUAL, ORIGIN_GONE)
            return Hold(LEFT, ORIGIN_UNCLEAR) if self.origins.is_unclear(origin) else AwaitOrigin(origin)
        travels = journey._replace(
            # A row's name is cut and escaped where the id was long and odd; only then it is not the id itself.
            id=row.identity if _fits(row.identity) else journey.id,
            parent=row.parent if row.parent is not None and _fits(row.parent) else None,
            attempt=row.attempt,
            origin=recorded,
        )
        properties = stamp(envelope, travels, login=self.login, limit=self.limit)
        if properties is None:
            return Hold(MANUAL, HEADERS_TOO_LARGE)
        return Publish(travels.id, route, properties, SENT, None, origin)

    def _ways(self, row: Row, headers: Headers, journey: Journey) -> tuple[Origin | None, Origin | None]:
        """The origin that its headers are to name, and where it goes: as the drain returns what comes out of a tier."""
        origin, death = failed_at(headers, journey, self.trust)
        if row.to_queue is not None:
            moved = Origin(row.to_queue, None, origin.key if origin is not None else row.routing_key)
            return moved, moved
        if origin is not None and from_return_exchange(origin):
            # Ours are a way back, never a place where a message failed.
            origin = None if origin.queue is None else origin._replace(exchange=None)
        if origin is None or self.trust.is_ours(origin) or not is_addressable(origin):
            return None, None
        if origin.queue is None or self.return_to_queue:
            return origin, origin
        if death is not None:
            # It came past the drain, which would have looked whose word the exchange is.
            origin = self.trust.vouched(Found(origin, same=True, death=death))
        through_exchange = origin.exchange and origin.exchange not in self.trust.own_exchanges
        return origin, origin._replace(queue=None) if through_exchange else origin


def _fits(text: str) -> bool:
    return len(to_bytes(text)) <= LONGEST_NAME
