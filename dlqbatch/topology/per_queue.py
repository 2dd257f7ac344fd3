"""One queue with a retry queue and a delay queue of its own.

X dead-letters into X.retry, which the drain takes from; X.delay leads back to X when its time is up.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlqbatch.message.delivery import Route
from dlqbatch.topology.arguments import DEAD_LETTER_EXCHANGE, DEAD_LETTER_KEY, TTL, queue_read, queue_worked_on
from dlqbatch.topology.ladder import dead_letters
from dlqbatch.topology.model import Binding, Exchange, Queue, Source, Topology, relay_of


@dataclass(frozen=True, slots=True)
class PerQueue:
    queue: str
    exchange: str
    exchange_type: str = "topic"
    """topic or direct: through a fanout exchange what left X.delay would enter it again."""
    ttl: int = 10_000
    """Milliseconds in X.delay."""
    queue_type: str = "classic"
    has_delay: bool = True
    """Without X.delay a message goes back at once, and waits for the next run only."""
    dlq_exchange: str = "dlq-exchange"
    dlq_routing_key: str = "dlq-routing-key"
    dlq_queue: str = "dlq-queue"
    dlq_queue_type: str | None = None
    """As the ladder's."""

    @property
    def retry_exchange(self) -> str:
        return f"{self.exchange}.retry"

    @property
    def retry_queue(self) -> str:
        return f"{self.queue}.retry"

    @property
    def delay_queue(self) -> str:
        return f"{self.queue}.delay"

    @property
    def tiers(self) -> int:
        return 1

    @property
    def waits(self) -> bool:
        return self.has_delay

    @property
    def home(self) -> str | None:
        """X.delay leads to this queue alone, wherever a message failed."""
        return self.queue

    def delay(self, event: str, tier: int) -> Route:  # noqa: ARG002  (there is one delay for every event)
        # By the default exchange: through T everybody whose binding matches would see the message again.
        return Route("", self.delay_queue if self.has_delay else self.queue)

    def dead(self) -> Route:
        return Route(self.dlq_exchange, self.dlq_routing_key)

    @property
    def sources(self) -> tuple[Source, ...]:
        return (Source(self.retry_queue, first_stage=True),)

    @property
    def delay_queues(self) -> tuple[str, ...]:
        return (self.delay_queue,) if self.has_delay else ()

    @property
    def dead_letter_queues(self) -> tuple[str, ...]:
        return (self.dlq_queue,)

    @property
    def own_queues(self) -> frozenset[str]:
        """X is not among them: a death there is a failure."""
        return frozenset((self.retry_queue, self.delay_queue, relay_of(self.delay_queue), self.dlq_queue))

    @property
    def own_exchanges(self) -> frozenset[str]:
        return frozenset((self.retry_exchange, self.dlq_exchange))

    @property
    def exchange_names(self) -> frozenset[str]:
        return frozenset((self.exchange, self.retry_exchange, self.dlq_exchange))

    def topology(self, *, unlimited_deliveries: bool = False) -> Topology:
        read = queue_read(self.queue_type, unlimited_deliveries=unlimited_deliveries)
        kept = queue_worked_on(self.queue_type)
        back = {DEAD_LETTER_EXCHANGE: self.exchange, DEAD_LETTER_KEY: self.queue}
        queues = [
            Queue(self.queue, {DEAD_LETTER_EXCHANGE: self.retry_exchange, DEAD_LETTER_KEY: self.retry_queue, **kept}),
            Queue(self.retry_queue, {**back, **read}),
        ]
        bindings = [
            Binding(self.exchange, self.queue, self.queue),
            Binding(self.retry_exchange, self.retry_queue, self.retry_queue),
        ]
        if self.has_delay:
            queues.append(Queue(self.delay_queue, {**back, TTL: self.ttl, **kept}))
            bindings.append(Binding(self.exchange, self.delay_queue, self.delay_queue))
        exchanges = (Exchange(self.exchange, self.exchange_type), Exchange(self.retry_exchange, self.exchange_type))
        last = queue_read(self.dlq_queue_type or self.queue_type, unlimited_deliveries=unlimited_deliveries)
        dead = dead_letters(self.dlq_exchange, self.dlq_routing_key, self.dlq_queue, last)
        return Topology(exchanges, tuple(queues), tuple(bindings)) + dead
