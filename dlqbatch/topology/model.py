"""What a topology is made of, and what a run has to know of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlqbatch.message.delivery import Route


CHANGING: Final = "dlqbatch.changing"
"""The queue that is there while a delay is being changed: no run declares anything, for that would undo a step."""


def relay_of(delay_queue: str) -> str:
    """The queue that stands in for a delay queue while that is emptied and made anew."""
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


@dataclass(frozen=True, slots=True)
class Topology:
    exchanges: tuple[Exchange, ...]
    queues: tuple[Queue, ...]
    bindings: tuple[Binding, ...]

    def __add__(self, other: Topology) -> Topology:
        """Both, what they share once: two sets may dead-letter to one place, or work on one exchange."""
        return Topology(
            self.exchanges + tuple(one for one in other.exchanges if one not in self.exchanges),
            self.queues + tuple(one for one in other.queues if one not in self.queues),
            self.bindings + tuple(one for one in other.bindings if one not in self.bindings),
        )

    def without(self, other: Topology) -> Topology:
        """What of this no part of the other has the name of."""
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
    """Failures arrive here; otherwise it is what a tier feeds, and messages are to return from here."""


class Ways(Protocol):
    """Where a topology sends what a decision calls for."""

    @property
    def tiers(self) -> int: ...
    @property
    def waits(self) -> bool:
        """There is a delay queue; without one, what is to be tried again goes back at once."""

    def delay(self, event: str, tier: int) -> Route: ...
    def dead(self) -> Route: ...
