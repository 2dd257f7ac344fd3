"""What the broker reports of queues, exchanges, bindings and policies, as plain values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from dlqbatch.broker.versions import delivery_limit


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """A policy that applies to a queue; at most one policy of users applies, and one of operators."""

    name: str
    priority: int = 0
    definition: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueueFacts:
    name: str
    type: str = "classic"
    durable: bool = True
    auto_delete: bool = False
    exclusive: bool = False
    arguments: Mapping[str, object] = field(default_factory=dict)
    """The arguments as declared, each name with its `x-`."""
    policy: QueuePolicy | None = None
    operator: QueuePolicy | None = None
    consumers: int | None = None
    """None where it is not known; this holds for the counts below as well."""
    messages: int | None = None
    published: int | None = None
    delivered: int | None = None
    redelivered: int | None = None
    redelivered_rate: float = 0.0
    """Redeliveries in a second, at present."""
    delivered_rate: float = 0.0
    strangers: int = 0
    """Consumers that are not a run of ours; counted for our own queues only."""
    stuck: int = 0
    """Messages that are neither ready, unacknowledged nor delayed, and were not some seconds ago."""
    rejected: int = 0
    """The least number of deliveries that ended neither with an acknowledgement nor back in the queue."""
    reported_limit: int | None = None
    """The delivery limit as the broker itself names it, which may be some seconds old."""

    def text(self, name: str) -> str | None:
        """An option that a declaration decides before a policy does."""
        found = (place for place in self._places(name) if isinstance(place, str))
        return next(found, None)

    def number(self, name: str) -> int | None:
        """A limit: of all that are set the smallest counts."""
        found = self._numbers(name)
        return min(found) if found else None

    def delivery_limit(self, version: tuple[int, ...]) -> int | None:
        """How often a message may be delivered; None without a limit, as on every queue that is no quorum queue."""
        if self.type != "quorum":
            return None
        return delivery_limit(self._numbers("delivery-limit"), version, self.reported_limit)

    @property
    def says_limit(self) -> bool:
        """Somebody has set the delivery limit, or that there is none."""
        return bool(self._numbers("delivery-limit"))

    def _numbers(self, name: str) -> list[int]:
        return [found for found in self._places(name) if isinstance(found, int)]

    def _places(self, name: str) -> tuple[object, ...]:
        policies = (policy.definition.get(name) for policy in (self.operator, self.policy) if policy is not None)
        return (self.arguments.get(f"x-{name}"), *policies)

    @property
    def dead_letter_exchange(self) -> str | None:
        return self.text("dead-letter-exchange")

    @property
    def dead_letter_key(self) -> str | None:
        return self.text("dead-letter-routing-key")

    @property
    def ttl(self) -> int | None:
        return self.number("message-ttl")

    @property
    def delayed_retry(self) -> tuple[str, int] | None:
        """The kind of delayed retry that is in effect (RabbitMQ 4.3), and its longest delay in ms."""
        kind = self.delayed_retry_type
        if kind == "disabled":
            return None
        longest = self.retry_delay("delayed-retry-max")
        return kind, longest if longest is not None else self.number("delayed-retry-min") or 0

    @property
    def delayed_retry_type(self) -> str:
        """A policy decides it before the declaration does."""
        declared, *policies = self._places("delayed-retry-type")
        return next((str(found) for found in (*policies, declared) if found is not None), "disabled")

    def retry_delay(self, name: str) -> int | None:
        """Of two policies the larger delayed-retry-min counts, and the smaller delayed-retry-max; then the argument."""
        declared, *policies = self._places(name)
        found = [each for each in policies if isinstance(each, int)]
        if not found:
            return declared if isinstance(declared, int) else None
        return max(found) if name == "delayed-retry-min" else min(found)

    @property
    def overflow(self) -> str:
        return self.text("overflow") or "drop-head"

    @property
    def longest(self) -> str | None:
        """The bound of its length, in words."""
        for name in ("max-length", "max-length-bytes"):
            bound = self.number(name)
            if bound is not None:
                return f"{name} {bound}"
        return None

    @property
    def is_lasting(self) -> bool:
        return self.durable and not self.auto_delete and not self.exclusive


@dataclass(frozen=True, slots=True)
class ExchangeFacts:
    name: str
    type: str = "topic"
    alternate: str | None = None


@dataclass(frozen=True, slots=True)
class BindingFacts:
    source: str
    key: str
    destination: str
    to_queue: bool = True
    properties_key: str = field(default="", compare=False)
    """The name of a binding in the management API, unique between its exchange and its queue."""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> BindingFacts:
        to_queue = answer["destination_type"] == "queue"
        name = str(answer.get("properties_key", ""))
        return cls(answer["source"], answer["routing_key"], answer["destination"], to_queue, name)


@dataclass(frozen=True, slots=True)
class Refused:
    """A right that the broker denied."""

    right: str
    """read or write."""
    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Permissions:
    """The patterns of our user on this virtual host."""

    configure: str
    write: str
    read: str


@dataclass(frozen=True, slots=True)
class Deprecated:
    """A feature that the broker will drop, and that somebody uses."""

    name: str
    phase: str
    url: str


@dataclass(frozen=True, slots=True)
class BrokerFacts:
    version: tuple[int, ...]
    vhost: str
    user: str
    api: str
    """The address of the management API, without a login."""
    where: str = ""
    """Host and port that the connection led to."""
    silent: str | None = None
    """Why the management API does not answer, if it does not."""
    may_not_ask: bool = False
    """The management API answers that this user may not ask."""
    map: Map | None = None
    missing: frozenset[tuple[str, str]] = frozenset()
    """The parts of our topologies that are not there, by kind and name."""
    alarms: tuple[str, ...] = ()
    deprecated: tuple[Deprecated, ...] = ()
    flags_off: tuple[str, ...] = ()
    """Stable feature flags that are not enabled."""
    default_queue_type: str | None = None
    """The type of a queue that is declared without a type on this virtual host."""
    skew: float | None = None
    """Seconds that its clock is ahead of ours."""
    refused: tuple[Refused, ...] = ()
    permissions: Permissions | None = None
    """None where this user may not ask."""
    change_left_behind: bool = False
    """The mark of a change of delays is there, and nobody is at work on it."""


def listed(names: Iterable[str], most: int = 5) -> str:
    """The first few by name."""
    every = sorted(names)
    left = len(every) - most
    return ", ".join(f"'{name}'" for name in every[:most]) + (f" and {left} more" if left > 0 else "")


class Policies:
    """Which policies apply to what; the broker's own answer to that is a statistic, and some seconds old."""

    def __init__(self, users: list[dict[str, Any]], operators: list[dict[str, Any]]) -> None:
        self._users = sorted(users, key=_priority, reverse=True)
        self._operators = sorted(operators, key=_priority, reverse=True)

    def on(self, answer: Mapping[str, Any]) -> QueueFacts:
        kinds = {"queues", "all", f"{answer.get('type', 'classic')}_queues"}
        stats = answer.get("message_stats")
        stats = stats if isinstance(stats, dict) else {}
        return QueueFacts(
            name=answer["name"],
            type=str(answer.get("type", "classic")),
            durable=bool(answer.get("durable", True)),
            auto_delete=bool(answer.get("auto_delete", False)),
            exclusive=bool(answer.get("exclusive", False)),
            arguments=dict(answer.get("arguments") or {}),
            policy=_policy_for(self._users, answer["name"], kinds),
            operator=_policy_for(self._operators, answer["name"], kinds),
            consumers=_number(answer.get("consumers")),
            messages=_number(answer.get("messages")),
            published=_number(stats.get("publish", 0)),
            delivered=_number(stats.get("deliver_get", 0)),
            redelivered=_number(stats.get("redeliver", 0)),
            redelivered_rate=_rate(stats, "redeliver"),
            delivered_rate=_rate(stats, "deliver_get"),
            stuck=stuck_messages(answer),
            rejected=_rejected(answer, stats),
            reported_limit=_number(answer.get("delivery_limit")),
        )

    def named(self, name: str) -> Mapping[str, Any] | None:
        """The policy of this name, as the broker has it."""
        return next((each for each in self._users if each.get("name") == name), None)

    def matching(self, queue: str, kind: str) -> tuple[QueuePolicy, ...]:
        """Every policy for this queue; the first one applies, or any of those with the same priority."""
        found = (_policy_for([each], queue, {"queues", "all", f"{kind}_queues"}) for each in self._users)
        return tuple(each for each in found if each is not None)

    def over(self, answer: Mapping[str, Any]) -> ExchangeFacts:
        policy = _policy_for(self._users, answer["name"], {"exchanges", "all"})
        alternate = dict(answer.get("arguments") or {}).get("alternate-exchange")
        if alternate is None and policy is not None:
            alternate = policy.definition.get("alternate-exchange")
        return ExchangeFacts(answer["name"], str(answer["type"]), alternate if isinstance(alternate, str) else None)


@dataclass(frozen=True, slots=True)
class Map:
    """Everything in the virtual host, as the management API shows it."""

    queues: Mapping[str, QueueFacts]
    exchanges: Mapping[str, ExchangeFacts]
    bindings: tuple[BindingFacts, ...]
    """All bindings but those of every queue to the default exchange."""
    policies: Policies = field(default_factory=lambda: Policies([], []))


def _priority(policy: Mapping[str, Any]) -> int:
    return int(policy.get("priority", 0))


def _policy_for(policies: Iterable[Mapping[str, Any]], name: str, kinds: set[str]) -> QueuePolicy | None:
    for policy in policies:
        try:
            applies = policy.get("apply-to", "all") in kinds and re.search(policy["pattern"], name) is not None
        except re.error:
            continue
        if applies:
            return QueuePolicy(str(policy["name"]), _priority(policy), dict(policy["definition"]))
    return None


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _rate(stats: Mapping[str, Any], name: str) -> float:
    details = stats.get(f"{name}_details")
    rate = details.get("rate") if isinstance(details, dict) else None
    return float(rate) if isinstance(rate, int | float) else 0.0


def stuck_messages(answer: Mapping[str, Any]) -> int:
    total = _number(answer.get("messages"))
    ready, unacknowledged = _number(answer.get("messages_ready")), _number(answer.get("messages_unacknowledged"))
    if total is None or ready is None or unacknowledged is None:
        return 0
    return max(total - ready - unacknowledged - (_number(answer.get("messages_delayed")) or 0), 0)


def _rejected(answer: Mapping[str, Any], stats: Mapping[str, Any]) -> int:
    delivered = (_number(stats.get("deliver")) or 0) + (_number(stats.get("get")) or 0)
    ended = (_number(stats.get("ack")) or 0) + (_number(stats.get("redeliver")) or 0)
    # What is ready may have been put back by a reader that only looked.
    held = sum(_number(answer.get(f"messages_{state}")) or 0 for state in ("ready", "unacknowledged", "delayed"))
    return max(delivered - ended - held, 0)


class QueueCounters(NamedTuple):
    """What the broker has counted for a queue since it was declared or its node was started."""

    published: int
    acknowledged: int
    """Acknowledgements, and deliveries and gets that needed none."""
    redelivered: int


class ChannelReading(NamedTuple):
    """A channel that consumes from the queue."""

    name: str
    unacknowledged: int
    prefetch: int
    """How many it may hold; 0 is without a limit."""
    acknowledged: int
    """What it has acknowledged of this queue; 0 where it takes from other queues too, so that this is not known."""


class QueueReading(NamedTuple):
    """A queue as the broker showed it once."""

    queue: str
    at: datetime
    """The time of the request, by the dead store's clock. The figures may be older."""
    is_there: bool
    ready: int = 0
    unacknowledged: int = 0
    delayed: int = 0
    """Held back by delayed retry."""
    total: int = 0
    """All messages, which can be more than the three: dead letters that at-least-once has not handed on."""
    consumers: int = 0
    counters: QueueCounters | None = None
    in_order: bool = False
    """No priorities and no delayed retry: what came first is delivered first."""
    may_drop: str = ""
    """Why a message may leave without an acknowledgement and without being dead-lettered; empty if it may not.

    A TTL or a maximal length without a dead-letter exchange, for example, or an expiry of the queue.
    """
    drops_after: int | None = None
    """The broker drops a message after so many deliveries, and does not dead-letter it."""
    channels: tuple[ChannelReading, ...] = ()
    """All channels that consume from it; none if any of them is hidden from us."""
    by_management: bool = False
    """False: a passive declaration. Its ready messages and consumers are live, and nothing else is known."""
    may_hide_delayed: bool = False
    """The queue may hold messages back that this reading does not show: a quorum queue of 4.3 by AMQP alone."""
    missing: str = ""
    """Why the management API did not answer, and what to do; empty if it did."""


class Target(NamedTuple):
    """The queues that a message sent to an origin can have gone to."""

    queues: tuple[str, ...] = ()
    """The origin itself if it is a queue, else all queues that the exchange's bindings lead the key to."""
    unknown: str = ""
    """Why the queues cannot be known, and what to do; empty if they are known."""
    is_gone: bool = False
    """The broker says that there is no such queue or exchange."""
    comes_back_through: tuple[str, ...] | None = None
    """Every queue that the dead letters of these queues can end in; None if that cannot be known."""
    delays: tuple[str, ...] = ()
    """The queues that a dead letter waits in on its way there: they have a TTL, and nobody takes from them."""
    held_back_in: tuple[tuple[str, str], ...] | None = None
    """Queues of a framework that does not reject what it tries again, each with the one where that waits; None if that
    cannot be known."""
