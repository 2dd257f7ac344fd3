"""What a topology is made of, and what a run has to know of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlqbatch.message.delivery import Route


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


@dataclass(frozen=True, slots=True)
class Topology:
    exchanges: tuple[Exchange, ...]
    queues: tuple[Queue, ...]
    bindings: tuple[Binding, ...]

    def __add__(self, other: Topology) -> Topology:
        return Topology(self.exchanges + other.exchanges, self.queues + other.queues, self.bindings + other.bindings)


@dataclass(frozen=True, slots=True)
class Source:
    """A queue that a drain takes from."""

    queue: str
    first_stage: bool
    """Failures arrive here; otherwise it is what a tier feeds, and messages are to return from here."""


class Ways(Protocol):
    """Where a topology sends what a decision calls for."""

    @property
    def tiers(self) -> int: ...
    def delay(self, event: str, tier: int) -> Route: ...
    def dead(self) -> Route: ...
