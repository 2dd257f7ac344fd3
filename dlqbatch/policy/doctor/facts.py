"""What a look at a broker and a database has told, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dlqbatch.policy.events import EventRow

_FIRST_WITH_LIMIT: Final = (4, 0)
_DEFAULT_LIMIT: Final = 20
_UNLIMITED: Final = -1


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """The policy that applies to a queue; it has one of the users' at most, and one of the operators'."""

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
    """As declared, each name with its `x-`."""
    policy: QueuePolicy | None = None
    operator: QueuePolicy | None = None
    consumers: int | None = None
    """None: nobody told; so for the counts below."""
    messages: int | None = None
    published: int | None = None
    delivered: int | None = None
    redelivered: int | None = None
    told_limit: int | None = None
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
        """None: there is none, as on every queue that is no quorum queue."""
        if self.type != "quorum":
            return None
        found = self._numbers("delivery-limit")
        if found:
            limit = max(found) if min(found) <= _UNLIMITED else min(found)
            return None if limit <= _UNLIMITED else limit
        if version < _FIRST_WITH_LIMIT:
            return None
        if self.told_limit is not None and self.told_limit <= _UNLIMITED:
            return None
        return _DEFAULT_LIMIT if self.told_limit is None else self.told_limit

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


@dataclass(frozen=True, slots=True)
class Map:
    """Everything in the virtual host, as the management API tells it."""

    queues: Mapping[str, QueueFacts]
    exchanges: Mapping[str, ExchangeFacts]
    bindings: tuple[BindingFacts, ...]
    """Without those of every queue to the default exchange."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A right that the broker denied when it was asked."""

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
class BrokerFacts:
    version: tuple[int, ...]
    vhost: str
    user: str
    api: str
    """The address of the management API, without a login."""
    silent: str | None = None
    """Why the management API does not answer, if it does not."""
    may_not_ask: bool = False
    """It answers that this user may not."""
    map: Map | None = None
    missing: frozenset[tuple[str, str]] = frozenset()
    """Of the parts of our topologies, by kind and name, those that are not there."""
    alarms: tuple[str, ...] = ()
    skew: float | None = None
    """Seconds that its clock is ahead of ours."""
    refused: tuple[Refused, ...] = ()
    permissions: Permissions | None = None
    """None: this user may not ask."""
    change_left_behind: bool = False
    """The mark of a change of delays is there, and nobody is at work on it."""


@dataclass(frozen=True, slots=True)
class RuleFacts:
    name: str
    problem: str


@dataclass(frozen=True, slots=True)
class DatabaseFacts:
    where: str
    client: str
    """The command that takes one statement of SQL as its last argument."""
    unreachable: str | None = None
    is_there: bool = True
    """False: the default SQLite file, which nobody has made yet."""
    version: str | None = None
    newest: str = ""
    is_known: bool = True
    """This program knows the schema's version."""
    skew: float | None = None
    rows: tuple[EventRow, ...] | None = None
    """None: the table is not there, or cannot be read."""
    unreadable: str | None = None
    """Why the table cannot be read."""
    broken_rules: tuple[RuleFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """One topology as the settings describe it."""

    name: str
    exchanges: Mapping[str, str]
    """Types by name."""
    queues: Mapping[str, Mapping[str, object]]
    """Arguments by name."""
    bindings: tuple[BindingFacts, ...]
    delay_queues: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Deployment:
    """What the settings say, as far as it can be held against what is there."""

    parts: tuple[Part, ...]
    first_stage: frozenset[str]
    """Where failures arrive."""
    read: frozenset[str]
    """All that some job takes from."""
    dead_letter_queue: str
    retry: tuple[str, str] | None = None
    """Exchange and key that failures are dead-lettered with."""
    written: tuple[tuple[str, str], ...] = ()
    """Exchange and key of all that a drain publishes to."""
    ingest: tuple[str, ...] = ()
    """Queues that the settings name for ingest."""
    ingest_unmatched: tuple[str, ...] = ()
    """Wildcards that match nothing."""
    events: Mapping[str, int] = field(default_factory=dict)
    """Of application.properties."""
    default_max_retries: int = 3
    allow_empty_policy: bool = False

    @property
    def own_queues(self) -> frozenset[str]:
        return frozenset(name for part in self.parts for name in part.queues)

    @property
    def own_exchanges(self) -> frozenset[str]:
        return frozenset(name for part in self.parts for name in part.exchanges)


def listed(names: Iterable[str], most: int = 5) -> str:
    """The first few by name."""
    every = sorted(names)
    left = len(every) - most
    return ", ".join(f"'{name}'" for name in every[:most]) + (f" and {left} more" if left > 0 else "")
