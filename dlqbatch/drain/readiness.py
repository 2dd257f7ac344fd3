"""Whether the queues of a drain are ready before it takes a message: declared, bound, and no delay being changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from dlqbatch.broker.connection import Connection
from dlqbatch.broker.queue_types import compare_types, types_by_api
from dlqbatch.broker.session import depths
from dlqbatch.errors import ChannelRefused, TopologyMismatch, TopologyMissing
from dlqbatch.topology import declare
from dlqbatch.topology.declare import matched
from dlqbatch.topology.kinds import Drained, Kind, PerQueue, whole
from dlqbatch.topology.model import Binding, Queue, Topology, relay_of

if TYPE_CHECKING:
    from dlqbatch.broker.management import Api  # it loads HTTP, which most drains never need

BINDING_MISSING: Final = "binding-missing"
BINDING_UNSEEN: Final = "binding-not-seen"
DELAY_CHANGES: Final = "a delay is being changed (`dlqbatch topology apply --change-ttl`), so nothing was declared"
_NOT_BOUND: Final = (
    "'{exchange}' is not bound to '{queue}' by '{key}': what leaves the delay queue would be lost, so nothing was "
    "delayed. `dlqbatch topology apply` binds it again"
)
_UNSEEN: Final = (
    "whether the delay queues lead anywhere cannot be seen, so nothing was delayed: this login may not bind, and the "
    "management API says: {}. Let it bind (docs/permissions.md), or set dlqbatch.management-url"
)


@dataclass(slots=True)
class Declared:
    """What a process knows of its topologies once it has declared them, or compared them."""

    may_declare: bool
    types: dict[str, str] = field(default_factory=dict)
    """The types of queues that the drain reads and may not declare, as far as they are known."""


class Obstacles(NamedTuple):
    """The reasons why messages cannot be moved as the policy decides."""

    not_read: Mapping[str, str] = {}
    """The queues that are not read, and why."""
    closed: Mapping[str, Mapping[int, str]] = {}
    """The tiers that nothing may be sent to, by queue, with the reason."""
    warnings: tuple[str, ...] = ()


def declare_or_compare(connection: Connection, kinds: Sequence[Kind], *, dry_run: bool) -> Declared | None:
    """Declare what is missing, or compare; None while somebody is changing a delay and not all is as it should be."""
    is_ready = partial(declare.is_ready, delay_queues=_delay_queues(kinds))
    try:
        return Declared(matched(connection, kinds, declare.compare if dry_run else is_ready))
    except (TopologyMissing, TopologyMismatch) as error:
        if declare.changing(connection):
            return None
        if dry_run or isinstance(error, TopologyMismatch):
            raise
    return Declared(matched(connection, kinds, declare.declare))


def quorum_queues_of(
    connection: Connection, drained: Sequence[Drained], declared: Declared | None, api: Callable[[], Api]
) -> frozenset[str]:
    """Which of the queues that are read are quorum queues; TopologyMismatch if the settings say another type.

    A declaration that succeeded has shown the types. For a login that may not declare, the management API shows the
    types of queues that hold messages; without it a refused consumer does, which is a line in the broker's log.
    """
    wanted = {source.queue: kind.queue_type for kind in drained for source in kind.sources}
    declared = declared or Declared(may_declare=False)
    if not declared.may_declare:
        unknown = [queue for queue in wanted if queue not in declared.types]
        waiting = [queue for queue, depth in depths(connection, unknown, ()).items() if depth]
        if waiting:
            shown = types_by_api(api(), waiting)
            declared.types |= compare_types(connection, {queue: wanted[queue] for queue in waiting}, shown)
    return frozenset(queue for queue, kind in wanted.items() if kind == "quorum")


def obstacles(
    connection: Connection,
    drained: Sequence[Drained],
    declared: Declared | None,
    api: Callable[[], Api],
    queues: Collection[str],
    *,
    is_bound: bool,
) -> Obstacles:
    """What keeps messages of these queues from being moved as decided; `is_bound` if all was bound just now."""
    concerned = [kind for kind in drained if any(source.queue in queues for source in kind.sources)]
    not_read: dict[str, str] = {}
    if any(isinstance(kind, PerQueue) and kind.has_delay for kind in concerned) and declare.changing(connection):
        # What is published by name into a delay queue that is being emptied could not be redirected.
        concerned, not_read = without_changing_delays(connection, concerned)
    if is_bound or not concerned:
        return Obstacles(not_read)
    delay_queues = _delay_queues(concerned)
    ways_out = {binding for kind in concerned for binding in kind.ways_out.values()}
    # Without the bindings of delay queues, as in `declare.is_ready`. A login may bind although it may not declare.
    others = {one for one in whole(concerned).bindings if one.queue not in delay_queues}
    every = others | ways_out if declared is None or declared.may_declare else ways_out
    # In a warm process the login may have lost the right to the others meanwhile.
    if any(declare.may_bind(connection, sorted(some, key=str)) for some in (every, ways_out)):
        return Obstacles(not_read)
    return _unbound(concerned, ways_out, api(), not_read)


def _unbound(
    concerned: Sequence[Drained], ways_out: Collection[Binding], api: Api, not_read: Mapping[str, str]
) -> Obstacles:
    """The tiers whose way out the management API does not show are closed."""
    from dlqbatch.topology.inspect import Reader  # noqa: PLC0415  (a cold start)

    reader = Reader(api)
    found = {exchange: reader.bindings_from(exchange) for exchange in sorted({one.exchange for one in ways_out})}
    closed: dict[str, dict[int, str]] = {}
    warnings: dict[str, None] = {}
    for kind in concerned:
        for tier, way_out in kind.ways_out.items():
            there = found[way_out.exchange]
            if there is not None and way_out in there:
                continue
            for source in kind.sources:
                closed.setdefault(source.queue, {})[tier] = BINDING_UNSEEN if there is None else BINDING_MISSING
            if there is None:
                warnings[_UNSEEN.format(reader.silent or "it does not know the exchange")] = None
            else:
                warnings[_NOT_BOUND.format(exchange=way_out.exchange, queue=way_out.queue, key=way_out.key)] = None
    return Obstacles(not_read, closed, tuple(warnings))


def without_changing_delays(connection: Connection, kinds: Sequence[Drained]) -> tuple[list[Drained], dict[str, str]]:
    """What is drained while a delay is being changed, and by queue why the rest is not read."""
    delaying = [kind for kind in kinds if isinstance(kind, PerQueue) and kind.has_delay]
    relays = declare.existing(connection, [relay_of(kind.delay_queue) for kind in delaying])
    not_read = {
        kind.retry_queue: f"'{kind.retry_queue}' was not read: the delay of '{kind.delay_queue}' is being changed"
        for kind in delaying
        if relay_of(kind.delay_queue) in relays
    }
    return [kind for kind in kinds if not isinstance(kind, PerQueue) or kind.retry_queue not in not_read], not_read


def with_home_queues(connection: Connection, drained: Sequence[Drained]) -> tuple[list[Drained], list[str]]:
    """What can be drained because its home queue is there: without it, what leaves the delay queue would be lost."""
    kept: list[Drained] = []
    warnings: list[str] = []
    for kind in drained:
        try:
            if kind.home is not None:
                declare.look(connection, Topology((), (Queue(kind.home),), ()))
            kept.append(kind)
        except ChannelRefused as refused:
            queue = kind.sources[0].queue
            warnings.append(f"'{queue}' was not read: '{kind.home}' cannot be looked at: {refused.text}")
    return kept, warnings


def _delay_queues(kinds: Sequence[Kind]) -> frozenset[str]:
    return frozenset(queue for kind in kinds for queue in kind.delay_queues)
