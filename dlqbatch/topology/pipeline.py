"""A step of a pipeline: an exchange, the queue of its workers, and the queue of what they gave up."""

from __future__ import annotations

from dataclasses import dataclass

from dlqbatch.topology.arguments import DEAD_LETTER_EXCHANGE, DELIVERY_LIMIT, TTL, queue_read, queue_worked_on
from dlqbatch.topology.model import Binding, Exchange, Queue, Topology

_DELIVERIES = 3
"""After the first; the fourth failure is the last, as in the original."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    exchange: str
    queue: str
    ttl: int = 300_000
    """Milliseconds after which a message that nobody took is stale, and a dead letter."""
    queue_type: str = "classic"

    @property
    def dead_letter_exchange(self) -> str:
        return f"dlq.{self.exchange}"

    @property
    def dead_letter_queue(self) -> str:
        return f"dlq.{self.exchange}"

    @property
    def delay_queues(self) -> tuple[str, ...]:
        """None: what waits in the workers' queue waits for a worker."""
        return ()

    @property
    def dead_letter_queues(self) -> tuple[str, ...]:
        return (self.dead_letter_queue,)

    @property
    def own_queues(self) -> frozenset[str]:
        return frozenset((self.dead_letter_queue,))

    @property
    def own_exchanges(self) -> frozenset[str]:
        return frozenset((self.dead_letter_exchange,))

    def topology(self, *, unlimited_deliveries: bool = False) -> Topology:
        work = {DEAD_LETTER_EXCHANGE: self.dead_letter_exchange, TTL: self.ttl, **queue_worked_on(self.queue_type)}
        if self.queue_type == "quorum":
            # A classic queue counts no deliveries, and the broker refuses the argument; there the worker counts.
            work[DELIVERY_LIMIT] = _DELIVERIES
        read = queue_read(self.queue_type, unlimited_deliveries=unlimited_deliveries)
        return Topology(
            # Fanout on both sides: whatever the key, it arrives, and it keeps its key.
            (Exchange(self.exchange, "fanout"), Exchange(self.dead_letter_exchange, "fanout")),
            (Queue(self.queue, work), Queue(self.dead_letter_queue, read)),
            (Binding(self.exchange, "", self.queue), Binding(self.dead_letter_exchange, "", self.dead_letter_queue)),
        )
