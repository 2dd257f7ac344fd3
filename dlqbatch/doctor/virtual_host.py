"""What `doctor` knows of a virtual host: what the settings say, what is there, and what follows from its bindings."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from dlqbatch.amqp.patterns import is_wildcard
from dlqbatch.broker.access import management_api
from dlqbatch.broker.connection import Connection
from dlqbatch.broker.facts import BindingFacts, BrokerFacts, Map, QueueFacts
from dlqbatch.broker.management import expansion
from dlqbatch.broker.routing import Routes
from dlqbatch.doctor import commands
from dlqbatch.errors import BrokerUnreachable
from dlqbatch.settings import Settings
from dlqbatch.settings.topologies import topologies
from dlqbatch.topology.declare import dead_letter_queues, limits_deliveries
from dlqbatch.topology.kinds import Drained, Kind, Ladder
from dlqbatch.topology.model import Policy

_TIER: Final = re.compile(r"(.+[.-])\d+")


@dataclass(frozen=True, slots=True)
class Part:
    """One topology as the settings describe it."""

    name: str
    exchanges: Mapping[str, str]
    """The type of each exchange."""
    queues: Mapping[str, Mapping[str, object]]
    """The arguments of each queue."""
    bindings: tuple[BindingFacts, ...]
    delay_queues: frozenset[str] = frozenset()
    inner_queues: frozenset[str] = frozenset()
    """The queues that only dlqbatch uses."""
    policies: tuple[Policy, ...] = ()
    """The policies that make the broker delay retries."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """What the settings say of queues, exchanges and events."""

    parts: tuple[Part, ...]
    first_stage: frozenset[str]
    """The queues in which failures arrive."""
    read: frozenset[str]
    """The queues that some job takes messages from."""
    dead_letter_queue: str
    retry: tuple[str, str] | None = None
    """The exchange and the routing key by which failures reach the ladder."""
    retry_queue: str | None = None
    """The first queue of the ladder; None without a ladder."""
    dead_letter_queues: frozenset[str] = frozenset()
    """The dead-letter queues of every topology in the settings."""
    window_seconds: float = 900.0
    """How long a retry is observed where the broker does not show its outcome."""
    ladders: tuple[Ladder, ...] = ()
    written: tuple[tuple[str, str], ...] = ()
    """The exchange and the routing key of all that a drain publishes."""
    ingest: tuple[str, ...] = ()
    """The queues that the settings name for ingest."""
    ingest_unmatched: tuple[str, ...] = ()
    """The wildcards for ingest that match no queue."""
    events: Mapping[str, int] = field(default_factory=dict)
    """The retries of each event in application.properties."""
    default_max_retries: int = 3
    allow_empty_policy: bool = False

    @property
    def own_queues(self) -> frozenset[str]:
        return frozenset(name for part in self.parts for name in part.queues)

    @property
    def inner_queues(self) -> frozenset[str]:
        return frozenset().union(*(part.inner_queues for part in self.parts))

    @property
    def delay_queues(self) -> frozenset[str]:
        return frozenset().union(*(part.delay_queues for part in self.parts))

    @property
    def native_queues(self) -> frozenset[str]:
        """The queues whose retries the broker delays, as the settings say."""
        return frozenset(policy.queue for part in self.parts for policy in part.policies)

    @property
    def own_exchanges(self) -> frozenset[str]:
        return frozenset(name for part in self.parts for name in part.exchanges)


def deployment_of(settings: Settings, connection: Connection) -> Deployment:
    kinds = topologies(settings)
    drained = [kind for kind in kinds.values() if isinstance(kind, Drained)]
    sources = [source for kind in drained for source in kind.sources]
    ingest, unmatched = _matched(settings, settings.ingest_queues)
    checked, _ = _matched(settings, settings.check_queues)
    dead = dead_letter_queues(settings)
    return Deployment(
        parts=tuple(_part(name, kind, connection) for name, kind in kinds.items()),
        first_stage=frozenset(source.queue for source in sources if source.first_stage),
        read=frozenset([*(source.queue for source in sources), *dead, *ingest, *checked]),
        dead_letter_queue=dead[0] if dead else settings.dlq_queue,
        dead_letter_queues=frozenset(dead),
        retry=(settings.retry_exchange, settings.retry_routing_key) if settings.ladder else None,
        retry_queue=settings.retry_queue if settings.ladder else None,
        ladders=tuple(kind for kind in drained if isinstance(kind, Ladder)),
        window_seconds=settings.observation_window.total_seconds(),
        written=tuple(route for kind in drained for route in _written(kind)),
        ingest=tuple(name for name in settings.ingest_queues if not is_wildcard(name)),
        ingest_unmatched=unmatched,
        events={
            name: settings.default_max_retries if retries is None else retries
            for name, retries in settings.events.items()
        },
        default_max_retries=settings.default_max_retries,
        allow_empty_policy=settings.allow_empty_policy,
    )


def _written(kind: Drained) -> tuple[tuple[str, str], ...]:
    dead = kind.dead()
    delays = [kind.delay("event", tier) for tier in kind.ways_out or (1,)]
    return tuple((route.exchange, route.key or "") for route in (dead, *delays))


def _part(name: str, kind: Kind, connection: Connection) -> Part:
    wanted = kind.topology(unlimited_deliveries=limits_deliveries(connection))
    return Part(
        name,
        {one.name: one.type for one in wanted.exchanges},
        {one.name: one.arguments for one in wanted.queues},
        tuple(BindingFacts(one.exchange, one.key, one.queue) for one in wanted.bindings),
        frozenset(kind.delay_queues),
        kind.own_queues,
        wanted.policies,
    )


def _matched(settings: Settings, names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The queues of these names, and the wildcards that match none; without the management API only the names."""
    try:
        return expansion(names, management_api(settings))[:2]
    except BrokerUnreachable:
        return tuple(name for name in names if not is_wildcard(name)), ()


@dataclass(frozen=True)
class VirtualHost:
    """The queues and exchanges of the broker, and the part that each plays for the topologies of the settings."""

    broker: BrokerFacts
    there: Map
    deployment: Deployment

    @cached_property
    def routes(self) -> Routes:
        return Routes(self.there)

    @cached_property
    def shared_queues(self) -> tuple[QueueFacts, ...]:
        """Every queue that is neither exclusive nor a stream. Streams delete messages by rules of their own."""
        every = sorted(self.there.queues.values(), key=lambda queue: queue.name)
        return tuple(queue for queue in every if not queue.exclusive and queue.type != "stream")

    @cached_property
    def _dead_letters_reach(self) -> Mapping[str, frozenset[str]]:
        """For each queue, the queues that its dead letters are sure to reach."""
        reached = {}
        for queue in self.there.queues.values():
            exchange = queue.dead_letter_exchange
            if exchange is None:
                continue
            if queue.dead_letter_key is not None:
                keys: tuple[str | None, ...] = (queue.dead_letter_key,)
            else:
                keys = (None, *self.routes.keys_of(queue))
            certain = frozenset().union(*(self.routes.certain(exchange, key) for key in keys))
            only = self.routes.possible(exchange, queue.dead_letter_key) if exchange else frozenset[str]()
            reached[queue.name] = certain | only if len(only) == 1 else certain
        return reached

    @cached_property
    def origins(self) -> frozenset[str]:
        """Queues whose dead letters reach a queue that a drain takes failures from."""
        feeding = {name for name, led in self._dead_letters_reach.items() if led & self.deployment.first_stage}
        return frozenset(feeding) - self.deployment.first_stage

    @cached_property
    def ends(self) -> frozenset[str]:
        """Queues that dead letters reach and stay in: there is no consumer, and no dead-letter exchange."""
        led = frozenset().union(*self._dead_letters_reach.values())
        queues = (self.there.queues[name] for name in led if name in self.there.queues)
        return frozenset(queue.name for queue in queues if queue.dead_letter_exchange is None and not queue.consumers)

    @cached_property
    def holding(self) -> frozenset[str]:
        """Queues of dead letters and of retries, whose messages must not be lost however long they wait."""
        return (self.deployment.read | self.ends) - self.delays

    @cached_property
    def delays(self) -> frozenset[str]:
        """Delay queues: ours, and every queue with a TTL, a dead-letter exchange and no consumer."""
        others = {
            queue.name
            for queue in self.shared_queues
            if queue.ttl is not None and queue.dead_letter_exchange is not None
            if queue.consumers == 0 and not queue.delivered
        }
        return self.deployment.delay_queues | (others - self.deployment.own_queues)

    @cached_property
    def old_tiers(self) -> frozenset[str]:
        """Queues of tiers that the ladder no longer has, by their names."""
        own = self.deployment.own_queues
        stems = {tier[1] for name in own if (tier := _TIER.fullmatch(name)) is not None}
        others = {queue.name for queue in self.shared_queues} - own
        return frozenset(name for name in others if (tier := _TIER.fullmatch(name)) is not None and tier[1] in stems)

    @cached_property
    def feeders(self) -> Mapping[str, frozenset[str]]:
        """For each queue, the other queues whose dead letters are sure to reach it."""
        found: defaultdict[str, set[str]] = defaultdict(set)
        for queue, led in self._dead_letters_reach.items():
            for target in led - {queue}:
                found[target].add(queue)
        return {target: frozenset(queues) for target, queues in found.items()}

    def next_stage(self, queue: QueueFacts) -> str:
        """The queue for its dead letters: the ladder's for failures, the dead-letter queue for what has passed it."""
        retry = self.deployment.retry_queue
        if retry is not None and queue.name not in self.holding | self.deployment.inner_queues:
            return retry
        last = self.deployment.dead_letter_queue
        return f"{last}.rest" if queue.name == last else last

    def with_queue(self, name: str, then: str) -> str:
        """The command `then`, after a command that makes this queue if it is not there."""
        if name in self.there.queues:
            return then
        made = commands.APPLY if name in self.deployment.own_queues else commands.make_queue(self.broker, name)
        return f"{made} && {then}"

    def without_option(self, queue: QueueFacts, *options: str) -> str:
        return commands.without_option(self.broker, queue, self.routes.into(queue.name), *options)

    def declare_anew(self, queue: QueueFacts, wanted: Mapping[str, object], *dropped: str) -> str:
        return commands.declare_anew(self.broker, queue, self.routes.into(queue.name), wanted, *dropped)

    def dead_letter_to(self, queue: QueueFacts, exchange: str, key: str | None) -> str:
        return commands.dead_letter_to(self.broker, queue, self.routes.into(queue.name), exchange, key)

    def to_retry(self, queue: QueueFacts) -> str:
        """The command that sends its failures to the ladder; without a ladder, to the dead-letter queue."""
        target = self.next_stage(queue)
        if target != self.deployment.retry_queue or self.deployment.retry is None:
            led = self.dead_letter_to(queue, "", target)
            return self.with_queue(target, led)
        exchange, key = self.deployment.retry
        led = self.dead_letter_to(queue, exchange, key)
        return led if exchange in self.there.exchanges else f"{commands.APPLY} && {led}"
