"""What a topology is made of: exchanges, queues with their arguments, bindings, and policies for delayed retry."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

DEAD_LETTER_EXCHANGE: Final = "x-dead-letter-exchange"
DEAD_LETTER_KEY: Final = "x-dead-letter-routing-key"
TTL: Final = "x-message-ttl"
QUEUE_TYPE: Final = "x-queue-type"
DELIVERY_LIMIT: Final = "x-delivery-limit"

CLASSIC: Final[dict[str, str | int]] = {QUEUE_TYPE: "classic"}
QUORUM: Final[dict[str, str | int]] = {QUEUE_TYPE: "quorum"}
# Only quorum queues can dead-letter with confirms.
AT_LEAST_ONCE: Final[dict[str, str | int]] = {
    "x-dead-letter-strategy": "at-least-once",
    "x-overflow": "reject-publish",
}

POLICY_PREFIX: Final = "dlqbatch.native."
"""The beginning of the name of each policy that dlqbatch sets; what follows is the name of the queue."""

CHANGING: Final = "dlqbatch.changing"
"""The queue that exists while a delay is being changed: no run declares anything, because that would undo a step."""


def queue_read(queue_type: str, *, unlimited_deliveries: bool) -> dict[str, str | int]:
    """The arguments of a queue that dlqbatch takes from.

    The type is always set, because the default type of a virtual host may be quorum. From 4.0 on a quorum queue drops a
    message after 20 deliveries unless its limit is -1, which older brokers refuse.
    """
    if queue_type != "quorum":
        return dict(CLASSIC)
    return {**QUORUM, DELIVERY_LIMIT: -1} if unlimited_deliveries else dict(QUORUM)


def queue_worked_on(queue_type: str) -> dict[str, str | int]:
    """The arguments of a queue whose messages the broker dead-letters when they fail or expire."""
    return QUORUM | AT_LEAST_ONCE if queue_type == "quorum" else dict(CLASSIC)


def in_name(milliseconds: int) -> str:
    """A delay as it stands in the name of its queue: in whole seconds (`60s`), or else in milliseconds (`1500ms`)."""
    seconds, rest = divmod(milliseconds, 1000)
    return f"{milliseconds}ms" if rest else f"{seconds}s"


def relay_of(delay_queue: str) -> str:
    """The queue that takes the place of a delay queue while its TTL is changed."""
    return f"{delay_queue}.relay"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A durable exchange."""

    name: str
    type: str = "topic"


@dataclass(frozen=True, slots=True)
class Queue:
    """A durable queue."""

    name: str
    arguments: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Binding:
    exchange: str
    key: str
    queue: str

    @property
    def in_words(self) -> str:
        return f"{self.exchange} --{self.key}--> {self.queue}"


_LONGEST_RETRY_DELAY: Final = 300_000
"""The longest delay of the broker's own retries in milliseconds, where nobody has set one."""


@dataclass(frozen=True, slots=True)
class DelayedRetry:
    """RabbitMQ's delayed retry: the delay grows by the minimum with each failure, up to the maximum (milliseconds)."""

    minimum: int
    maximum: int
    deliveries: int
    """The delivery limit, which is the number of retries: the failure after the last one dead-letters a message."""

    @property
    def delays(self) -> tuple[int, ...]:
        return tuple(min(self.minimum * number, self.maximum) for number in range(1, self.deliveries + 1))

    @property
    def options(self) -> dict[str, str | int]:
        """The type is `failed`, so that what a reader looks at and puts back with basic.nack stays visible."""
        limits = {"delayed-retry-min": self.minimum, "delayed-retry-max": self.maximum}
        return {"delayed-retry-type": "failed", **limits, "delivery-limit": self.deliveries}


def longest_delay(minimum: int, maximum: int | None) -> int:
    """The maximum as set; where nobody has set one, five minutes, or a minimum above that."""
    return max(minimum, _LONGEST_RETRY_DELAY) if maximum is None else maximum


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy for one queue of workers. Name, pattern and kind of queue together are the mark that it is ours."""

    queue: str
    delayed_retry: DelayedRetry
    dead_letters: Mapping[str, str | int] = field(default_factory=dict)
    """Where and how messages are dead-lettered, unless the declaration of the queue says it."""

    @property
    def definition(self) -> dict[str, str | int]:
        return {**self.delayed_retry.options, **self.dead_letters}

    @property
    def name(self) -> str:
        return POLICY_PREFIX + self.queue

    @property
    def body(self) -> dict[str, object]:
        """The policy as the management API takes it. A policy for every queue mostly has priority 0."""
        pattern = f"^{re.escape(self.queue)}$"
        return {"pattern": pattern, "apply-to": "quorum_queues", "priority": 1, "definition": self.definition}

    def is_form_of(self, found: Mapping[str, object]) -> bool:
        """Whether a policy of this name was made by dlqbatch, with these values or with others."""
        options, ours = found.get("definition"), self.body
        is_in_form = all(found.get(part) == ours[part] for part in ("pattern", "apply-to"))
        return is_in_form and isinstance(options, Mapping) and options.keys() <= self.definition.keys()


@dataclass(frozen=True, slots=True)
class Topology:
    exchanges: tuple[Exchange, ...]
    queues: tuple[Queue, ...]
    bindings: tuple[Binding, ...]
    policies: tuple[Policy, ...] = ()

    def __add__(self, other: Topology) -> Topology:
        """The parts of both, each once: two topologies may share a dead-letter queue or an exchange."""
        return Topology(
            self.exchanges + tuple(one for one in other.exchanges if one not in self.exchanges),
            self.queues + tuple(one for one in other.queues if one not in self.queues),
            self.bindings + tuple(one for one in other.bindings if one not in self.bindings),
            self.policies + tuple(one for one in other.policies if one not in self.policies),
        )

    def without(self, other: Topology) -> Topology:
        """The parts of this topology whose names the other does not have."""
        exchanges, queues = {one.name for one in other.exchanges}, {one.name for one in other.queues}
        return Topology(
            tuple(one for one in self.exchanges if one.name not in exchanges),
            tuple(one for one in self.queues if one.name not in queues),
            tuple(one for one in self.bindings if one not in other.bindings),
            tuple(one for one in self.policies if one not in other.policies),
        )


NOTHING: Final = Topology((), (), ())


@dataclass(frozen=True, slots=True)
class Source:
    """A queue that a drain takes from."""

    queue: str
    first_stage: bool
    """Failures arrive here. False: it is behind a tier, and its messages return to their origins."""
