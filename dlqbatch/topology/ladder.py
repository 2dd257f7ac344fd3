"""The delay ladder: retry-queue, N delay queues with a TTL each, N retry queues behind them, the dead-letter queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dlqbatch.message.delivery import Route
from dlqbatch.message.table import LONGEST_NAME, to_bytes
from dlqbatch.topology.model import Binding, Exchange, Queue, Source, Topology

DELIVERY_LIMIT: Final = "x-delivery-limit"


@dataclass(frozen=True, slots=True)
class Ladder:
    """Names and delays; the defaults are those of the original installation."""

    tier_ttls: tuple[int, ...] = (10_000, 15_000, 20_000)
    """Milliseconds, one for each tier."""
    queue_type: str = "classic"
    retry_exchange: str = "retry-exchange"
    retry_routing_key: str = "retry-routing-key"
    retry_queue: str = "retry-queue"
    delay_exchange: str = "route-delay"
    delay_queue: str = "queue.delay"
    dlq_exchange: str = "dlq-exchange"
    dlq_routing_key: str = "dlq-routing-key"
    dlq_queue: str = "dlq-queue"

    @property
    def tiers(self) -> int:
        return len(self.tier_ttls)

    def delay(self, event: str, tier: int) -> Route:
        key = f"binding.{event}.{tier}"
        # A routing key has at most 255 bytes; the binding `binding.#.N` matches the short one as well.
        return Route(self.delay_exchange, key if len(to_bytes(key)) <= LONGEST_NAME else f"binding.{tier}")

    def dead(self) -> Route:
        return Route(self.dlq_exchange, self.dlq_routing_key)

    @property
    def sources(self) -> tuple[Source, ...]:
        """First the queue where failures arrive, then what each tier feeds."""
        later = (Source(self._retry_queue_of(tier), first_stage=False) for tier in self._tier_numbers)
        return (Source(self.retry_queue, first_stage=True), *later)

    @property
    def next_tier(self) -> tuple[str, str]:
        """The queues of a tier that there would be with one delay more: what a longer ladder has left behind."""
        return f"{self.delay_queue}.{self.tiers + 1}", self._retry_queue_of(self.tiers + 1)

    @property
    def queue_names(self) -> frozenset[str]:
        return frozenset(queue.name for queue in self.topology().queues)

    @property
    def exchange_names(self) -> frozenset[str]:
        return frozenset(exchange.name for exchange in self.topology().exchanges)

    def topology(self, *, unlimited_deliveries: bool = False) -> Topology:
        """All that has to be declared.

        From 4.0 a quorum queue drops a message after 20 deliveries unless told otherwise; `unlimited_deliveries`
        tells it so for the queues that are read. Older brokers refuse to be told.
        """
        read: dict[str, str | int] = {}
        held: dict[str, str | int] = {}
        if self.queue_type == "quorum":
            read = {"x-queue-type": "quorum"}
            # At-least-once dead-lettering is what makes the broker's own hop out of a delay queue safe.
            held = {**read, "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
            if unlimited_deliveries:
                read[DELIVERY_LIMIT] = -1
        exchanges = [Exchange(self.retry_exchange), Exchange(self.delay_exchange), Exchange(self.dlq_exchange)]
        queues = [Queue(self.retry_queue, read), Queue(self.dlq_queue, read)]
        bindings = [
            Binding(self.retry_exchange, self.retry_routing_key, self.retry_queue),
            Binding(self.dlq_exchange, self.dlq_routing_key, self.dlq_queue),
            # One of the original tables binds the queue under its exchange's name; both are in use.
            Binding(self.dlq_exchange, self.dlq_exchange, self.dlq_queue),
        ]
        for tier, ttl in zip(self._tier_numbers, self.tier_ttls, strict=True):
            after, key = f"{self.retry_exchange}-{tier}", f"retry.#.{tier}"
            exchanges.append(Exchange(after))
            queues.append(Queue(self._retry_queue_of(tier), read))
            queues.append(
                Queue(
                    f"{self.delay_queue}.{tier}",
                    {
                        "x-dead-letter-exchange": after,
                        "x-dead-letter-routing-key": key,
                        "x-message-ttl": ttl,
                        **held,
                    },
                )
            )
            bindings.append(Binding(self.delay_exchange, f"binding.#.{tier}", f"{self.delay_queue}.{tier}"))
            bindings.append(Binding(after, key, self._retry_queue_of(tier)))
        return Topology(tuple(exchanges), tuple(queues), tuple(bindings))

    @property
    def _tier_numbers(self) -> range:
        return range(1, self.tiers + 1)

    def _retry_queue_of(self, tier: int) -> str:
        return f"{self.retry_queue}-{tier}"


def demonstration(ladder: Ladder) -> Topology:
    """The three test queues whose failures arrive in the ladder's retry queue."""
    exchange = "test-retry-exchange"
    events = {"rk.test.pass": "test-pass-queue", "rk.test.fail": "test-fail-queue"}
    events["rk.test.fail.pass"] = "test-fail-pass-queue"
    arguments: dict[str, str | int] = {
        "x-dead-letter-exchange": ladder.retry_exchange,
        "x-dead-letter-routing-key": ladder.retry_routing_key,
    }
    if ladder.queue_type == "quorum":
        arguments |= {
            "x-queue-type": "quorum",
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }
    return Topology(
        (Exchange(exchange),),
        tuple(Queue(queue, arguments) for queue in events.values()),
        tuple(Binding(exchange, key, queue) for key, queue in events.items()),
    )
