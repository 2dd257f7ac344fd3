"""Where lifecycle and replay publish a dead message to, and with which headers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from dlqbatch import logs
from dlqbatch.amqp.delivery import AwaitOrigin, Delivery, Hold, Instruction, Offer, Publish, open_envelope
from dlqbatch.amqp.headers import NONE
from dlqbatch.amqp.identity import Identity, digest_for
from dlqbatch.amqp.origin import Failed, Found, Trust, failed_at
from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.amqp.stamp import stamp
from dlqbatch.amqp.table import LONGEST_NAME, to_bytes
from dlqbatch.broker.return_exchanges import Origins
from dlqbatch.drain.retry_decision import ORIGIN_GONE, ORIGIN_UNKNOWN
from dlqbatch.drain.run import HEADERS_TOO_LARGE, ORIGIN_UNCLEAR
from dlqbatch.jobs import LEFT
from dlqbatch.lifecycle.attempts import Outgoing
from dlqbatch.lifecycle.strategy import MANUAL

log = logs.get(__name__)

SENT: Final = "sent"
UNREADABLE: Final = "unreadable"
NEEDS_A_PERSON: Final = frozenset({ORIGIN_GONE, ORIGIN_UNKNOWN, HEADERS_TOO_LARGE, UNREADABLE})
"""Reasons to hold a row that no later try would change by itself."""

NOBODY_KNOWS: Final = frozenset({"connection-lost", "not-confirmed"})
"""Reasons after which the broker may hold the message all the same."""


@dataclass(slots=True)
class Resend:
    """Decides for each row where it is published and with which headers; it never blocks.

    Offer only rows whose attempt is committed. One object serves one `Session.send`.
    """

    origins: Origins
    trust: Trust
    login: bytes | None
    limit: int
    """The sender's `login` and `properties_limit`."""
    return_to_queue: bool = True
    unanswered: dict[int, Outgoing] = field(default_factory=dict)
    """Rows by id that were offered, and neither confirmed nor held yet."""

    def offers(self, rows: Iterable[Outgoing]) -> list[Offer]:
        """The rows as a source's `more` returns them; a tag is the row's id."""
        found = []
        for row in rows:
            self.unanswered[row.row_id] = row
            found.append(Offer(row.row_id, row.exchange, row.routing_key, row.properties, row.body))
        return found

    def answered(self, row_id: int) -> Outgoing | None:
        """Remove and return a row that was confirmed or held; None if it was answered before."""
        return self.unanswered.pop(row_id, None)

    def handle(self, delivery: Delivery) -> Instruction:
        """Publish to its origin, or hold it with a reason; those in NEEDS_A_PERSON count as `manual`."""
        try:
            return self._instruct(self.unanswered[delivery.tag], delivery)
        except Exception as error:  # noqa: BLE001  (one row that nobody foresaw must not stop the others)
            log.warning("a dead message cannot be read", row=delivery.tag, why=f"{type(error).__name__}: {error}")
            return Hold(MANUAL, UNREADABLE)

    def _instruct(self, row: Outgoing, delivery: Delivery) -> Instruction:
        envelope = open_envelope(row.exchange, row.routing_key, False, delivery.body_size, row.properties)
        headers = envelope.headers if envelope.headers is not None else NONE
        failed = failed_at(headers, self.trust, delivery.digest)
        recorded, origin = self._ways(row, failed)
        if origin is None:
            return Hold(MANUAL, ORIGIN_UNKNOWN)
        route = self.origins.route(origin)
        if route is None:
            if self.origins.is_gone(origin):
                return Hold(MANUAL, ORIGIN_GONE)
            return Hold(LEFT, ORIGIN_UNCLEAR) if self.origins.is_unclear(origin) else AwaitOrigin(origin)
        journey = failed.journey
        travels = journey._replace(
            # The identity in a row differs from the message's id only where that id is too long or not text.
            id=row.identity if _fits(row.identity) else journey.id,
            parent=row.parent if row.parent is not None and _fits(row.parent) else None,
            # Where no drain counts it, a consumer could make another message of each retry for ever.
            trips=journey.trips + 1,
            attempt=row.attempt,
            origin=recorded,
        )
        digest = digest_for(route.exchange, headers, delivery.digest)
        properties = stamp(envelope, travels, login=self.login, limit=self.limit, digest=digest)
        if properties is None:
            return Hold(MANUAL, HEADERS_TOO_LARGE)
        return Publish(travels.id, route, properties, SENT, None, origin)

    def refuses(self, row: Outgoing) -> bool:
        """Whether `handle` would leave it to a person, since nothing that can be trusted names its origin."""
        envelope = open_envelope(row.exchange, row.routing_key, False, 0, row.properties)
        headers = envelope.headers if envelope.headers is not None else NONE
        # A plan's row comes without its body. Whether the digest agrees decides which key it had, not whether its place
        # is known.
        return self._ways(row, failed_at(headers, self.trust, str))[1] is None

    def _ways(self, row: Outgoing, failed: Failed) -> tuple[Origin | None, Origin | None]:
        """The origin for its headers, and where it is published: as a drain returns a message after its delay."""
        journey, origin, death = failed
        if row.to_queue is not None:
            moved = Origin(row.to_queue, None, origin.key if origin is not None else row.routing_key)
            return moved, moved
        if origin is not None and death is not None and not self.return_to_queue:
            # It came past the drain, which would have checked who named the exchange.
            identity = Identity.OTHER if journey.is_new else Identity.SAME
            origin = self.trust.vouched(Found(origin, identity, death))
        way = self.trust.way_back(origin, to_queue=self.return_to_queue)
        return (None if way is None else origin), way


def _fits(text: str) -> bool:
    return len(to_bytes(text)) <= LONGEST_NAME
