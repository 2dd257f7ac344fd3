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
from dlqbatch.settings.topologies import default_ladder, topologies
from dlqbatch.topology.kinds import Kind, Ladder, demonstration, whole
from dlqbatch.topology.model import CHANGING, DELIVERY_LIMIT, Binding, Topology

_log = logs.get(__name__)

_DECLARATIONS: Final = "the declarations of the topology"
_Result = TypeVar("_Result")


def declare(connection: Connection, topology: Topology) -> bool:
    """Declare the topology; TopologyMismatch if a part is there and differs. Declaring twice changes nothing.

    False: this login may not declare; every part was only looked up.
    """

    def send(scratch: Scratch) -> None:
        _declare_all(scratch, topology)
        _bind_all(scratch, topology.bindings)

    return _is_allowed(connection, _DECLARATIONS, send, otherwise_look_for=topology)


def is_ready(connection: Connection, topology: Topology, delay_queues: Collection[str]) -> bool:
    """Compare a topology that should be there, and bind it, in one round trip.

    No queue and no exchange is made: TopologyMissing if one is missing, TopologyMismatch if one differs. The bindings
    of delay queues are not made: a change of a delay may have moved them, and a message that misses one comes back as
    unroutable. False: this login may not declare; every part was only looked up.
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
    """Make these bindings in one round trip; TopologyMissing if a queue or an exchange of them is not there."""
    return _is_allowed(connection, "the bindings of the topology", lambda scratch: _bind_all(scratch, bindings))


def compare(connection: Connection, topology: Topology) -> bool:
    """Raise the TopologyMissing or TopologyMismatch that `declare` would raise, and make nothing.

    False: this login may not declare; every part was only looked up.
    """
    look(connection, topology)
    # Every part is there, so that declaring only compares. Bindings cannot be compared.
    return _is_allowed(connection, _DECLARATIONS, lambda scratch: _declare_all(scratch, topology))


def _is_allowed(
    connection: Connection, what: str, send: Callable[[Scratch], None], otherwise_look_for: Topology | None = None
) -> bool:
    """Send methods that are answered only when they are refused, in one round trip; False: this login may not."""
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
    """The ready messages of each of these queues that exists."""
    found = {}
    for queue in queues:
        with connection.scratch() as scratch, suppress(ChannelRefused):
            found[queue] = scratch.ready(queue)
    return found


def changing(connection: Connection) -> bool:
    """Whether a delay is being changed: a declaration would undo a step of that."""
    with connection.scratch() as scratch:
        try:
            scratch.look("queue", CHANGING)
        except ChannelRefused as refused:
            # From 4.3 on a passive declaration needs some right on the queue: docs/permissions.md.
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
    """The queues and exchanges of every topology are ours, also those of a ladder that the settings do not describe."""
    kinds: list[Kind] = [*kinds_of(settings), *([] if ladder is None else [ladder])]
    return Trust(
        own_queues=frozenset().union(*(kind.own_queues for kind in kinds)),
        own_exchanges=frozenset().union(*(kind.own_exchanges for kind in kinds)),
        origins_allowed=settings.origins_allowed,
        last_death=limits_deliveries(connection),
        native_retries={policy.queue: policy.delayed_retry.deliveries for policy in whole(kinds).policies},
    )


def matched(connection: Connection, kinds: Iterable[Kind], act: Callable[[Connection, Topology], _Result]) -> _Result:
    """Declare or compare the topologies, with a delivery limit of -1 on a broker that limits deliveries by itself."""
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
            # A broker before 4.0 declared it without this argument; a policy can still set the limit.
            _log.warning(
                "a queue from before RabbitMQ 4.0 drops messages after 20 deliveries",
                queue=error.name,
                do="rabbitmqctl set_policy with delivery-limit -1 on it",
            )
            without_limit = {name: value for name, value in old.arguments.items() if name != DELIVERY_LIMIT}
            queues = (replace(one, arguments=without_limit) if one is old else one for one in wanted.queues)
            wanted = replace(wanted, queues=tuple(queues))


def limits_deliveries(connection: Connection) -> bool:
    return connection.version >= LIMITS_DELIVERIES


def apply_topology(settings: Settings, *, with_demonstration: bool = False) -> Ladder:
    """Declare every topology of the settings. Declaring twice changes nothing."""
    connection = connect(access_to(settings, "dlqbatch topology"))
    try:
        ladder = default_ladder(settings)
        if changing(connection):
            from dlqbatch.topology.change_ttl import ChangeUnderWay  # noqa: PLC0415  (no drain changes a delay)

            raise ChangeUnderWay
        matched(connection, kinds_of(settings), declare)
        if with_demonstration:
            declare(connection, demonstration(ladder))
        return ladder
    finally:
        connection.close()
