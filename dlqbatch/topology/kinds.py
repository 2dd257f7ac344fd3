"""The four kinds of topology; a deployment can have any number of each.

ladder     retry-queue, N delay queues with a TTL each, N retry queues behind them, the dead-letter queue
per-queue  X dead-letters to X.retry, which the drain takes from; X.delay returns messages to X after its TTL
pipeline   an exchange, the queue of its workers, and a queue for their dead letters
native     a policy by which RabbitMQ 4.3.1 itself delays the retries of a quorum queue, and the dead-letter queue
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Final

from dlqbatch.amqp.delivery import Route
from dlqbatch.amqp.table import LONGEST_NAME, to_bytes
from dlqbatch.topology.model import (
    AT_LEAST_ONCE,
    DEAD_LETTER_EXCHANGE,
    DEAD_LETTER_KEY,
    DELIVERY_LIMIT,
    NOTHING,
    TTL,
    Binding,
    DelayedRetry,
    Exchange,
    Policy,
    Queue,
    Source,
    Topology,
    in_name,
    longest_delay,
    queue_read,
    queue_worked_on,
    relay_of,
)

_PIPELINE_DELIVERIES: Final = 3
"""The delivery limit of a pipeline's quorum queue: the fourth failure dead-letters a message."""


class _WithDeadLetterQueue:
    """The part that ladder and per-queue have in common: where a message goes when its retries are used up."""

    __slots__ = ()
    queue_type: str
    dlq_exchange: str
    dlq_routing_key: str
    dlq_queue: str
    dlq_queue_type: str | None

    def dead(self) -> Route:
        return Route(self.dlq_exchange, self.dlq_routing_key)

    @property
    def dead_letter_queues(self) -> tuple[str, ...]:
        return (self.dlq_queue,)

    def _dead_letters(self, *, unlimited_deliveries: bool) -> Topology:
        arguments = queue_read(self.dlq_queue_type or self.queue_type, unlimited_deliveries=unlimited_deliveries)
        exchange, queue = self.dlq_exchange, self.dlq_queue
        # Policies of installations name either this key or the exchange as the key, so the queue is bound by both.
        bindings = (Binding(exchange, self.dlq_routing_key, queue), Binding(exchange, exchange, queue))
        return Topology((Exchange(exchange),), (Queue(queue, arguments),), bindings)


@dataclass(frozen=True, slots=True)
class Ladder(_WithDeadLetterQueue):
    tier_ttls: tuple[int, ...] = (10_000, 15_000, 20_000)
    """The TTL of each tier in milliseconds."""
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
    """The type of the dead-letter queue, where topologies of several types share it; None: the type of the others."""
    more_delays: tuple[int, ...] = ()
    """Delays in milliseconds that events have of their own, or that a failure may ask for."""

    @property
    def tiers(self) -> int:
        return len(self.tier_ttls)

    @property
    def own_delays(self) -> tuple[int, ...]:
        """Those delays, each once, that no tier has: each takes a delay queue."""
        return tuple(sorted(set(self.more_delays) - set(self.tier_ttls)))

    @property
    def delays(self) -> dict[str, int]:
        """The milliseconds of each delay queue by the last part of its name: the tiers in their order, then the others.

        A tier has a number, because its delay can be changed; another delay is in its name (`60s`).
        """
        tiers = {str(tier): ttl for tier, ttl in enumerate(self.tier_ttls, 1)}
        return tiers | {in_name(ttl): ttl for ttl in self.own_delays}

    @property
    def waits(self) -> bool:
        return True

    @property
    def home(self) -> str | None:
        """None: failures of any queue arrive here, and return to that queue."""
        return None

    def delay(self, event: str, tier: int) -> Route:
        """The way into a delay queue; from the number of tiers on, `tier` counts on in `own_delays`."""
        name = str(tier) if tier <= self.tiers else in_name(self.own_delays[tier - self.tiers - 1])
        key = f"binding.{event}.{name}"
        # A routing key has at most 255 bytes; the binding `binding.#.N` also matches the short key.
        return Route(self.delay_exchange, key if len(to_bytes(key)) <= LONGEST_NAME else f"binding.{name}")

    @property
    def sources(self) -> tuple[Source, ...]:
        """The queue where failures arrive, then the queue behind each tier."""
        later = (Source(self._way_out(tier).queue, first_stage=False) for tier in range(1, self.tiers + 1))
        return (Source(self.retry_queue, first_stage=True), *later)

    @property
    def ways_out(self) -> dict[int, Binding]:
        """The binding behind each delay queue: without it the broker drops what leaves that queue.

        What is no tier has that of tier 1, whose queue is always read: also what waits in the queue of a delay that the
        settings have no more comes back.
        """
        return {tier: self._way_out(tier if tier <= self.tiers else 1) for tier in range(1, len(self.delays) + 1)}

    def _way_out(self, tier: int) -> Binding:
        return Binding(f"{self.retry_exchange}-{tier}", f"retry.#.{tier}", f"{self.retry_queue}-{tier}")

    @property
    def delay_queues(self) -> tuple[str, ...]:
        return tuple(f"{self.delay_queue}.{name}" for name in self.delays)

    @property
    def own_queues(self) -> frozenset[str]:
        """The queues without workers: a death there is no failure of the message."""
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
        """What has to be declared; `unlimited_deliveries` sets a limit of -1, which brokers before 4.0 refuse."""
        read = queue_read(self.queue_type, unlimited_deliveries=unlimited_deliveries)
        held = queue_worked_on(self.queue_type)
        exchanges = [Exchange(self.retry_exchange), Exchange(self.delay_exchange)]
        queues = [Queue(self.retry_queue, read)]
        bindings = [Binding(self.retry_exchange, self.retry_routing_key, self.retry_queue)]
        for tier, (name, ttl) in enumerate(self.delays.items(), 1):
            way_out, delay_queue = self.ways_out[tier], f"{self.delay_queue}.{name}"
            onward = {DEAD_LETTER_EXCHANGE: way_out.exchange, DEAD_LETTER_KEY: way_out.key}
            into = Binding(self.delay_exchange, f"binding.#.{name}", delay_queue)
            if tier <= self.tiers:
                exchanges.append(Exchange(way_out.exchange))
                queues.append(Queue(way_out.queue, read))
            queues.append(Queue(delay_queue, {**onward, TTL: ttl, **held}))
            bindings += [into, way_out] if tier <= self.tiers else [into]
        dead = self._dead_letters(unlimited_deliveries=unlimited_deliveries)
        return Topology(tuple(exchanges), tuple(queues), tuple(bindings)) + dead


def demonstration(ladder: Ladder) -> Topology:
    """The three test queues whose failures arrive in the ladder's retry queue."""
    exchange = "test-retry-exchange"
    events = {"rk.test.pass": "test-pass-queue", "rk.test.fail": "test-fail-queue"}
    events["rk.test.fail.pass"] = "test-fail-pass-queue"
    arguments = {
        DEAD_LETTER_EXCHANGE: ladder.retry_exchange,
        DEAD_LETTER_KEY: ladder.retry_routing_key,
        **queue_worked_on(ladder.queue_type),
    }
    return Topology(
        (Exchange(exchange),),
        tuple(Queue(queue, arguments) for queue in events.values()),
        tuple(Binding(exchange, key, queue) for key, queue in events.items()),
    )


@dataclass(frozen=True, slots=True)
class PerQueue(_WithDeadLetterQueue):
    queue: str
    exchange: str
    exchange_type: str = "topic"
    """topic or direct: through a fanout exchange a message that leaves X.delay would enter it again."""
    ttl: int = 10_000
    """Milliseconds in X.delay."""
    queue_type: str = "classic"
    has_delay: bool = True
    """There is X.delay; without it a message returns at once, and waits only for the next run."""
    dlq_exchange: str = "dlq-exchange"
    dlq_routing_key: str = "dlq-routing-key"
    dlq_queue: str = "dlq-queue"
    dlq_queue_type: str | None = None
    """The type of the dead-letter queue, as for a ladder."""

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
        """The only queue that X.delay leads to, wherever a message failed."""
        return self.queue

    def delay(self, event: str, tier: int) -> Route:  # noqa: ARG002  (there is one delay for every event)
        # By the default exchange: through the exchange of X every queue with a matching binding would get a copy.
        return Route("", self.delay_queue if self.has_delay else self.queue)

    @property
    def sources(self) -> tuple[Source, ...]:
        return (Source(self.retry_queue, first_stage=True),)

    @property
    def ways_out(self) -> dict[int, Binding]:
        """The binding by which messages return from X.delay to X, as that of tier 1."""
        return {1: Binding(self.exchange, self.queue, self.queue)} if self.has_delay else {}

    @property
    def delay_queues(self) -> tuple[str, ...]:
        return (self.delay_queue,) if self.has_delay else ()

    @property
    def own_queues(self) -> frozenset[str]:
        """All queues but X: a death there is a failure."""
        return frozenset((self.retry_queue, self.delay_queue, relay_of(self.delay_queue), self.dlq_queue))

    @property
    def own_exchanges(self) -> frozenset[str]:
        return frozenset((self.retry_exchange, self.dlq_exchange))

    @property
    def exchange_names(self) -> frozenset[str]:
        return self.own_exchanges | {self.exchange}

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
        dead = self._dead_letters(unlimited_deliveries=unlimited_deliveries)
        return Topology(exchanges, tuple(queues), tuple(bindings)) + dead


@dataclass(frozen=True, slots=True)
class Pipeline:
    exchange: str
    queue: str
    ttl: int = 300_000
    """Milliseconds after which a message that nobody took becomes a dead letter."""
    queue_type: str = "classic"
    delayed_retry_min: int | None = None
    """Milliseconds that the broker holds a message back after its first failure; None: it comes back at once."""
    delayed_retry_max: int | None = None

    @property
    def delayed_retry(self) -> DelayedRetry | None:
        least = self.delayed_retry_min
        if least is None:
            return None
        return DelayedRetry(least, longest_delay(least, self.delayed_retry_max), _PIPELINE_DELIVERIES)

    @property
    def dead_letter_exchange(self) -> str:
        return f"dlq.{self.exchange}"

    @property
    def dead_letter_queue(self) -> str:
        """It has the name of the exchange that leads to it."""
        return self.dead_letter_exchange

    @property
    def delay_queues(self) -> tuple[str, ...]:
        """None: a pipeline does not delay."""
        return ()

    @property
    def dead_letter_queues(self) -> tuple[str, ...]:
        return (self.dead_letter_queue,)

    @property
    def own_queues(self) -> frozenset[str]:
        return frozenset(self.dead_letter_queues)

    @property
    def own_exchanges(self) -> frozenset[str]:
        return frozenset((self.dead_letter_exchange,))

    def topology(self, *, unlimited_deliveries: bool = False) -> Topology:
        dead = self.dead_letter_queue
        work = {DEAD_LETTER_EXCHANGE: dead, TTL: self.ttl, **queue_worked_on(self.queue_type)}
        if self.queue_type == "quorum":
            # The broker refuses this argument for a classic queue, which counts no deliveries; there the worker counts.
            work[DELIVERY_LIMIT] = _PIPELINE_DELIVERIES
        retry = self.delayed_retry
        return Topology(
            # Fanout exchanges: a message arrives with any key, and keeps it.
            (Exchange(self.exchange, "fanout"), Exchange(dead, "fanout")),
            (
                Queue(self.queue, work),
                Queue(dead, queue_read(self.queue_type, unlimited_deliveries=unlimited_deliveries)),
            ),
            (Binding(self.exchange, "", self.queue), Binding(dead, "", dead)),
            () if retry is None else (Policy(self.queue, retry),),
        )


@dataclass(frozen=True, slots=True)
class Native(_WithDeadLetterQueue):
    queue: str
    """The quorum queue of the workers, who declare it themselves."""
    delayed_retry_min: int = 10_000
    """Milliseconds that the broker holds a message back after its first failure."""
    delayed_retry_max: int | None = None
    delivery_limit: int = 3
    queue_type: str = "quorum"
    dlq_exchange: str = "dlq-exchange"
    dlq_routing_key: str = "dlq-routing-key"
    dlq_queue: str = "dlq-queue"
    dlq_queue_type: str | None = None
    """The type of the dead-letter queue, as for a ladder."""

    @property
    def delayed_retry(self) -> DelayedRetry:
        longest = longest_delay(self.delayed_retry_min, self.delayed_retry_max)
        return DelayedRetry(self.delayed_retry_min, longest, self.delivery_limit)

    @property
    def delay_queues(self) -> tuple[str, ...]:
        """None: the broker holds a message back in the queue where it failed."""
        return ()

    @property
    def own_queues(self) -> frozenset[str]:
        return frozenset(self.dead_letter_queues)

    @property
    def own_exchanges(self) -> frozenset[str]:
        return frozenset((self.dlq_exchange,))

    def topology(self, *, unlimited_deliveries: bool = False) -> Topology:
        dead = {"dead-letter-exchange": self.dlq_exchange, "dead-letter-routing-key": self.dlq_routing_key}
        confirmed = {name.removeprefix("x-"): value for name, value in AT_LEAST_ONCE.items()}
        policy = Policy(self.queue, self.delayed_retry, {**dead, **confirmed})
        return self._dead_letters(unlimited_deliveries=unlimited_deliveries) + Topology((), (), (), (policy,))


Kind = Ladder | PerQueue | Pipeline | Native
Drained = Ladder | PerQueue
"""The kinds that a drain takes from."""
KINDS: Final = {"ladder": Ladder, "per-queue": PerQueue, "pipeline": Pipeline, "native": Native}


def whole(kinds: Iterable[Kind], *, unlimited_deliveries: bool = False) -> Topology:
    """What has to be declared for all of these; what they share, once."""
    return reduce(add, (kind.topology(unlimited_deliveries=unlimited_deliveries) for kind in kinds), NOTHING)
