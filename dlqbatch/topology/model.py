"""What a topology is made of: exchanges, queues with their arguments, and bindings."""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class Topology:
    exchanges: tuple[Exchange, ...]
    queues: tuple[Queue, ...]
    bindings: tuple[Binding, ...]

    def __add__(self, other: Topology) -> Topology:
        """The parts of both, each once: two topologies may share a dead-letter queue or an exchange."""
        return Topology(
            self.exchanges + tuple(one for one in other.exchanges if one not in self.exchanges),
            self.queues + tuple(one for one in other.queues if one not in self.queues),
            self.bindings + tuple(one for one in other.bindings if one not in self.bindings),
        )

    def without(self, other: Topology) -> Topology:
        """The parts of this topology whose names the other does not have."""
        exchanges, queues = {one.name for one in other.exchanges}, {one.name for one in other.queues}
        return Topology(
            tuple(one for one in self.exchanges if one.name not in exchanges),
            tuple(one for one in self.queues if one.name not in queues),
            tuple(one for one in self.bindings if one not in other.bindings),
        )


NOTHING: Final = Topology((), (), ())


@dataclass(frozen=True, slots=True)
class Source:
    """A queue that a drain takes from."""

    queue: str
    first_stage: bool
    """Failures arrive here. False: it is behind a tier, and its messages return to their origins."""
