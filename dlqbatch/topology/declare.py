"""The topologies that the settings describe, declared on a broker or compared with what is there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeVar

from dlqbatch import logs
from dlqbatch.amqp.origin import Trust
from dlqbatch.broker.access import access_to, connect
from dlqbatch.broker.connection import Connection, Scratch
from dlqbatch.broker.refusals import NO_PERMISSION, mismatch, missing
from dlqbatch.broker.session import look_for
from dlqbatch.broker.versions import LIMITS_DELIVERIES
from dlqbatch.errors import ChannelRefused, TopologyMismatch
from dlqbatch.settings import Settings
from dlqbatch.settings.topologies import default_ladder as ladder_of
from dlqbatch.settings.topologies import topologies
from dlqbatch.topology.kinds import Kind, Ladder, demonstration, whole
from dlqbatch.topology.model import CHANGING, DELIVERY_LIMIT, Binding, Topology

_log = logs.get(__name__)

_DECLARATIONS: Final = "the declarations of the topology"
_Result = TypeVar("_Result")


def declare(connection: Connection, topology: Topology) -> bool:
    """Make what is missing; TopologyMismatch if something is there and differs. Declaring twice changes nothing.

    False: we may not declare, and all of it was only looked for.
    """

    def send(scratch: Scratch) -> None:
        _declare_all(scratch, topology)
        _bind_all(scratch, topology.bindings)

    return _is_allowed(connection, _DECLARATIONS, send, otherwise_look_for=topology)


def is_ready(connection: Connection, topology: Topology, delay_queues: Collection[str]) -> bool:
    """Whether we may declare the topology, all of which is there, as it should be, and bound; in one round trip.

    Makes no queue and no exchange: TopologyMissing if one is missing, TopologyMismatch if one differs. Bindings are
    made again, except those of delay queues: whoever is changing a delay has moved them, and a message that misses one
    comes back to us as unroutable. False: we may not declare, and all of it was only looked for.
    """

    def send(scratch: Scratch) -> None:
        for exchange in topology.exchanges:
            scratch.call_later("exchange_declare", exchange=exchange.name, passive=True)
        for queue in topology.queues:
            scratch.call_later("queue_declare", queue=queue.name, passive=True)
        _declare_all(scratch, topology)
        _bind_all(scratch, (binding for binding in topology.bindings if binding.queue not in delay_queues))

    return _is_allowed(connection, _DECLARATIONS, send, otherwise_look_for=topology)


def may_bind(connection: Connection, bindings: Iterable[Binding]) -> bool:
    """Make bindings that may have gone, in one round trip; TopologyMissing if what they bind is not there."""
    return _is_allowed(connection, "the bindings of the topology", lambda scratch: _bind_all(scratch, bindings))


def compare(connection: Connection, topology: Topology) -> bool:
    """TopologyMissing or TopologyMismatch as `declare` would meet it, without making anything.

    False: we may not declare, and all of it was only looked for.
    """
    look(connection, topology)
    # All of it is there, so that declaring it only compares; bindings cannot be compared, and are left alone.
    return _is_allowed(connection, _DECLARATIONS, lambda scratch: _declare_all(scratch, topology))


def _is_allowed(
    connection: Connection, what: str, send: Callable[[Scratch], None], otherwise_look_for: Topology | None = None
) -> bool:
    """Send what is only answered when it is refused, so that all of it costs one round trip; False: it is forbidden."""
    try:
        with connection.scratch() as scratch:
            send(scratch)
            scratch.finish(what)
    except ChannelRefused as refused:
        if refused.code == NO_PERMISSION:
            if otherwise_look_for is not None:
                _log.info("may not declare the topology, so only looks whether it is there", why=refused.text)
                look(connection, otherwise_look_for)
            return False
        raise missing(refused) or mismatch(refused) or refused from refused
    return True


def _bind_all(scratch: Scratch, bindings: Iterable[Binding]) -> None:
    for binding in bindings:
        scratch.call_later("queue_bind", queue=binding.queue, exchange=binding.exchange, routing_key=binding.key)


def _declare_all(scratch: Scratch, topology: Topology) -> None:
    for exchange in topology.exchanges:
        scratch.call_later("exchange_declare", exchange=exchange.name, exchange_type=exchange.type, durable=True)
    for queue in topology.queues:
        scratch.call_later("queue_declare", queue=queue.name, durable=True, arguments=dict(queue.arguments))


def existing(connection: Connection, queues: Iterable[str]) -> dict[str, int]:
    """The depths of those of the queues that are there."""
    found = {}
    for queue in queues:
        with connection.scratch() as scratch, suppress(ChannelRefused):
            found[queue] = scratch.ready(queue)
    return found


def changing(connection: Connection) -> bool:
    """Whether a delay is being changed, so that to declare anything would undo a step of it."""
    with connection.scratch() as scratch:
        try:
            scratch.look("queue", CHANGING)
        except ChannelRefused as refused:
            # From 4.3 on even a look takes some right: docs/permissions.md.
            if refused.code == NO_PERMISSION:
                _log.warning("cannot see whether a delay is being changed", do=f"give read on {CHANGING}")
            return False
    return True


def look(connection: Connection, topology: Topology) -> None:
    """TopologyMissing names the first exchange or queue that is not there."""
    with connection.scratch() as scratch:
        for exchange in topology.exchanges:
            look_for(scratch, "exchange", exchange.name)
        for queue in topology.queues:
            look_for(scratch, "queue", queue.name)


def kinds_of(settings: Settings) -> tuple[Kind, ...]:
    """Every topology that this deployment keeps."""
    return tuple(topologies(settings).values())


def dead_letter_queues(settings: Settings) -> tuple[str, ...]:
    """Where the dead letters of every topology end, each queue once."""
    return tuple(dict.fromkeys(queue for kind in kinds_of(settings) for queue in kind.dead_letter_queues))


def trust_of(settings: Settings, connection: Connection, ladder: Ladder | None = None) -> Trust:
    """Every topology's own names are ours, and the given ladder's where the settings do not keep it."""
    kinds: list[Kind] = [*kinds_of(settings), *([] if ladder is None else [ladder])]
    return Trust(
        own_queues=frozenset().union(*(kind.own_queues for kind in kinds)),
        own_exchanges=frozenset().union(*(kind.own_exchanges for kind in kinds)),
        origins_allowed=settings.origins_allowed,
        last_death=limits_deliveries(connection),
    )


def matched(connection: Connection, kinds: Iterable[Kind], act: Callable[[Connection, Topology], _Result]) -> _Result:
    """Declare or compare; on a broker that limits deliveries by itself, our queues have to say that they do not."""
    wanted = whole(kinds, unlimited_deliveries=limits_deliveries(connection))
    while True:
        try:
            return act(connection, wanted)
        except TopologyMismatch as error:
            old = next((queue for queue in wanted.queues if queue.name == error.name), None)
            if old is None or error.argument != DELIVERY_LIMIT or error.found != "none":
                raise
            if old.arguments.get(DELIVERY_LIMIT) != -1:
                raise
            # Declared by an older broker, which knew no such argument: a policy can still set it.
            _log.warning(
                "a queue from before RabbitMQ 4.0 drops messages after 20 deliveries",
                queue=error.name,
                do="rabbitmqctl set_policy with delivery-limit -1 on it",
            )
            as_it_is = {name: value for name, value in old.arguments.items() if name != DELIVERY_LIMIT}
            queues = (replace(one, arguments=as_it_is) if one is old else one for one in wanted.queues)
            wanted = replace(wanted, queues=tuple(queues))


def limits_deliveries(connection: Connection) -> bool:
    return connection.version >= LIMITS_DELIVERIES


def apply_topology(settings: Settings, *, with_demonstration: bool = False) -> Ladder:
    """Declare all that the settings describe; idempotent."""
    connection = connect(access_to(settings, "dlqbatch topology"))
    try:
        ladder = ladder_of(settings)
        if changing(connection):
            from dlqbatch.topology.delays import ChangeUnderWay  # noqa: PLC0415  (no drain changes a delay)

            raise ChangeUnderWay
        matched(connection, kinds_of(settings), declare)
        if with_demonstration:
            declare(connection, demonstration(ladder))
        return ladder
    finally:
        connection.close()
