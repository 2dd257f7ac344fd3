"""The delay ladder: retry-queue, N delay queues with a TTL each, N retry queues behind them, the dead-letter queue."""

from __future__ import annotations

from dataclasses import dataclass

from dlqbatch.message.delivery import Route
from dlqbatch.message.table import LONGEST_NAME, to_bytes
from dlqbatch.topology.arguments import DELIVERY_LIMIT, Arguments, queue_read, queue_worked_on
from dlqbatch.topology.model import Binding, Exchange, Queue, Source, Topology, relay_of

__all__ = ["DELIVERY_LIMIT", "Ladder", "dead_letters", "demonstration"]


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
    dlq_queue_type: str | None = None
    """Where several topologies share the dead-letter queue it has a type of its own; None: that of the others."""

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

    def tier_beyond(self, number: int) -> tuple[str, str]:
        """The queues of a tier that there would be with so many delays more: what a longer ladder has left behind."""
        return f"{self.delay_queue}.{self.tiers + number}", self._retry_queue_of(self.tiers + number)

    @property
    def waits(self) -> bool:
        return True

    @property
    def home(self) -> str | None:
        """Any queue's failures may arrive here."""
        return None

    @property
    def delay_queues(self) -> tuple[str, ...]:
        return tuple(f"{self.delay_queue}.{tier}" for tier in self._tier_numbers)

    @property
    def dead_letter_queues(self) -> tuple[str, ...]:
        return (self.dlq_queue,)

    @property
    def own_queues(self) -> frozenset[str]:
        """Those in which nothing ever fails: a death there says nothing about the message."""
        return self.queue_names | {relay_of(queue) for queue in self.delay_queues}

    @property
    def own_exchanges(self) -> frozenset[str]:
        return self.exchange_names

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
        read = queue_read(self.queue_type, unlimited_deliveries=unlimited_deliveries)
        # At-least-once dead-lettering is what makes the broker's own hop out of a delay queue safe.
        held = queue_worked_on(self.queue_type)
        exchanges = [Exchange(self.retry_exchange), Exchange(self.delay_exchange)]
        queues = [Queue(self.retry_queue, read)]
        bindings = [Binding(self.retry_exchange, self.retry_routing_key, self.retry_queue)]
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
        kept = queue_read(self.dlq_queue_type or self.queue_type, unlimited_deliveries=unlimited_deliveries)
        dead = dead_letters(self.dlq_exchange, self.dlq_routing_key, self.dlq_queue, kept)
        return Topology(tuple(exchanges), tuple(queues), tuple(bindings)) + dead

    @property
    def _tier_numbers(self) -> range:
        return range(1, self.tiers + 1)

    def _retry_queue_of(self, tier: int) -> str:
        return f"{self.retry_queue}-{tier}"


def dead_letters(exchange: str, key: str, queue: str, arguments: Arguments) -> Topology:
    """Where the exhausted go."""
    # One of the original tables binds the queue under its exchange's name; both are in use.
    bindings = (Binding(exchange, key, queue), Binding(exchange, exchange, queue))
    return Topology((Exchange(exchange),), (Queue(queue, arguments),), bindings)


def demonstration(ladder: Ladder) -> Topology:
    """The three test queues whose failures arrive in the ladder's retry queue."""
    exchange = "test-retry-exchange"
    events = {"rk.test.pass": "test-pass-queue", "rk.test.fail": "test-fail-queue"}
    events["rk.test.fail.pass"] = "test-fail-pass-queue"
    arguments: dict[str, str | int] = {
        "x-dead-letter-exchange": ladder.retry_exchange,
        "x-dead-letter-routing-key": ladder.retry_routing_key,
    }
    arguments |= queue_worked_on(ladder.queue_type)
    return Topology(
        (Exchange(exchange),),
        tuple(Queue(queue, arguments) for queue in events.values()),
        tuple(Binding(exchange, key, queue) for key, queue in events.items()),
    )
